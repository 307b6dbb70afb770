"""`kvarn plan` on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.cli._frame import run
from kvarn.planner.result import Plan

FACTORS = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--query-heads", "32", "--parameters", "8.03B"]
FACTORS += ["--hidden-size", "4096", "--vocab-size", "128256"]
DEVICE = ["--hardware", "custom:80GB:3350GB:989TFLOPS"]


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = run(["plan", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_has_the_agreed_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, *FACTORS, *DEVICE, "--context", "128k", "--json")
    data = json.loads(out)
    assert (code, data["verdict"]) == (0, "fits")
    assert data["kv"]["bytes_per_token"] == 131_072
    assert data["kv"]["bytes_total"] == 17_179_869_184
    assert data["weights"]["bytes"] == 2 * data["weights"]["parameters"]
    assert data.pop("advice")
    assert json.loads(Plan.from_dict(data).to_json()) == data


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([*DEVICE, "--context", "128k"], 0),
        ([*DEVICE, "--context", "128k", "--concurrency", "64"], 1),
        (["--context", "128k"], 2),
        (["--kv-memory", "16GiB", "--context", "128k"], 0),
        (["--kv-memory", "15GiB", "--context", "128k"], 1),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int) -> None:
    assert plan(capsys, *FACTORS, *arguments)[0] == code


def test_verdict_table_capacity_advice_in_that_order(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, *FACTORS, *DEVICE, "--context", "128k", "--explain")
    order = ["FITS:", "Memory of one device", "Capacity", "Speed", "To get more", "Cache, factor by factor", "Work of"]
    places = [out.index(text) for text in order]
    assert places == sorted(places)
    assert "\x1b[" not in out  # a pipe gets plain text


def test_engine_flags_in_their_own_spelling(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(
        capsys,
        *FACTORS,
        *DEVICE,
        *("--engine", "vllm@0.19.1", "--max-model-len", "20000", "--max-num-seqs=2"),
        *("--gpu-memory-utilization", "0.8", "--kv-cache-dtype", "fp8"),
    )
    assert code == 0
    assert "2 sequences of 20,000 tokens, K in fp8, V in fp8" in out
    assert "GPU KV cache size: " in out
    assert plan(capsys, *FACTORS, "--max-model-len", "20000")[0] == 2  # not a flag of kvarn's own profile


def test_llama_cpp_short_flags(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(
        capsys, *FACTORS, "--engine", "llama.cpp", *("-c", "16384", "-np", "4", "-kvu", "-ctk", "q8_0", "-ctv", "q8_0")
    )
    assert "4 sequences of 4,096 (4k) tokens, K in q8_0" in out


def test_compare_models_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, *FACTORS, *DEVICE, "--compare", "kv=bfloat16", "kv=int8,context=32k", "tp=2")
    assert code == 0
    assert "int8" in out
    assert "KV a sequence" in out
    assert plan(capsys, *FACTORS, "--compare", "kv=bfloat16")[0] == 2
    assert plan(capsys, *FACTORS, "--compare", "nonsense=1", "kv=int8")[0] == 2


def test_fit_finds_settings_for_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    target = "32 users at 32k on two custom:48GB:864GB:362TFLOPS"
    code, out, _ = plan(capsys, *FACTORS, "--fit", target, "--json")
    found = json.loads(out)
    assert code == 0
    assert found
    for entry in found:
        assert entry["plan"]["verdict"] == "fits"
        assert entry["plan"]["sequences"] == 32
        assert entry["plan"]["tp"] * entry["plan"]["pp"] * entry["plan"]["dp"] == 2
    assert plan(capsys, *FACTORS, "--fit", "900 users at 1m on one custom:8GB:100GB:1TFLOPS")[0] == 1
    assert plan(capsys, *FACTORS, "--fit", "as much as you can")[0] == 2
    asked = [*DEVICE, "--devices", "2", "--concurrency", "32", "--context", "32k", "--fit"]
    code, out, _ = plan(capsys, *FACTORS, *asked)
    assert code == 0
    assert "32 users at 32,768 tokens on 2 x custom 80GB" in out


LOG = """INFO Model loading took 14.96 GiB
INFO Available KV cache memory: 53.54 GiB
INFO GPU KV cache size: {tokens} tokens
INFO Maximum concurrency for 20,000 tokens per request: {at_once}x
"""


def test_log_is_compared_term_by_term(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(LOG.format(tokens="438,592", at_once="21.93"))
    code, out, _ = plan(capsys, *FACTORS, "--engine", "vllm@0.19.1", "--log", str(path))
    assert code == 0, out
    assert "3 of 3 figures agree" in out
    path.write_text(LOG.format(tokens="877,184", at_once="21.93"))
    code, out, _ = plan(capsys, *FACTORS, "--engine", "vllm@0.19.1", "--log", str(path))
    assert code == 1
    assert "tokens differ" in out
    assert "DIFFERS" in out
    path.write_text("nothing of an engine")
    assert plan(capsys, *FACTORS, "--engine", "vllm", "--log", str(path))[0] == 2


def test_llama_cpp_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "llama.log"
    path.write_text(
        "llama_kv_cache: size = 2048.00 MiB ( 16384 cells,  32 layers,  1/1 seqs), "
        "K (f16): 1024.00 MiB, V (f16): 1024.00 MiB\n"
    )
    code, out, _ = plan(capsys, *FACTORS, "--engine", "llama.cpp", "--log", str(path))
    assert code == 0, out
    assert "DIFFERS" not in out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--layers", "32"],
        ["no-such-model-anywhere-7b"],
        [*FACTORS, "--hardware", "no-such-device"],
        [*FACTORS, "--engine", "vlm"],
        [*FACTORS, "--context", "0"],
        [*FACTORS, "--batch", "-3"],
        [*FACTORS, "--kv", "int7"],
        [*FACTORS, "--weights", "int7"],
        [*FACTORS, "--kv-memory", "24G"],
        [*FACTORS, "--tp", "3"],
        [*FACTORS, "--parameters", "many"],
        [*FACTORS, "--plot", "plan.bmp"],
        ["--layers", "0", "--kv-heads", "8", "--head-dim", "128"],
        ["--layers", "99999999999", "--kv-heads", "8", "--head-dim", "128"],
    ],
)
def test_bad_input_is_one_clear_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = plan(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "json"), ("{}", "model_type"), ('{"model_type": "llama"}', ""), ('{"model_type": "t5"}', "")],
)
def test_malformed_configs(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    code, out, err = plan(capsys, str(path))
    if text == '{"model_type": "llama"}':  # the class defaults of Llama are used, and said
        assert code == 2
        assert "default" in out or err.startswith("error: ")
        return
    assert code == 2
    assert err.startswith("error: ")
    assert what.lower() in err.lower()


def test_gguf_truncated_in_its_header(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00\xff\x00\x00\x00")
    code, _, err = plan(capsys, str(path))
    assert code == 2
    assert err.startswith("error: ")


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, least in (("--list-hardware", 40), ("--list-models", 80), ("--list-engines", 7)):
        code, out, _ = plan(capsys, flag)
        assert code == 0
        assert len(out.splitlines()) >= least


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_plots(capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib", reason="plots are optional")
    path = tmp_path / f"plan{suffix}"
    assert plan(capsys, *FACTORS, *DEVICE, "--plot", str(path))[0] == 0
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".html": b"<!doctype html>"}[suffix])
    assert len(content) > 5000


MEASURE = """
import resource, sys, time
from kvarn.cli._frame import run
code = run(sys.argv[1:])
loaded = sorted({"torch", "transformers", "matplotlib"} & set(sys.modules))
try:  # the peak since this program began; rusage would count its parent's, too
    kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(time.process_time(), kib, code, loaded, file=sys.stderr)
"""


def test_a_named_model_is_planned_fast_small_and_without_torch() -> None:
    """Seconds of processor time, interpreter included, the best of three: a busy machine does not decide."""
    arguments = ["plan", "llama-3.1-8b", *DEVICE, "--context", "128k"]
    times = []
    kept = {key: text for key, text in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}  # as users have it
    for _ in range(3):
        command = [sys.executable, "-c", MEASURE, *arguments]
        done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=60, check=False)
        took_s, kib, code, loaded = done.stderr.strip().splitlines()[-1].split(" ", 3)
        assert (code, loaded) == ("0", "[]"), done.stderr
        assert int(kib) < 100 * 1024
        times.append(float(took_s))
    assert min(times) < 0.5


@pytest.mark.parametrize(
    ("arguments", "nbytes"),
    [
        (["llama-2-7b", "--context", "4096"], 2_147_483_648),
        (["llama-2-7b", "--context", "4096", "--batch", "32"], 68_719_476_736),
        (["llama-2-70b", "--context", "4096"], 1_342_177_280),
        (["llama-3-8b", "--context", "131072"], 17_179_869_184),
        (["--layers", "40", "--kv-heads", "32", "--head-dim", "128", "--context", "2048"], 1_342_177_280),
    ],
)
def test_worked_examples_by_name(capsys: pytest.CaptureFixture[str], arguments: list[str], nbytes: int) -> None:
    _, out, _ = plan(capsys, *arguments, "--json")
    assert json.loads(out)["kv"]["bytes_total"] == nbytes


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-3.1-8b", "--window", "1024"], "both a model and factors (--window)"),
        (["llama-3.1-8b", "--parameters", "8e9"], "both a model and factors (--parameters)"),
        (["llama-3.1-8b", "qwen3-8b", "--compare", "--plot", "x.png"], "--compare and --plot do not go together"),
        (["llama-3.1-8b", "--fit", "1 user on l40s", "--compare"], "--fit and --compare do not go together"),
        (["llama-3.1-8b", "--measure"], "(try: --hardware this)"),
        (["llama-3.1-8b", "-ngl", "3"], "No such option"),
        (["llama-3.1-8b", "--max-num-seqs", "3"], "--max-num-seqs is a flag of vllm"),
        (["zzz"], "(try: kvarn plan --list-models)"),
        (["llama-3.1-8b", "--hardware", "zzz"], "(try: kvarn plan --list-hardware)"),
    ],
)
def test_nothing_is_silently_inert(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = plan(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err


def test_lists_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("hardware", "models", "engines"):
        _, lines, _ = plan(capsys, f"--list-{kind}")
        assert json.loads(plan(capsys, f"--list-{kind}", "--json")[1]) == lines.splitlines()


def test_unknown_weights_are_no_zero(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = plan(capsys, "--layers", "80", "--kv-heads", "8", "--head-dim", "128")
    row = next(line for line in out.splitlines() if line.startswith("  weights"))
    assert row.split() == ["weights", "?", "?", "unknown"]
    assert "sum of what is known" in out


def test_advice_never_calls_a_window_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    """Where a window leaves only the model's own length as the limit, that is no loss."""
    _, out, _ = plan(capsys, "llama-3.1-8b", "--hardware", "h100", "--context", "8k", "--json")
    windows = [a for a in json.loads(out)["advice"] if a["change"].startswith(("window", "evict"))]
    assert len(windows) == 2
    assert all(a["context"] >= 1 for a in windows)


def test_a_log_names_its_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text(
        "INFO Initializing a V1 LLM engine (v0.9.1) with config\nINFO Available KV cache memory: 18.69 GiB\n"
        "INFO GPU KV cache size: 136,080 tokens\nINFO Maximum concurrency for 40,960 tokens per request: 3.32x\n"
    )
    code, out, err = plan(capsys, "qwen3-8b", "--log", str(log))
    assert (code, out.splitlines()[0]) == (0, "2 of 2 figures agree with the log (vllm, 1 sequence of 40,960 tokens)")
    assert "vllm@0.9.1" in err
    code, out, err = plan(capsys, "qwen3-8b", "--engine", "vllm@0.9", "--log", str(log), "--json")
    assert (code, err) == (0, "")
    assert [row["agrees"] for row in json.loads(out)] == [True, True]
    log.write_text("nothing of interest\n")
    code, out, _ = plan(capsys, "qwen3-8b", "--log", str(log))
    assert (code, out) == (2, "no figure of a KV cache was found in this log\n")


def test_the_page_shows_what_the_tool_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
    _, _, after = page.partition("$ kvarn plan ")
    command, shown = after.splitlines()[:2]
    _, out, _ = plan(capsys, *command.split())
    assert out.startswith(shown.removesuffix("...")) and shown.endswith("...")
