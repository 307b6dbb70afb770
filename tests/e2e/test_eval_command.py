"""`kvarn eval` and the gate, with a tiny random model that lies on the disk as a real one does."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

from kvarn.cli._frame import run
from kvarn.evals.records import Results
from kvarn.evals.summary import summaries
from support.models import write_model_directory

SMALL = ["--context-tokens", "96", "--stride-tokens", "32", "--windows", "2", "--lengths", "240", "--cases", "1"]
SMALL += ["--weights", "float32", "--block-size", "8"]
FIELDS = {"cache", "task", "metric", "value", "physical_bytes_peak", "bytes_per_token", "decode_tokens_per_s"}
FIELDS |= {"model", "seed", "n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_directory(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text("utf-8").splitlines()]


def test_results_pictures_and_a_page(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    caches = "full; int8; window:16"
    assert run(["eval", model, "--caches", caches, "--tasks", "ppl,kl,needle", *SMALL, "-o", str(out)]) == 0
    told = capsys.readouterr()
    found = rows(out)
    assert all(set(row) >= FIELDS for row in found)
    assert {row["cache"] for row in found} == {"full", "int8", "window:16"}
    assert {row["task"] for row in found} == {"speed", "ppl", "kl", "needle"}
    assert all(row["physical_bytes_peak"] > 0 and row["decode_tokens_per_s"] > 0 and row["n"] > 0 for row in found)
    held = {r["cache"]: r["value"] for r in found if r["metric"] == "held_bytes_per_token"}
    assert held["int8"] < held["full"] / 2 and held["window:16"] < held["full"] / 2
    assert next(r["value"] for r in found if r["cache"] == "full" and r["metric"] == "kl") == pytest.approx(0, abs=1e-9)
    assert "perplexity" in told.out and "window:16" in told.out
    for name in ("memory", "speed", "needle"):
        assert (out / f"{name}.svg").read_text("utf-8").count("<svg") == 1
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text("utf-8")
    assert page.count("<svg") == 3 and "window:16" in page


def test_run_again_it_measures_only_what_is_missing(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(["eval", model, "--caches", "int8", "--tasks", "ppl", *SMALL, "-o", str(out)]) == 0
    before = rows(out)
    capsys.readouterr()
    assert run(["eval", model, "--caches", "int8", "--tasks", "ppl", *SMALL, "-o", str(out)]) == 0
    assert rows(out) == before
    assert "3 of 3 measurements are there already" in capsys.readouterr().err
    assert run(["eval", model, "--caches", "int8", "--tasks", "ppl,kl", *SMALL, "--windows", "1", "-o", str(out)]) == 0
    assert rows(out)[: len(before)] == before
    added = rows(out)[len(before) :]
    assert {(r["cache"], r["task"]) for r in added} == {(c, t) for c in ("full", "int8") for t in ("ppl", "kl")}


def test_a_choice_that_is_added_has_all_speeds_measured_again(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Together: those of an earlier hour are not to be compared with its own."""
    out = tmp_path / "out"
    asked = ["eval", model, "--tasks", "ppl", *SMALL, "-o", str(out)]
    assert run([*asked, "--caches", "int8"]) == 0
    before = rows(out)
    capsys.readouterr()
    assert run([*asked, "--caches", "int8; int4"]) == 0
    assert "2 of 4 measurements are there already" in capsys.readouterr().err
    added = rows(out)[len(before) :]
    speeds = {r["cache"]: r for r in added if r["metric"] == "decode_tokens_per_s"}
    assert set(speeds) == {"full", "int8", "int4"}
    assert len({r["fingerprint"] for r in speeds.values()}) == 1
    assert all(len(r["samples"]) == 5 and r["stderr"] > 0 for r in speeds.values())
    assert {r["cache"] for r in added if r["task"] == "ppl"} == {"int4"}
    found = summaries(Results(out / "results.jsonl").all())
    assert {s.cache: s.decode_tokens_per_s for s in found} == {c: r["value"] for c, r in speeds.items()}


def test_errors_are_those_of_the_difference_to_the_full_cache(model: str, tmp_path: Path) -> None:
    """Also where the full cache was measured in an earlier run."""
    out = tmp_path / "out"
    asked = ["eval", model, "--tasks", "ppl,kl", *SMALL, "--windows", "3", "-o", str(out)]
    assert run([*asked, "--caches", "full"]) == 0
    assert run([*asked, "--caches", "int4"]) == 0
    full, few = (
        {r["metric"]: r for r in rows(out) if r["cache"] == c and r["task"] != "speed"} for c in ("full", "int4")
    )
    assert len(few["perplexity"]["samples"]) == 3
    rises = [a - b for a, b in zip(few["perplexity"]["samples"], full["perplexity"]["samples"], strict=True)]
    error = statistics.stdev(rises) / math.sqrt(3)
    assert few["perplexity"]["stderr"] == pytest.approx(few["perplexity"]["value"] * error)
    assert few["rise_nats"]["stderr"] == pytest.approx(error, rel=1e-3)
    assert few["rise_nats"]["stderr"] == pytest.approx(few["rise_nats_error"]["value"])
    spread = statistics.stdev(full["perplexity"]["samples"]) / math.sqrt(3)
    assert full["perplexity"]["stderr"] == pytest.approx(full["perplexity"]["value"] * spread)
    assert few["perplexity"]["stderr"] < full["perplexity"]["stderr"] / 2  # the text is the same, so it is known better
    assert few["kl_p99"]["stderr"] is None
    page = (out / "report.html").read_text("utf-8")
    assert f"± {few['perplexity']['stderr'] / full['perplexity']['value']:.2%})" in page


def test_other_numerics_are_measured_apart(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["eval", model, "--caches", "full", "--tasks", "ppl", *SMALL, "-o", str(out)]
    assert run(asked) == 0
    before = rows(out)
    assert run([*asked, "--numerics", "fast"]) == 0
    added = rows(out)[len(before) :]
    assert [r["metric"] for r in added] == [r["metric"] for r in before]
    assert not {r["fingerprint"] for r in added} & {r["fingerprint"] for r in before}


def test_the_gate(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--weights", "float32", "--block-size", "8", "--max-tokens", "3", "-p", "hello"]
    assert run(["run", model, *base, "--kv", "int8"]) == 0
    assert "has not been judged" in capsys.readouterr().err
    assert run(["run", model, *base, "--kv", "int8", "--require-gate"]) == 2
    refused = capsys.readouterr().err
    assert "kvarn eval" in refused and refused.count("\n") == 1
    gate = ["eval", model, "--tasks", "ppl", *SMALL, "-o", str(tmp_path / "out"), "--gate"]
    assert run([*gate, "--caches", "int8", "--budget", "50%"]) == 0
    assert "gate: int8 passed" in capsys.readouterr().out
    assert run(["run", model, *base, "--kv", "int8", "--require-gate"]) == 0
    assert "judged" not in capsys.readouterr().err
    assert run(["run", model, *base, "--kv", "float32", "--require-gate"]) == 0
    assert run(["run", model, *base, "--kv", "window:8", "--require-gate"]) == 2


def test_a_choice_that_fails_is_told_and_refused(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = ["eval", model, "--tasks", "ppl,kl", *SMALL, "-o", str(tmp_path / "out"), "--gate"]
    assert run([*gate, "--caches", "window:8"]) == 1
    assert "gate: window:8 failed" in capsys.readouterr().out
    assert run(["run", model, "-p", "x", "--kv", "window:8", "--weights", "float32", "--require-gate"]) == 2
    assert "did not pass" in capsys.readouterr().err


def test_verified_steps_stand_in_the_statistics(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["run", model, "-p", "hello", "--weights", "float32", "--block-size", "8", "--max-tokens", "30"]
    base += ["--ignore-eos", "--kv", "int4"]
    assert run([*base, "--verify", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["verify"]
    assert found["steps"] == 29 and found["kl"] > 0
    assert run([*base, "--verify", "0.5"]) == 0
    assert "decode steps against a full cache" in capsys.readouterr().err


def test_a_compressed_prompt_says_how_much(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = "The cat sat on the mat. The dog lay in the sun. Birds sang in all the trees. Who sat on the mat?"
    base = ["run", model, "--weights", "float32", "--max-tokens", "3", "--raw", "-p", prompt]
    assert run([*base, "--compress-prompt", "0.5", "--json"]) == 0
    told = capsys.readouterr()
    assert f"{len(prompt)} tokens to" in told.err
    assert json.loads(told.out)["prompt_tokens"] <= len(prompt) // 2 + 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--caches", "int9"], "int9"),
        (["--caches", "h2o:0%"], "share"),
        (["--caches", "window:100000"], "context"),
        (["--caches", "share=7"], "divide"),
        (["--tasks", "pplx"], "ppl"),
        (["--stride-tokens", "96"], "stride"),
        pytest.param(["--context-tokens", "300000"], "a window has 300000", marks=pytest.mark.slow),
        (["--text", "/nowhere/text.txt"], "cannot read"),
        (["--budget", "lots"], "share"),
        (["--lengths", "0"], "1 or more"),
    ],
)
def test_bad_input_is_one_line(
    model: str, tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["eval", model, *SMALL, *arguments, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0 and words in error
