"""Every formula of a plan with its factors put in, so that a slip is visible. FACTS: 2 x layers x KV heads x head dim
x tokens x bytes is the whole of it for plain attention; what differs from model to model is said beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from kvarn.core.specs import LayerKind, LayerSpec
from kvarn.planner.case import Case, read_bytes
from kvarn.planner.formats import LATENT_RECORDS, latent_formula, row_format
from kvarn.planner.profiles.base import Split
from kvarn.planner.ranks import with_compressed
from kvarn.planner.report import table
from kvarn.planner.result import Plan
from kvarn.planner.roofline import attention_flops, decode_work, prefill_work, weights_seen
from kvarn.planner.sizes import GIB, show_both, show_bytes, show_tokens
from kvarn.planner.words import attention_name

GROWTH_TOKENS = (128, 1024, 8192, 65536)


def _unique(layers: tuple[LayerSpec, ...]) -> dict[LayerSpec, int]:
    return Counter(layers)


def one_layer(case: Case, spec: LayerSpec) -> Split:
    """Bytes a token of one layer in the plan's formats."""
    return case.profile.cache((replace(spec, window_tokens=None, chunk_tokens=None),), case.settings).growth()


def _side(name: str, heads: int, dim: int, nbytes: int) -> str:
    try:
        return f"{row_format(name).formula(heads, dim)} = {nbytes:,} B"
    except Exception:
        per = nbytes / (heads * dim)
        return f"{heads} x {dim} x {per:.4g} B ({name}, scales counted by the block) = {nbytes:,} B"


def layer_formula(case: Case, spec: LayerSpec) -> list[str]:
    """One layer's bytes a token."""
    s, each = case.settings, one_layer(case, spec)
    if spec.kind is LayerKind.LATENT:
        name = s.kv_k or "bf16"
        known = name.lower() in LATENT_RECORDS or name in (
            "f32",
            "f16",
            "bf16",
            "fp8",
            "bfloat16",
            "float32",
            "float16",
        )
        formula = (
            latent_formula(name, spec.latent_dim, spec.rope_dim)
            if known
            else f"{spec.latent_dim} + {spec.rope_dim} in {name}"
        )
        return [f"latent and rope key, once for all heads: {formula} = {each.total:,} B a token"]
    if spec.kind is LayerKind.SHARED:
        return [f"reads the cache of layer {spec.shares_layer}: 0 B"]
    if spec.kind is not LayerKind.ATTENTION:
        return []
    return [
        f"K: {_side(s.kv_k or '', spec.kv_heads, spec.k_dim, each.k)}",
        f"V: {_side(s.kv_v or '', spec.kv_heads, spec.v_dim, each.v)}",
    ]


def cache_formulas(case: Case, plan: Plan) -> list[str]:
    """The cache from layers to batch."""
    lines = ["Cache, factor by factor (one device, whole model)"]
    for spec, n in _unique(with_compressed(case.geometry.layers)).items():
        each = one_layer(case, spec).total if spec.shares_layer is None else 0
        lines.append(f"  {n} layers of {attention_name(spec)}: {each:,} B a token each")
        lines += [f"    {text}" for text in layer_formula(case, spec)]
        for tensor in spec.state:
            lines.append(
                f"    {tensor.name} state: {tensor.elements:,} x {tensor.dtype} = {tensor.nbytes:,} B a sequence"
            )
        if spec.window_tokens and spec.shares_layer is None:
            lines.append(
                f"    of the newest {spec.window_tokens:,} tokens: {each * spec.window_tokens:,} B, then constant"
            )
    plain = _plain(case, plan)
    return lines + plain + [f"  {name}: {text}" for name, text in plan.details]


def _plain(case: Case, plan: Plan) -> list[str]:
    """The well-known one-line formula where it holds, else the sum."""
    kinds, s, kv = list(_unique(case.geometry.layers)), case.settings, plan.kv
    lines = []
    if (
        len(kinds) == 1
        and kinds[0].kind is LayerKind.ATTENTION
        and not kinds[0].window_tokens
        and kv.k_format == kv.v_format
    ):
        spec = kinds[0]
        per = kv.bytes_per_token / (2 * len(case.geometry.layers) * spec.kv_heads * spec.k_dim)
        if spec.k_dim == spec.v_dim:
            lines.append(
                f"  2 x {len(case.geometry.layers)} layers x {spec.kv_heads} KV heads x {spec.k_dim} dim x {per:g} B = "
                f"{kv.bytes_per_token:,} B a token"
            )
    else:
        lines.append(f"  all layers whose cache grows with the context: {kv.bytes_per_token:,} B a token more")
    lines.append(
        f"  a sequence of {show_tokens(s.context_tokens)} tokens: {kv.bytes_per_sequence:,} B = "
        f"{show_both(kv.bytes_per_sequence)}"
    )
    lines.append(
        f"  x {s.sequences:,} sequences = {kv.bytes_total:,} B = {show_both(kv.bytes_total)} "
        f"(K {kv.k_bytes:,} + V {kv.v_bytes:,} + state {kv.state_bytes:,})"
    )
    if s.tp * s.pp > 1:
        lines.append(
            f"  a rank of tp {s.tp} x pp {s.pp}: KV heads divided by {s.tp} (at least one), layers by {s.pp}: "
            f"{kv.rank.bytes_per_token:,} B a token, {kv.rank.bytes_total:,} B in all"
        )
    return lines


def counterfactuals(case: Case, plan: Plan) -> list[str]:
    """The same model as MHA, GQA, MQA and MLA, beside each other."""
    attention = [s for s in case.geometry.layers if s.kind in (LayerKind.ATTENTION, LayerKind.LATENT)]
    if not attention:
        return []
    record = (case.settings.kv_k or "").lower() in LATENT_RECORDS
    plain = replace(case, settings=replace(case.settings, kv_k="bf16", kv_v="bf16")) if record else case
    widest = max(attention, key=lambda s: s.query_heads)
    queries, dim = max(1, widest.query_heads), widest.k_dim or 128
    dim = dim if widest.kind is LayerKind.ATTENTION else 128
    n = len(attention)
    rows = [("", "KV heads", "B/token", f"at {plan.context:,}", "")]
    sizes = {f"MHA, {queries} KV heads": queries, "GQA, 8 KV heads": 8, "GQA, 4 KV heads": 4, "MQA, 1 KV head": 1}
    own = plan.kv.bytes_per_token
    for name, heads in sizes.items():
        if queries % heads or heads > queries:
            continue
        spec = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim, query_heads=queries)
        total = n * one_layer(plain, spec).total
        rows.append((name, f"{heads}", f"{total:,}", show_bytes(total * plan.context), _ratio(total, own)))
    latent = 576 * 2 * n
    rows.append(
        ("MLA, latent 512 + rope 64 (bf16)", "-", f"{latent:,}", show_bytes(latent * plan.context), _ratio(latent, own))
    )
    rows.append(
        (
            f"this model ({attention_name(widest)})",
            f"{widest.kv_heads or '-'}",
            f"{own:,}",
            show_bytes(own * plan.context),
            "1.00x",
        )
    )
    return [f"{n} attention layers with {queries} query heads of {dim}, side by side (no windows)", *table(rows)]


def _ratio(a: int, b: int) -> str:
    return f"{a / b:.2f}x" if b else ""


def work_growth(case: Case) -> list[str]:
    """Work of generating N tokens with and without a cache: attention O(N^2) against O(N^3), the rest O(N) against
    O(N^2)."""
    g = case.geometry
    multiplied, _ = weights_seen(g, 1)
    if not multiplied:
        return []
    rows = [("N tokens", "with a cache", "without", "ratio", "attention alone, with / without")]
    for n in GROWTH_TOKENS:
        dense, attention = 2 * multiplied * n, attention_flops(g.layers, 0, n)
        again = 2 * multiplied * n * (n + 1) / 2
        attention_again = _attention_again(case, n)
        total, without = dense + attention, again + attention_again
        rows.append(
            (
                f"{n:,}",
                f"{total / 1e12:,.3g} TFLOP",
                f"{without / 1e12:,.3g} TFLOP",
                f"{without / total:,.0f}x",
                f"{attention / 1e12:,.3g} / {attention_again / 1e12:,.3g} TFLOP",
            )
        )
    how = (
        "a step without a cache computes all N tokens again; with one, one token's projections and N reads in attention"
    )
    return ["Work of generating N tokens one by one", *table(rows), f"  {how}"]


def _attention_again(case: Case, n: int) -> int:
    """Sum over steps t = 1..n of a whole prefill of t tokens."""
    dims = attention_flops(case.geometry.layers, 0, 1)
    if not any(s.window_tokens or s.chunk_tokens for s in case.geometry.layers):
        return dims * n * (n + 1) * (n + 2) // 6
    points = [max(1, n * i // 16) for i in range(17)]
    return sum(attention_flops(case.geometry.layers, 0, p) for p in points[1:]) * n // 16


def time_formulas(case: Case, plan: Plan) -> list[str]:
    """Prefill FLOPs and decode bytes."""
    g, s = case.geometry, case.settings
    if g.parameters is None:
        return []
    per = case.weight_width
    multiplied, read = weights_seen(g, s.batch)
    first = prefill_work(g, s, s.context_tokens, per)
    step = decode_work(g, s, s.batch, s.context_tokens, per, read_bytes(case, s.context_tokens))
    attention = attention_flops(g.layers, 0, s.context_tokens)
    lines = [
        "Time",
        f"  prefill: 2 x {multiplied:,.0f} weights x {s.context_tokens:,} tokens + attention {attention:,} + head "
        f"2 x {g.vocab_size:,} x {g.hidden_size:,} = {first.flops:.4g} FLOP",
        f"  decode step of batch {s.batch}: weights {read:,.0f} x {per:.4g} B = {step.weight_bytes:,.0f} B, cache "
        f"{s.batch} x {step.kv_bytes / s.batch:,.0f} B = {step.kv_bytes:,.0f} B",
        f"  decode intensity: {step.flops / max(1.0, step.weight_bytes + step.kv_bytes):.2f} FLOP a byte",
    ]
    if plan.time.decode_s_per_token:
        lines.append("  each takes the longer of FLOPs / peak FLOP/s and bytes / bandwidth")
    return lines


def weight_formula(plan: Plan) -> list[str]:
    """Weights and the other terms of the device."""
    lines = ["Memory of the fullest device, term by term"]
    return lines + [f"  {t.name}: {t.bytes:,} B ({t.certainty})" + (f": {t.how}" if t.how else "") for t in plan.terms]


def explain(case: Case, plan: Plan) -> str:
    """All of it."""
    parts = [cache_formulas(case, plan), counterfactuals(case, plan), weight_formula(plan), time_formulas(case, plan)]
    parts += [work_growth(case), _units()]
    return "\n\n".join("\n".join(p) for p in parts if p)


def _units() -> list[str]:
    return ["Units", f"  1 GiB = 2^30 = {GIB:,} B; 1 GB = 10^9 B; k tokens are 1,024"]
