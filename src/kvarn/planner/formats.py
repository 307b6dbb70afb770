"""How engines store cached numbers: bytes a row, with every scale counted. No arithmetic of the cache lives elsewhere.

A row is what one token keeps of one layer's K (or V): `heads * dim` numbers. Sources: ggml's block structures for the
q and iq names; vLLM's kv_cache_interface (per-token-head scales are one float32 a head and side; NVFP4 is 4 bits and
one fp8 scale per 16 numbers); the fp8_ds_mla record is described with vLLM's FlashMLA sparse backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarn.core.errors import IncompatiblePlan, UnknownName


@dataclass(frozen=True, slots=True)
class RowFormat:
    """`group` numbers take `group_bytes`; `head_bytes` a head and `row_bytes` a row come on top, for scales kept
    apart."""

    name: str
    group: int
    group_bytes: int
    head_bytes: int = 0
    row_bytes: int = 0

    def row(self, heads: int, dim: int) -> int:
        """Bytes of one token's row of `heads` heads of `dim` numbers. Raises IncompatiblePlan where a row is not a
        whole number of groups, as the engines do."""
        numbers = heads * dim
        if numbers % self.group:
            raise IncompatiblePlan(
                f"{self.name} stores groups of {self.group} numbers; a row has {heads} x {dim} = {numbers}",
                fixes=("choose a KV format without groups, such as fp8 or f16",),
            )
        return numbers // self.group * self.group_bytes + heads * self.head_bytes + (self.row_bytes if numbers else 0)

    def formula(self, heads: int, dim: int) -> str:
        """The row's bytes with factors put in."""
        per = f"{self.group_bytes} B" if self.group == 1 else f"{self.group_bytes}/{self.group} B"
        scales = f" + {heads} x {self.head_bytes} B scales" if self.head_bytes else ""
        return f"{heads} x {dim} x {per}{scales}"


ROW_FORMATS = {
    f.name: f
    for f in (
        RowFormat("f32", 1, 4),
        RowFormat("f16", 1, 2),
        RowFormat("bf16", 1, 2),
        RowFormat("fp8", 1, 1),
        RowFormat("int8", 1, 1),
        RowFormat("q8_0", 32, 34),
        RowFormat("q8_1", 32, 36),
        RowFormat("q6_0", 32, 26),
        RowFormat("q5_1", 32, 24),
        RowFormat("q5_0", 32, 22),
        RowFormat("q4_1", 32, 20),
        RowFormat("q4_0", 32, 18),
        RowFormat("iq4_nl", 32, 18),
        RowFormat("q8_KV", 1, 1, row_bytes=8),
        RowFormat("int8_per_token_head", 1, 1, head_bytes=4),
        RowFormat("fp8_per_token_head", 1, 1, head_bytes=4),
        RowFormat("int4_per_token_head", 2, 1, head_bytes=4),
        RowFormat("nvfp4", 16, 9),
        RowFormat("mxfp4", 32, 17),
    )
}
_ALIASES = {
    "float32": "f32",
    "fp32": "f32",
    "float": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "float8_e4m3fn": "fp8",
    "fp8_inc": "fp8",
    "fp4_e2m1": "nvfp4",
    "q8": "q8_0",
    "q4": "q4_0",
}


@dataclass(frozen=True, slots=True)
class LatentRecord:
    """An MLA token whose latent and rope parts are stored differently, at DeepSeek's dims (latent 512, rope 64)."""

    name: str
    nbytes: int
    formula: str


LATENT_RECORDS = {
    r.name: r
    for r in (
        LatentRecord("fp8_ds_mla", 656, "512 x 1 B + 512/128 x 4 B scales + 64 x 2 B rope in bf16"),
        LatentRecord("nvfp4_ds_mla", 432, "512 x 1/2 B + 512/16 x 1 B scales + 16 B + 64 x 2 B rope in bf16"),
    )
}
_RECORD_DIMS = (512, 64)


def known_row(name: str) -> bool:
    """Whether `row_format` knows the name."""
    return name in ROW_FORMATS or name.lower() in ROW_FORMATS or name.lower() in _ALIASES


def row_format(name: str) -> RowFormat:
    """The format of that name or alias. Raises UnknownName."""
    key = _ALIASES.get(name.lower(), name)
    if key not in ROW_FORMATS:
        key = key.lower()
    if key not in ROW_FORMATS:
        raise UnknownName("KV format", name, (*ROW_FORMATS, *LATENT_RECORDS, *_ALIASES))
    return ROW_FORMATS[key]


def latent_row(name: str, latent_dim: int, rope_dim: int) -> int:
    """Bytes of one token of one MLA layer: the latent vector and the rope key, once, whatever the heads and ranks.
    Raises UnknownName, and IncompatiblePlan for a record made for other dims."""
    record = LATENT_RECORDS.get(name.lower())
    if record is None:
        return row_format(name).row(1, latent_dim + rope_dim)
    if (latent_dim, rope_dim) != _RECORD_DIMS:
        raise IncompatiblePlan(
            f"{name} is laid out for a latent of 512 and a rope key of 64; this model has {latent_dim} and {rope_dim}",
            fixes=("choose fp8 or bf16",),
        )
    return record.nbytes


def latent_formula(name: str, latent_dim: int, rope_dim: int) -> str:
    """The MLA token's bytes with factors put in."""
    record = LATENT_RECORDS.get(name.lower())
    return record.formula if record else row_format(name).formula(1, latent_dim + rope_dim)


def split_sides(text: str) -> tuple[str, str]:
    """The K and V format names of 'q8_0', 'k=q8_0,v=f16' or 'q8_0/f16'. Raises UnknownName and IncompatiblePlan."""
    if "/" in text:
        k, v = text.split("/", 1)
    elif "=" in text:
        sides = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
        if set(sides) != {"k", "v"}:
            raise IncompatiblePlan(
                f"KV format {text!r} does not name both sides", fixes=("write NAME or k=NAME,v=NAME",)
            )
        k, v = sides["k"], sides["v"]
    else:
        k = v = text
    return k.strip(), v.strip()
