"""Bytes of a model's weights: as stored where a header or index says, else from the parameters counted; and as Kvarn
holds them once they are loaded."""

from __future__ import annotations

from kvarn.core.errors import UnknownName
from kvarn.core.geometry import ModelGeometry
from kvarn.core.geometry.model import ParameterCount
from kvarn.planner.ranks import stage_sizes
from kvarn.planner.settings import Settings
from kvarn.planner.terms import Term, estimated, exact

AS_STORED = (None, "native", "auto")
# Bits a weight: those of the linear layers; quantized files keep embeddings, norms and heads wider, hence the range.
_WEIGHT_BITS = {
    "f32": 32.0,
    "bf16": 16.0,
    "f16": 16.0,
    "fp8": 8.0,
    "int8": 8.0,
    "int4": 4.25,
    "nvfp4": 4.5,
    "mxfp4": 4.25,
    "q8_0": 8.5,
    "q6_k": 6.5625,
    "q5_k": 5.5,
    "q5_1": 6.0,
    "q5_0": 5.5,
    "q4_k": 4.5,
    "q4_1": 5.0,
    "q4_0": 4.5,
    "q3_k": 3.4375,
    "q2_k": 2.625,
    "iq4_nl": 4.5,
}
_WEIGHT_ALIASES = {
    "float32": "f32",
    "fp32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "float8_e4m3fn": "fp8",
    "awq": "int4",
    "gptq": "int4",
    "w4a16": "int4",
    "w8a8": "int8",
    "q4_k_m": "q4_k",
    "q4_k_s": "q4_k",
    "q5_k_m": "q5_k",
    "q5_k_s": "q5_k",
    "q3_k_m": "q3_k",
}
WIDE_TYPES = frozenset({"f32", "bf16", "f16"})


def weight_bits(name: str) -> tuple[str, float]:
    """The plain name of a weight format and its bits a weight. Raises UnknownName."""
    key = name.lower()
    key = _WEIGHT_ALIASES.get(key, key)
    if key not in _WEIGHT_BITS:
        raise UnknownName("weight format", name, (*_WEIGHT_BITS, *_WEIGHT_ALIASES))
    return key, _WEIGHT_BITS[key]


def published(geometry: ModelGeometry) -> str:
    """The format of the weights as published."""
    return geometry.weight_format or geometry.dtype


def model_weights(geometry: ModelGeometry, weights: str | None) -> Term:
    """All weights of the model, on however many devices. As stored (header or index) where no format was asked."""
    stored, counted = geometry.stored_weight_bytes, geometry.parameters
    if stored is not None and weights in AS_STORED:
        kinds = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in geometry.weight_bytes)
        return exact("weights", stored, f"as stored: {kinds}")
    if counted is None:
        return Term("weights", 0, "unknown", 0, 0, "the config does not say enough to count parameters")
    name, bits = weight_bits(published(geometry) if weights in AS_STORED else weights)
    nbytes = int(counted.total * bits) // 8
    if name in WIDE_TYPES:
        return exact("weights", nbytes, f"{counted.total:,} parameters x {bits / 8:g} B ({name})")
    tables = (counted.embedding + counted.output) * (16 - bits) / 8
    how = f"{counted.total:,} parameters x {bits:g} bits ({name}); up to all embeddings and heads wider"
    return estimated("weights", nbytes, int(nbytes + max(0.0, tables) + 0.02 * nbytes), how)


# Bits of a weight as Kvarn holds ggml's types: 4-bit codes stay, wider ones take 8; two bytes a scale, two an offset.
_HELD_BITS = {"q4_0": 4.5, "q4_1": 5.0, "q4_k": 5.0, "q5_1": 9.0, "q5_k": 9.0}
_HELD_WIDE, _HELD_WIDEST = 8.5, 9.0


def held_by_kvarn(geometry: ModelGeometry, weights: str | None) -> tuple[Term, float] | None:
    """Weights in Kvarn's memory, and bytes of one weight that a product reads. None where that is as stored.

    As they are ('native'), quantized matrices stay codes and float ones become bfloat16. Asked for in bfloat16 or
    float32, all are multiplied so; a quantized file's embedding then stays in its blocks and is decoded by the row, and
    tied weights have a copy that is laid out for the output's product.
    """
    counted = geometry.parameters
    if counted is None or not counted.embedding:
        return None
    if weights in ("int4", "int8"):
        term = _rounded(geometry, counted, weights)
        return term, term.bytes / counted.total
    if weights not in (*AS_STORED, "bfloat16", "float32"):
        return None
    if weights in AS_STORED and geometry.stored_weight_bytes is not None and quantized(geometry):
        term = _as_codes(geometry)
        return term, term.bytes / counted.total
    width = 4 if weights == "float32" else 2
    head = counted.output or counted.embedding
    products = (counted.layers + counted.experts + head) * width
    stored, blocks = geometry.stored_weight_bytes, quantized(geometry)
    how = f"{counted.layers + counted.experts + head:,} weights of products x {width} B"
    if stored is None or not blocks:
        return exact("weights", products + counted.embedding * width, f"{how} + embedding x {width} B"), float(width)
    table = embedding_bytes(geometry)
    how += f" + embedding in the file's blocks, {table:,} B"
    return estimated("weights", products + table // 2, products + 2 * table, how, products + table), float(width)


def _rounded(geometry: ModelGeometry, counted: ParameterCount, weights: str) -> Term:
    """All matrices rounded to int8 (a scale a row, which is about as long as the model is wide) or int4 (tables as the
    file's blocks, or 8 bits). Tied tables are held once."""
    if weights == "int8":
        nbytes = int(counted.total * (1 + 2 / max(1, geometry.hidden_size)))
        return estimated("weights", nbytes, int(1.02 * nbytes), f"{counted.total:,} weights of 8 bits, a scale a row")
    table = embedding_bytes(geometry) if quantized(geometry) else int(counted.embedding * _HELD_WIDE) // 8
    tables = table * (2 if counted.output else 1)
    four = counted.layers + counted.experts
    how = f"{four:,} weights of 4 bits with scale and offset for each 32 + tables of {tables:,} B"
    return estimated("weights", int(four * 4.5) // 8 + tables, four * 5 // 8 + tables, how, four * 5 // 8 + tables)


def _as_codes(geometry: ModelGeometry) -> Term:
    """A file's quantized types as codes. Matrices that are multiplied together take the widest form among them."""
    types = {name.lower(): nbytes for name, nbytes in geometry.weight_bytes}
    coded = {name: nbytes for name, nbytes in types.items() if name not in WIDE_TYPES}
    rest = sum(types.values()) - sum(coded.values())
    grown = {n: int(b * _HELD_BITS.get(n, _HELD_WIDE) / _WEIGHT_BITS.get(n, _HELD_WIDE)) for n, b in coded.items()}
    nbytes = rest + sum(grown.values())
    how = "codes of " + ", ".join(f"{name} {held:,} B" for name, held in grown.items())
    if len(coded.keys() - {"q8_0"}) <= 1:
        return exact("weights", nbytes, how)
    widest = rest + sum(int(b * _HELD_WIDEST / _WEIGHT_BITS.get(n, _HELD_WIDEST)) for n, b in coded.items())
    return estimated("weights", nbytes, widest, how, nbytes)


def embedding_bytes(geometry: ModelGeometry) -> int:
    """Bytes of a quantized file's embedding: of the widest quantized type of which the file holds enough."""
    wanted = geometry.parameters.embedding if geometry.parameters else 0
    fits = []
    for name, nbytes in geometry.weight_bytes:
        bits = _WEIGHT_BITS.get(name.lower(), 0.0)
        size = int(wanted * bits) // 8
        if name.lower() not in WIDE_TYPES and 0 < size <= nbytes:
            fits.append(size)
    return max(fits, default=int(wanted * 8.5) // 8)


def quantized(geometry: ModelGeometry) -> bool:
    """Whether the weights' file holds ggml's quantized blocks."""
    return any(name.lower().startswith(("q", "iq", "tq")) for name, _ in geometry.weight_bytes)


def rank_weights(geometry: ModelGeometry, whole: Term, stage: int, settings: Settings) -> Term:
    """One rank's share: a stage's layers, the embedding on the first and the head on the last, divided by tp."""
    tp, pp, counted = settings.tp, settings.pp, geometry.parameters
    if tp * pp == 1 or whole.certainty == "unknown":
        return whole
    share = 1 / (tp * pp)
    if counted is not None and pp > 1:
        layers = stage_sizes(len(geometry.layers), pp)[stage] / len(geometry.layers)
        part = (counted.layers + counted.experts) * layers
        part += counted.embedding if stage == 0 else 0
        part += (counted.output or counted.embedding) if stage == pp - 1 else 0
        share = part / counted.total / tp
    central = int(whole.bytes * share)
    how = f"{share:.4f} of {whole.bytes:,} B: divided over {tp} x {pp} ranks; norms and routers are kept by each"
    return estimated("weights", int(whole.low * share), int(whole.high * share * 1.02), how, central)
