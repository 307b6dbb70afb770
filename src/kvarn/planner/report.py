"""A plan as text: verdict first, an additive table, capacity, speed, what was assumed. Plain text; colour is a style on
single lines, so that a pipe gets the same words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from kvarn.planner.result import Plan
from kvarn.planner.sizes import show_both, show_bytes, show_seconds, show_tokens
from kvarn.planner.terms import Term

_FIGURE = re.compile(r"^(?:[-+]?[\d.,]+(?:e[+-]?\d+)?\s?(?:x|B|[KMGT]i?B|s|ms|us|ns|tokens/s|TFLOP|%)?|-|\?|no limit)$")
VERDICTS = {"fits": "FITS", "does_not_fit": "DOES NOT FIT", "unknown": "CANNOT TELL"}


def table(rows: Iterable[Sequence[str]], indent: str = "  ") -> list[str]:
    """Rows in columns; a column that holds figures below its head is set right."""
    cells = [[str(c) for c in row] for row in rows]
    if not cells:
        return []
    columns = [[row[i] if i < len(row) else "" for row in cells] for i in range(max(len(r) for r in cells))]
    widths = [max(map(len, column)) for column in columns]
    right = [all(not c or _FIGURE.match(c) for c in column[1:]) and any(column[1:]) for column in columns]
    lines = []
    for row in cells:
        parts = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=False)]
        lines.append((indent + "  ".join(parts)).rstrip())
    return lines


def _range(term: Term) -> str:
    if term.certainty == "estimated":
        return f"estimated, {show_bytes(term.low)} to {show_bytes(term.high)}"
    return term.certainty


def summary(plan: Plan) -> list[str]:
    """The verdict and one line of what was planned."""
    device = f" on {plan.device.count} x {plan.device.name}" if plan.device else ""
    split = f", tp {plan.tp} x pp {plan.pp} x dp {plan.dp}" if plan.tp * plan.pp * plan.dp > 1 else ""
    what = f"{plan.model} ({plan.architecture}), engine {plan.engine}{device}{split}"
    asked = f"{plan.sequences} sequence{'s' * (plan.sequences > 1)} of {show_tokens(plan.context)} tokens"
    return [
        f"{VERDICTS[plan.verdict]}: {plan.reason}",
        "",
        what,
        f"{asked}, K in {plan.kv.k_format}, V in {plan.kv.v_format}",
    ]


def _term_row(term: Term) -> tuple[str, str, str, str]:
    if term.certainty == "unknown":
        return term.name, "?", "?", "unknown"
    return term.name, f"{term.bytes:,} B", show_bytes(term.bytes), _range(term)


def memory_table(plan: Plan) -> list[str]:
    """One device's terms; with what is free they add up to its memory."""
    title = "Memory of one device" if plan.tp * plan.pp * plan.dp == 1 else "Memory of the fullest device"
    rows = [_term_row(t) for t in plan.terms]
    if plan.device:
        free = plan.device.free_bytes
        rows.append(("free" if free >= 0 else "missing", f"{free:,} B", show_bytes(free), "what is left"))
        total = plan.device.memory_bytes
        rows.append(("device", f"{total:,} B", show_bytes(total), f"= {show_both(total).split(' = ')[-1]}, the sum"))
    else:
        total = sum(t.bytes for t in plan.terms)
        known = " of what is known" * any(t.certainty == "unknown" for t in plan.terms)
        rows.append((f"sum{known}", f"{total:,} B", show_bytes(total), show_both(total).split(" = ")[-1]))
    lines = [title, *table(rows)]
    if plan.device:
        lines.append(f"  the process itself: {show_both(plan.process_bytes)} at its peak")
    return lines


def kv_lines(plan: Plan) -> list[str]:
    """Cache bytes a token, a sequence and in all; a rank's beside them where the model is split."""
    kv, rows = plan.kv, []
    for name, whole, rank in (
        ("a token more", kv.bytes_per_token, kv.rank.bytes_per_token),
        (f"a sequence of {plan.context:,}", kv.bytes_per_sequence, kv.rank.bytes_per_sequence),
        (f"all {plan.sequences:,}", kv.bytes_total, kv.rank.bytes_total),
    ):
        row = [name, f"{whole:,} B", show_both(whole)]
        rows.append([*row, f"a rank: {rank:,} B"] if plan.tp * plan.pp * plan.dp > 1 else row)
    if kv.bytes_per_token_in_window != kv.bytes_per_token:
        inside = kv.bytes_per_token_in_window
        rows.insert(1, ["a token inside every window", f"{inside:,} B", show_both(inside)])
    return ["KV cache", *table(rows)]


def capacity_lines(plan: Plan) -> list[str]:
    """What fits into the memory that the engine leaves for its cache."""
    c = plan.capacity
    if plan.cache_bytes is None or c.tokens is None:
        return []
    rows = [("memory for the cache", f"{show_both(plan.cache_bytes)} ({plan.cache_how})")]
    if c.blocks is not None:
        rows.append(("blocks", f"{c.blocks:,}" + (f" of {c.block_tokens:,} tokens" if c.block_tokens else "")))
    rows.append(("tokens", f"{c.tokens:,} as {plan.engine} counts them"))
    if c.max_context is not None:
        each = "" if plan.sequences == 1 else f" for each of {plan.sequences:,} sequences"
        made_for = f"; the model was made for {show_tokens(plan.model_context)}" if plan.model_context else ""
        rows.append(("longest context", f"{show_tokens(c.max_context)} tokens{each}{made_for}"))
    rows.append(("sequences at once", f"{c.concurrency or 0:,.2f} of {show_tokens(plan.context)} tokens"))
    return ["Capacity", *table(rows)]


def time_lines(plan: Plan) -> list[str]:
    """Prefill, decode and tokens/s against batch."""
    t = plan.time
    if t.decode_s_per_token is None or t.prefill_s is None:
        return []
    kind = "at best (roofline)" if t.basis == "roofline" else "predicted for this machine"
    rows = [
        (
            "time to first token",
            f"{show_seconds(t.prefill_s)} for {show_tokens(plan.context)} tokens",
            _bound(t.prefill_bound_by),
        ),
        ("time per token", f"{show_seconds(t.decode_s_per_token)} at batch {plan.batch}", _bound(t.bound_by)),
    ]
    if t.batches:
        rows.append(("", "", ""))
    lines = [f"Speed, {kind}", *table(rows)]
    shown = [b for b in t.batches if b.batch in (1, 4, 16, 64, 256)]
    lines += table(
        (
            f"batch {b.batch}",
            f"{b.tokens_per_s:,.0f} tokens/s",
            show_seconds(b.step_s) + " a step",
            _bound(b.bound_by),
            _fit(b.fits),
        )
        for b in shown
    )
    return [line for line in lines if line.strip()]


def _bound(name: str | None) -> str:
    return f"bound by {name}" if name else ""


def _fit(fits: bool | None) -> str:
    return "" if fits is None else "fits" if fits else "does not fit"


def layer_lines(plan: Plan) -> list[str]:
    """The groups of equal layers."""
    rows = [
        (
            f"{g.layers} x {g.kind}",
            g.shape,
            f"{g.bytes_per_token:,} B/token",
            f"{g.state_bytes:,} B state" if g.state_bytes else "",
        )
        for g in plan.groups
    ]
    return ["Layers", *table(rows)]


def log_lines(plan: Plan) -> list[str]:
    """What the engine would log."""
    return [f"{plan.engine} would log", *(f"  {line}" for line in plan.lines)] if plan.lines else []


def note_lines(plan: Plan) -> list[str]:
    """Provenance, assumptions and notes."""
    p = plan.provenance
    lines = [f"  model: {p.model}", f"  hardware: {p.hardware}", f"  rules: {p.engine}"]
    lines += [f"  note: {text}" for text in (*plan.notes, *p.assumptions)]
    return ["From", *lines]


def render(plan: Plan) -> str:
    """The whole report, without advice."""
    parts = [
        summary(plan),
        memory_table(plan),
        kv_lines(plan),
        capacity_lines(plan),
        time_lines(plan),
        layer_lines(plan),
    ]
    parts += [log_lines(plan), note_lines(plan)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def compare(plans: Sequence[Plan]) -> str:
    """Plans side by side, one column each."""

    def cell(n: int | float | None, unit: str = "") -> str:
        return "?" if n is None else f"{n:,.2f}{unit}" if isinstance(n, float) else f"{n:,}{unit}"

    rows: list[list[str]] = [["", *(p.model for p in plans)]]
    rows.append(["engine", *(p.engine for p in plans)])
    rows.append(["verdict", *(VERDICTS[p.verdict] for p in plans)])
    rows.append(["settings", *(f"tp {p.tp} pp {p.pp}, K {p.kv.k_format} V {p.kv.v_format}" for p in plans)])
    rows.append(["weights", *(show_bytes(p.weights.bytes) for p in plans)])
    rows.append(["parameters", *(cell(p.weights.parameters) for p in plans)])
    rows.append(["KV a token", *(f"{p.kv.bytes_per_token:,} B" for p in plans)])
    rows.append(["KV a sequence", *(show_bytes(p.kv.bytes_per_sequence) for p in plans)])
    rows.append([f"KV of {plans[0].sequences}", *(show_bytes(p.kv.bytes_total) for p in plans)])
    rows.append(["memory for the cache", *("?" if p.cache_bytes is None else show_bytes(p.cache_bytes) for p in plans)])
    rows.append(["longest context", *(cell(p.capacity.max_context) for p in plans)])
    rows.append(["sequences at once", *(cell(p.capacity.concurrency) for p in plans)])
    rows.append(["first token", *("?" if p.time.prefill_s is None else show_seconds(p.time.prefill_s) for p in plans)])
    decode = ["?" if p.time.decode_s_per_token is None else show_seconds(p.time.decode_s_per_token) for p in plans]
    rows.append(["time per token", *decode])
    rows.append(["bound by", *(p.time.bound_by or "?" for p in plans)])
    rows.append(["context", *(show_tokens(p.context) for p in plans)])
    return "\n".join(table(rows, indent=""))
