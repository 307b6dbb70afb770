"""Compare the planner with publicly reported figures and write docs/planner_errors.md.

Each record of tests/data/kv_ground_truth.jsonl holds a model's geometry, an engine, its settings and what it printed. A
record becomes a geometry, settings and a log by general rules only; then `kvarn.planner.logs.compare_log` judges it:
whole counts exactly, sizes within half a unit of the last printed digit (and of the printed memory they follow from).

Usage: python scripts/planner_corpus.py [--check] [FILE]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvarn.core.errors import KvarnError
from kvarn.core.geometry import ModelGeometry
from kvarn.core.specs import LayerSpec, StateTensor
from kvarn.planner.compute import Case, build_case
from kvarn.planner.engines import load_engine
from kvarn.planner.logs import Compared, Logged, compare_log, read_figure
from kvarn.planner.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "data" / "kv_ground_truth.jsonl"
TABLE = ROOT / "docs" / "planner_errors.md"

# Engines of the corpus -> profile. Tools without a profile of their own follow the laws of the engine they plan for.
ENGINES = {
    "llama.cpp": "llama.cpp",
    "ik_llama.cpp": "llama.cpp",
    "ollama (llama.cpp)": "llama.cpp",
    "gguf-parser": "llama.cpp",
    "ollama estimator": "llama.cpp",
    "llama-toolchest estimator": "llama.cpp",
    "ollama": "ollama",
    "sglang": "sglang",
    "tensorrt-llm": "tensorrt-llm",
    "mlc-llm": "mlc",
}
# Reported names -> figures of the profiles.
FIGURES = {
    "gpu_blocks": "blocks",
    "num_gpu_blocks": "blocks",
    "primary blocks": "blocks",
    "cpu_blocks": "cpu_blocks",
    "gpu_kv_cache_tokens": "tokens",
    "tokens": "tokens",
    "max_concurrency": "concurrency",
    "kv_needed_for_max_model_len": "needed",
    "estimated_max_model_len": "estimated_length",
    "attention_block": "block_tokens",
    "attn_block_size": "block_tokens",
    "a_bytes_per_token": "rate",
    "kv_size": "kv",
    "KV size": "kv",
    "KVCache": "kv",
    "allocated": "kv",
    "K size": "k",
    "V size": "v",
    "K": "k",
    "K (f16)": "k",
    "V (f16)": "v",
    "V": "v",
    "full": "full",
    "SWA": "window",
    "c^KV": "k",
    "kv^T": "v",
    "recurrent state": "state",
    "R": "conv_state",
    "S": "ssm_state",
    "conv_state": "conv_state",
    "ssm_state": "ssm_state",
    "MTP draft KV": "draft",
    "state per slot": "state",
    "memory.required.kv": "required_kv",
    "blocks": "blocks",
    "memory": "pool",
    "required": "held",
    "bf16 tokens": "tokens",
    "expected_by_reporter": "kv",
    "blocks_per_conv_group_per_request": "window_blocks",
}
UNSTATED_TOKENS = 131072
SHAPE = ("num_kv_heads", "head_dim", "sliding_window")
_FIGURE = re.compile(r"^~?([\d,]+(?:\.\d+)?)\s*(GiB|MiB|KiB|GB|MB|kB|B|x)?\b")


@dataclass(frozen=True)
class Judged:
    """A record and how its figures came out."""

    record: dict[str, Any]
    figures: tuple[Compared, ...]
    rate: tuple[float, int, int] | None
    error: str = ""

    @property
    def rate_agrees(self) -> bool:
        """The expected bytes a token are those of the growing layers, or of all."""
        return self.rate is not None and self.rate[0] in self.rate[1:]

    @property
    def agrees(self) -> bool:
        """All figures that could be computed agree, and there is one (the rate a token counts as one)."""
        found = [f.agrees for f in self.figures if f.agrees is not None]
        return not self.error and all(found) and (bool(found) or self.rate_agrees)


def text_of(record: dict[str, Any]) -> str:
    """All that a record says in words, where some inputs stand."""
    reported = " ".join(f"{k} {v}" for k, v in record["reported"].items())
    return f"{record['id']} {record['model']} {record['kv_dtype']} {record['n_seqs_or_cells']} {reported}"


def layers_of(config: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """Layer specs of a record's config."""
    heads, dim = config.get("num_kv_heads", 0), config.get("head_dim", 0)
    queries = config.get("num_attention_heads", heads)
    if {"kv_lora_rank", "record_bytes", "mla_layers", "layers_with_mla"} & set(config):
        expanded = {"k_dim": config.get("qk_head_dim", 0), "v_dim": config.get("v_head_dim", 0)}
        index = 128 if config.get("indexer_bytes") else 0
        spec = LayerSpec(
            latent_dim=config.get("kv_lora_rank", 512),
            rope_dim=config.get("qk_rope_head_dim", 64),
            query_heads=config.get("num_attention_heads", 128),
            index_dim=index,
            **expanded,
        )
        return (spec,) * next(config[n] for n in ("mla_layers", "layers_with_mla", "layers") if n in config)
    plain = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim, query_heads=queries or heads)
    if "sliding_layers" in config:
        return _windowed(config, plain)
    if "gdn_layers" in config or "gdn_value_heads" in config:
        return (plain,) * config["full_layers"] + (_delta_net(config),) * config["gdn_layers"]
    if "d_inner" in config:
        inner, columns = config["d_inner"], config["conv_kernel"] - 1
        state = (
            StateTensor("conv", inner * columns, "float32", columns),
            StateTensor("ssm", inner * config["ssm_state"], "float32"),
        )
        return (LayerSpec(state=state),) * config["layers"]
    n = config.get("attention_layers", config.get("layers"))
    if n is None and "sliding_window" in config:  # a rule that is quoted without its model
        return (replace(plain, kv_heads=1, query_heads=1, k_dim=1, v_dim=1, window_tokens=config["sliding_window"]),)
    return (plain,) * (config["layers"] if n is None else n)


def _windowed(config: dict[str, Any], plain: LayerSpec) -> tuple[LayerSpec, ...]:
    heads, dim = config.get("global_kv_heads", plain.kv_heads), config.get("global_head_dim", plain.k_dim)
    own, width = config.get("sliding_kv_heads", plain.kv_heads), config.get("sliding_head_dim", plain.k_dim)
    if not heads or not dim:
        raise KeyError("num_kv_heads, head_dim")
    window = config.get("sliding_window", 128)
    full = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim, query_heads=heads)
    local = LayerSpec(kv_heads=own, k_dim=width, v_dim=width, query_heads=own, window_tokens=window)
    return (local,) * config["sliding_layers"] + (full,) * config["full_layers"]


def _delta_net(config: dict[str, Any]) -> LayerSpec:
    """Gated DeltaNet; what a record leaves out is Qwen3-Next's class default (16 key heads of 128, kernel 4)."""
    values, keys = config.get("gdn_value_heads", 32), config.get("gdn_key_heads", 16)
    dim, columns = config.get("gdn_head_dim", 128), config.get("conv_kernel", 4) - 1
    conv = StateTensor("conv", (2 * keys + values) * dim * columns, "bfloat16", columns)
    return LayerSpec(state=(conv, StateTensor("ssm", values * dim * dim, "float32")))


def quoted_pages(reported: dict[str, Any]) -> tuple[LayerSpec, ...]:
    """An attention layer and a state layer of which a record quotes only the bytes."""
    token, page = (re.match(r"(\d+) kB", str(reported.get(n, ""))) for n in ("attention_token", "mamba_page"))
    if token is None or page is None:
        return ()
    dim = int(token[1]) * 1000 // 4
    state = LayerSpec(state=(StateTensor("ssm", int(page[1]) * 250, "float32"),))
    return (LayerSpec(kv_heads=1, k_dim=dim, v_dim=dim, query_heads=1), state)


def formats_of(record: dict[str, Any]) -> tuple[str | None, str | None]:
    """K and V formats: 'f16', 'K q8_0, V f16', 'fp8 (656 B)', 'q8_0'."""
    text = record["kv_dtype"] or ""
    if sides := re.search(r"K (\S+), V (\S+)", text):
        return sides[1], sides[2]
    if "656" in text or (record["config"] and record["config"].get("record_bytes") == 656):
        return "fp8_ds_mla", "fp8_ds_mla"
    if "q8_KV" in text:
        return "q8_KV", "f16"
    name = re.split(r"[\s(]", text)[0]
    name = {"f32": "f32", "fp8_e4m3": "fp8", "several": None}.get(name, name)
    return name, name


def settings_of(record: dict[str, Any], engine: str) -> Settings:
    """Settings by what the record states in fields or words."""
    config, text = record["config"] or {}, text_of(record)
    k, v = formats_of(record)
    fields: dict[str, Any] = {"kv_k": k, "kv_v": v, "tp": record["tp"] or 1, "pp": record["pp"] or 1}
    if engine in ("vllm", "sglang", "tensorrt-llm", "mlc") and str(record["block_size"] or "").isdigit():
        fields["block_size"] = int(record["block_size"])
    if "gdn_layers" in config:
        fields.pop("block_size", None)
    context = int(record["context_or_tokens"]) if str(record["context_or_tokens"]).isdigit() else UNSTATED_TOKENS
    sequences = 1
    if slots := re.search(r"slots(\d+)", record["id"]):
        sequences = int(slots[1])
    elif isinstance(record["n_seqs_or_cells"], int) and record["n_seqs_or_cells"] <= 64:
        sequences = record["n_seqs_or_cells"]
    if streams := re.search(r"\+ (\d+)x\d+", str(record["n_seqs_or_cells"])):
        sequences = int(streams[1])
    if seqs := re.search(r"(\d+)/(\d+)(?: seqs|$)", text):
        sequences = int(seqs[1])
        fields["unified"] = seqs[2] == "1"
    if engine == "llama.cpp" or engine == "ollama":
        context = max(1, context // sequences)
    if engine == "sglang" and "max_mamba_cache_size" in record["reported"]:
        fields["slots"] = int(record["reported"]["max_mamba_cache_size"])
    if draft := re.search(r"MTP(?: n_max)?[- _]?(\d+)", record["model"]):
        fields["draft_tokens"] = int(draft[1])
    if config.get("mtp_layers") or "MTP draft KV" in record["reported"]:
        fields["draft_layers"] = config.get("mtp_layers", 1)
    if config.get("ssm_dtype"):
        fields["state_dtype"] = config["ssm_dtype"]
    batched = next((config[n] for n in ("ubatch", "batch", "max_num_batched_tokens") if n in config), None)
    fields["kernel_tokens"] = config.get("chunk_size")
    fields |= {"batched_tokens": batched, "async_scheduling": config.get("async_scheduling")}
    if "swafull" in record["id"] or "swa_full" in text:
        fields["window_full"] = True
    if "kv^T" in text:
        fields["mla"] = "latent+kv"
    elif "ik_llama" in record["engine"]:
        fields["mla"] = "latent"
    own = record["engine"].split(" (")[0].removeprefix("ik_") in (engine, "llama.cpp", "mlc-llm", "ollama")
    _, version = load_engine(f"{engine}@{(record['engine_version'] or '') if own else ''}")
    return Settings(context_tokens=context, sequences=sequences, batch=1, version=version, **fields)


def case_of(record: dict[str, Any]) -> Case:
    """The record as the planner sees it."""
    engine = ENGINES.get(record["engine"], "vllm")
    config = record["config"]
    if not config:
        raise KvarnError("the record states no geometry")
    try:
        layers = quoted_pages(record["reported"]) or layers_of(config)
    except KeyError as error:
        raise KvarnError(f"the record's geometry has no {error}") from error
    geometry = ModelGeometry(
        architecture=record["arch_kind"],
        layers=layers,
        hidden_size=config.get("hidden_size", 1),
        vocab_size=1,
        dtype="bfloat16",
    )
    return build_case(geometry, load_engine(engine)[0], settings_of(record, engine))


def logged_of(record: dict[str, Any]) -> dict[str, Logged]:
    """The record's figures as a log."""
    found: dict[str, Logged] = {}
    for key, value in record["reported"].items():
        name, match = FIGURES.get(key), _FIGURE.match(str(value))
        if name is None or match is None or str(value).startswith("~"):
            continue
        unit = match[2] if match[2] not in ("x", None) else None
        found[name] = read_figure(name, match[1], unit)
    room = record["memory_available_for_kv"] or record["reported"].get("budget", "")
    if match := re.match(r"([\d.]+)\s*(GiB|MiB)", str(room)):
        found["available"] = read_figure("available", match[1], match[2])
    return found


def judge(record: dict[str, Any]) -> Judged:
    """One record against the planner."""
    try:
        case = case_of(record)
    except KvarnError as error:
        return Judged(record, (), None, str(error))
    logged = logged_of(record)
    figures = [f for f in compare_log(case, logged) if f.agrees is not None]
    figures += [extra(case, logged[n]) for n in ("held", "pool") if n in logged]
    expected = record["expected_bytes_per_token"]
    return Judged(record, tuple(figures), (float(expected), *rates(case)) if expected else None)


def extra(case: Case, logged: Logged) -> Compared:
    """Bytes of all sequences, and of the pool of blocks: figures that no profile prints."""
    cache, s = case.stages[0], case.settings
    value = cache.held(s.sequences, s.context_tokens).total
    if logged.name == "pool":
        value = (cache.blocks(int(logged.value + logged.half_step)) or 0) * cache.held(1, 1).total
    return Compared(logged.name, logged.value, value, abs(value - logged.value) <= logged.half_step, logged.text)


def rates(case: Case) -> tuple[int, int]:
    """Bytes a token: of the layers that grow with the context, and of all layers."""
    every = replace(case.settings, window_full=True)
    layers = tuple(replace(spec, window_tokens=None) for spec in case.stages[0].layers)
    return case.stages[0].growth().total, case.profile.cache(layers, every).growth().total


def load(path: Path) -> list[dict[str, Any]]:
    """The records; one that leaves out part of a model's config takes it from another record of the same model."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    known: dict[str, dict[str, Any]] = defaultdict(dict)
    for record in records:
        known[record["model"]] |= {k: v for k, v in (record["config"] or {}).items() if k in SHAPE}
    for record in records:
        if record["config"]:
            missing = {k: v for k, v in known[record["model"]].items() if k not in record["config"]}
            record["config"] = record["config"] | missing
    return records


# Why a record is not reproduced, one by one.
EXPLAINED = {
    "vllm-cosmos-reason2": "The engine charged 29 layers for a model of 28: a draft head that the record's config does "
    "not state. With draft_layers=1 both figures follow (tests/unit/planner/test_vllm.py).",
    "rtx5090-qwen38-law": "One record of several KV formats; its law a x ceil(L/B) x B + M is checked by a test of the "
    "vllm profile (tests/unit/planner/test_vllm.py).",
    "vllm-52495-dsv4": "Compressed sparse caches of DeepSeek-V4 (4 and 8 tokens in one) are not modelled.",
}


def table(judged: list[Judged]) -> str:
    """docs/planner_errors.md: by engine and architecture, then what is not reproduced and why."""
    fair = [j for j in judged if j.record["independent_check"] == "yes"]
    good = [j for j in fair if j.agrees]
    alone = sum(not j.figures for j in good)
    lines = [
        "# How well the planner reproduces what engines report",
        "",
        "Generated by `scripts/planner_corpus.py`; do not edit. Public records of engines' own figures",
        "(`tests/data/kv_ground_truth.jsonl`), turned into geometry and settings by general rules, with no case for a",
        "single record. Counts of blocks, tokens and cells must be exact, sizes within half a unit of the last printed",
        "digit; where the memory is itself printed rounded, within that rounding.",
        "",
        f"Records whose config is known apart from the log: **{len(good)} of {len(fair)} agree "
        f"({len(good) / len(fair):.1%})**;",
        f"of these {alone} by the bytes a token alone, since what else they report is no",
        "figure of the engine's cache (another tool's mistake, a ratio, a total).",
        "",
        "| engine | architecture | records | agree | figures compared | figures that differ | largest error |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    groups: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for j in fair:
        groups[j.record["engine"], j.record["arch_kind"]].append(j)
    lines += [_row(*key, members) for key, members in sorted(groups.items())]
    others = [j for j in judged if j.record["independent_check"].split()[0] in ("no", "weak")]
    lines += [
        "",
        f"Of {len(others)} records in which an input was inferred or solved from the figures (regression only), "
        f"{sum(j.agrees for j in others)} agree.",
        "",
        "## Not reproduced",
        "",
        "| record | figure | reported | computed | why |",
        "|---|---|---|---|---|",
    ]
    lines += [row for j in fair if not j.agrees for row in _missed(j)]
    return "\n".join(lines) + "\n"


def _error(f: Compared) -> float:
    return abs((f.computed or 0) - f.logged) / f.logged if f.logged else 0.0


def _row(engine: str, kind: str, members: list[Judged]) -> str:
    figures = [f for j in members for f in j.figures]
    bad = [f for f in figures if not f.agrees]
    worst = max((_error(f) for f in bad), default=0.0)
    agree = sum(j.agrees for j in members)
    return f"| {engine} | {kind} | {len(members)} | {agree} | {len(figures)} | {len(bad)} | {worst:.2%} |"


def _missed(j: Judged) -> list[str]:
    why = EXPLAINED.get(j.record["id"], "not explained")
    bad = [f for f in j.figures if not f.agrees]
    if not bad:
        return [f"| {j.record['id']} | - | - | - | {why} |"]
    return [f"| {j.record['id']} | {f.name} | {f.text} | {f.computed:,.0f} | {why} |" for f in bad]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the table; 1 where --check finds it old."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the table is current")
    parser.add_argument("file", nargs="?", type=Path, help="judge another corpus and print its table")
    asked = parser.parse_args(arguments)
    text = table([judge(r) for r in load(asked.file or CORPUS)])
    if asked.file:
        print(text)
        return 0
    if asked.check:
        current = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        print("current" if current else f"{TABLE.relative_to(ROOT)} is old: run scripts/planner_corpus.py")
        return 0 if current else 1
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
