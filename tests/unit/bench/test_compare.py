"""The comparison's arithmetic, and its processes, with a small engine of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.bench.cases import CASES, Case, Timing, prompt_ids, tokens_per_s
from kvarn.bench.compare import UNIT, Comparison, compare
from kvarn.bench.peers import Engine, find_peers, kvarn

DECODE = Case("decode", 1, 4, 5, "decode")
PREFILL = Case("prefill", 1, 4, 1, "prefill")
KEPT = Case("kept", 4, 4, 5, "decode", kept=True)
PROGRAM = """
import json, sys
speed, log = float(sys.argv[3]), open(sys.argv[5], "a", buffering=1)
print("talk of its own")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    case = json.loads(line)["case"]
    print(sys.argv[6], case["name"], file=log)
    if case["name"] == sys.argv[4]:
        print(json.dumps({"error": "too long"}), flush=True)
    else:
        print(json.dumps({"prefill_s": 1 / speed, "decode_s": (case["output_tokens"] - 1) / speed}), flush=True)
print(sys.argv[6], "ends", file=log)
"""


def engine(tmp_path: Path, name: str, speed: float, refuses: str = "-", family: str = "") -> Engine:
    program = tmp_path / "engine.py"
    program.write_text(PROGRAM, "utf-8")
    options = (str(speed), refuses, str(tmp_path / "log"), name)
    return Engine(name, family or name, (sys.executable, str(program)), options)


def happened(tmp_path: Path) -> list[str]:
    """What the processes were asked, but for warming up, and when they ended."""
    return [line for line in (tmp_path / "log").read_text("utf-8").splitlines() if "warm-up" not in line]


@pytest.mark.parametrize(
    ("counted", "expected"), [("prefill", 4 * 100 / 2), ("decode", 4 * 10 / 5), ("all", 4 * 111 / 7)]
)
def test_whose_tokens_count(counted: str, expected: float) -> None:
    case = Case("c", 4, 100, 11, counted)  # pyright: ignore[reportArgumentType]
    assert tokens_per_s(case, Timing(2.0, 5.0)) == pytest.approx(expected)


def test_cases_are_those_promised_and_prompts_begin_differently() -> None:
    names = [c.name for c in CASES]
    assert names == ["decode", "decode_at_4096", "prefill_512", "batch_32x128+64", "decode_32_at_2048"]
    for case in CASES:
        prompts = prompt_ids(case, 32_000)
        assert len(prompts) == case.streams and {len(p) for p in prompts} == {case.prompt_tokens}
        assert len({p[0] for p in prompts}) == case.streams
        assert all(300 <= t < 32_000 for p in prompts for t in p)


def test_rounds_are_interleaved_and_ratios_are_of_medians(tmp_path: Path) -> None:
    seen: list[str] = []
    engines = [engine(tmp_path, "kvarn", 200.0), engine(tmp_path, "slow", 50.0), engine(tmp_path, "fast", 100.0)]
    result = compare(engines, [DECODE], tmp_path, 1, 2, seen.append)
    assert result.notes == []
    assert result.runs["decode", "kvarn"] == pytest.approx([200.0, 200.0])
    (ratio,) = result.ratios()
    assert ratio["best_peer_engine"] == "fast" and ratio["ratio"] == pytest.approx(2.0)
    rounds = [s.rpartition(": ")[2] for s in seen if "round" in s and UNIT not in s]
    assert rounds == ["kvarn", "slow", "fast"] * 2
    assert sum("kvarn: 200.0 tokens/s" in s for s in seen) == 2
    numbers = result.as_dict({"cores": 1})
    assert set(numbers) == {"machine", "results", "ratios", "notes"}
    assert set(numbers["results"][0]) == {"case", "engine", "value", "unit", "runs"}
    assert set(numbers["ratios"][0]) == {"case", "kvarn", "best_peer", "best_peer_engine", "ratio"}


def test_interrupted_it_gives_the_rounds_that_were_complete(tmp_path: Path) -> None:
    def progress(what: str) -> None:
        if "round 3" in what and what.endswith("peer"):
            raise KeyboardInterrupt

    engines = [engine(tmp_path, "kvarn", 20.0), engine(tmp_path, "peer", 10.0)]
    result = compare(engines, [DECODE], tmp_path, 1, 5, progress)
    assert {name: len(runs) for (_, name), runs in result.runs.items()} == {"kvarn": 2, "peer": 2}
    assert result.ratios()[0]["ratio"] == pytest.approx(2.0)
    assert result.interrupted and "interrupted" in result.notes[0]


def test_of_a_family_the_faster_ones_of_the_first_round_go_on_and_count(tmp_path: Path) -> None:
    engines = [
        engine(tmp_path, "kvarn", 20.0),
        engine(tmp_path, "kvarn int8", 10.0),
        engine(tmp_path, "peer a", 5.0, family="peer"),
        engine(tmp_path, "peer b", 8.0, family="peer"),
        engine(tmp_path, "peer c", 7.5, family="peer"),
    ]
    result = compare(engines, [DECODE], tmp_path, 1, 3, lambda _: None)
    assert {name: len(runs) for (_, name), runs in result.runs.items()} == {
        "kvarn": 3, "kvarn int8": 3, "peer a": 1, "peer b": 3, "peer c": 3
    }  # fmt: skip
    assert result.ratios()[0]["best_peer_engine"] == "peer b"


def test_in_a_kept_case_processes_stay_between_rounds_and_those_that_do_not_go_on_end(tmp_path: Path) -> None:
    engines = [
        engine(tmp_path, "kvarn", 20.0),
        engine(tmp_path, "a", 5.0, family="peer"),
        engine(tmp_path, "b", 8.0, family="peer"),
        engine(tmp_path, "refuses", 8.0, refuses="kept"),
    ]
    result = compare(engines, [DECODE, KEPT, PREFILL], tmp_path, 1, 3, lambda _: None)
    assert {name: len(runs) for (case, name), runs in result.runs.items() if case == "kept"} == {
        "kvarn": 3, "a": 1, "b": 3
    }  # fmt: skip
    log = happened(tmp_path)
    begin = log.index("kvarn kept")
    assert log[begin - 4 : begin] == ["kvarn ends", "a ends", "b ends", "refuses ends"]
    assert log[begin : log.index("kvarn prefill")] == [
        *("kvarn kept", "a kept", "b kept", "refuses kept", "a ends", "refuses ends"),
        *["kvarn kept", "b kept"] * 2,
        *("kvarn ends", "b ends"),
    ]


def test_where_the_caches_do_not_fit_together_each_engine_runs_alone(tmp_path: Path) -> None:
    asked: list[tuple[Case, list[str]]] = []

    def fit(case: Case, able: Sequence[Engine]) -> bool:
        asked.append((case, [e.name for e in able]))
        return False

    engines = [
        engine(tmp_path, "kvarn", 20.0),
        engine(tmp_path, "b", 8.0, family="peer"),
        engine(tmp_path, "a", 5.0, family="peer"),
    ]
    result = compare(engines, [KEPT], tmp_path, 1, 2, lambda _: None, fit)
    assert asked == [(KEPT, ["kvarn", "b", "a"])]
    assert happened(tmp_path) == [*["kvarn kept"] * 2, "kvarn ends", *["b kept"] * 2, "b ends", "a kept", "a ends"]
    assert len(result.notes) == 1 and "do not fit into memory at once" in result.notes[0]
    assert result.ratios()[0]["best_peer_engine"] == "b"


def test_a_process_that_takes_minutes_to_start_stays(tmp_path: Path) -> None:
    seen: list[str] = []
    engines = [engine(tmp_path, "kvarn", 10.0), replace(engine(tmp_path, "slow", 10.0), slow_start=True)]
    result = compare(engines, [DECODE, KEPT, PREFILL], tmp_path, 1, 2, seen.append)
    assert result.notes == [] and all(len(runs) == 2 for runs in result.runs.values())
    starts = [s for s in seen if s.startswith("starting")]
    assert starts.count("starting kvarn") == 3 and starts.count("starting slow") == 1


def test_an_engine_that_fails_is_left_out_with_a_note(tmp_path: Path) -> None:
    engines = [
        engine(tmp_path, "kvarn", 10.0),
        engine(tmp_path, "partial", 10.0, "decode"),
        Engine(
            "absent",
            "absent",
            (sys.executable, "-c", "import sys; sys.exit(print('no such thing', file=sys.stderr) or 3)"),
        ),
    ]
    cases = [DECODE, Case("prefill_512", 1, 4, 1, "prefill")]
    result = compare(engines, cases, tmp_path, 1, 2, lambda _: None)
    assert any("too long" in n for n in result.notes)
    assert [n for n in result.notes if "absent" in n] == ["absent ended with 3: no such thing"]
    assert result.median("decode", "partial") is None and result.median("prefill_512", "partial") is not None


def test_the_default_cache_is_what_ratios_judge() -> None:
    case = Case("decode", 1, 4, 5, "decode")
    runs = {("decode", "kvarn"): [10.0], ("decode", "kvarn int8"): [99.0], ("decode", "peer"): [5.0]}
    assert Comparison((case,), ("kvarn", "kvarn int8", "peer"), runs).ratios()[0]["ratio"] == 2.0


def test_every_form_of_kvarn_has_a_name_and_a_family_of_its_own() -> None:
    engines = [kvarn(), kvarn("int8"), kvarn(None, "fast"), kvarn("k=int8,v=int4", "fast")]
    assert [e.name for e in engines] == ["kvarn", "kvarn int8", "kvarn fast", "kvarn k=int8,v=int4 fast"]
    assert [e.family for e in engines] == [e.name for e in engines]
    assert engines[3].start(Path("m.gguf"), 2)[2:] == ["m.gguf", "2", "fast", "k=int8,v=int4"]


def test_peers_that_are_not_there_are_named(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"")
    missing = " ".join(find_peers(tmp_path, model).missing)
    assert all(name in missing for name in ("llama.cpp", "OpenVINO", "vLLM"))
