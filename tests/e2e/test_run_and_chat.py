"""`kvarn run` and `kvarn chat`, with a tiny random model that lies on the disk as a real one does."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvarn import LLM
from kvarn.cli._frame import run
from support.interrupts import hear_interrupts
from support.models import write_model_directory

FLOATS = ["--weights", "float32", "--kv", "float32"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model_directory(tmp_path_factory.mktemp("model")))


class Stdin(io.TextIOWrapper):
    """stdin with a text in it, or a terminal with nobody at it."""

    def __init__(self, text: str = "", terminal: bool = False) -> None:
        super().__init__(io.BytesIO(text.encode()), encoding="utf-8")
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["run", *arguments, *FLOATS, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_has_exactly_what_was_promised(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = run_json([model, "-p", "hello", "--max-tokens", "9", "--ignore-eos"], capsys)
    assert {"model", "text", "prompt_ids", "token_ids", "finish_reason", "timings", "kv"} <= set(told)
    assert (told["model"], told["finish_reason"]) == (model, "length")
    assert told["prompt_tokens"] == len(told["prompt_ids"])
    assert told["completion_tokens"] == len(told["token_ids"]) == 9
    assert set(told["timings"]) == {
        "load_s",
        "prefill_s",
        "ttft_s",
        "decode_s",
        "decode_tokens_per_s",
        "prefill_tokens_per_s",
    }
    assert all(value > 0 for value in told["timings"].values())
    kv = told["kv"]
    assert (kv["format"], kv["block_size"]) == ("float32", 32)
    assert kv["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # layers, K and V, KV heads, head dim, bytes
    assert kv["physical_bytes_peak"] == kv["blocks_peak"] * 32 * kv["bytes_per_token"]
    assert 0 < kv["utilisation"] <= 1
    assert {"logical_bytes", "reserved_bytes"} <= set(kv)
    reads = told["decode_reads"]
    assert reads["step_bytes"] == reads["weight_bytes"] + reads["cache_bytes"] and reads["weight_bytes"] > 0
    assert 0 < reads["cache_bytes"] <= kv["physical_bytes_peak"]
    assert (reads["share"] is None) == (reads["read_bytes_per_s"] is None)


@pytest.mark.parametrize(
    ("choice", "said"),
    [("float32", ": 1 block of 32 tokens held"), ("h2o:50%", "blocks of 32 tokens of a KV head held")],
)
def test_the_statistics_say_what_a_block_is(
    model: str, choice: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", model, "-p", "hello", "--max-tokens", "3", "--weights", "float32", "--kv", choice]) == 0
    assert said in capsys.readouterr().err


def test_text_is_streamed_and_equals_the_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "-p", "hello", "--max-tokens", "12", "--seed", "3", "--temperature", "0.8"]
    told = run_json(arguments, capsys)
    assert run(["run", *arguments, *FLOATS]) == 0
    out, err = capsys.readouterr()
    assert out == told["text"] + "\n"
    assert f"prompt {told['prompt_tokens']} tokens" in err
    assert "KV cache float32: " in err
    assert "\x1b" not in out + err  # plain when piped


def test_raw_leaves_the_template_off(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    llm = LLM(model, weights="float32", kv="float32")
    chat = run_json([model, "-p", "hi", "--max-tokens", "1"], capsys)
    raw = run_json([model, "-p", "hi", "--max-tokens", "1", "--raw"], capsys)
    assert chat["prompt_ids"] == llm.chat_ids([{"role": "user", "content": "hi"}])
    assert raw["prompt_ids"] == llm.tokenizer.encode("hi")
    assert chat["prompt_ids"] != raw["prompt_ids"]


def test_a_base_model_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_model_directory(tmp_path / "base")
    (path / "tokenizer_config.json").write_text("{}")
    told = run_json([str(path), "-p", "hi", "--max-tokens", "1"], capsys)
    assert told["prompt_ids"] == list(b"hi")
    assert run(["run", str(path), "-p", "hi", "--system", "x"]) == 2
    assert "--system needs a chat template" in capsys.readouterr().err
    assert run(["chat", str(path)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_prompts_from_file_and_stdin(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = run_json([model, "-p", "hé\n", "--raw", "--max-tokens", "2"], capsys)
    (tmp_path / "p").write_text("hé\n\n", encoding="utf-8")
    assert run_json([model, "-f", str(tmp_path / "p"), "--raw", "--max-tokens", "2"], capsys)["text"] == wanted["text"]
    monkeypatch.setattr(sys, "stdin", Stdin("hé\n\n"))
    assert run_json([model, "--raw", "--max-tokens", "2"], capsys)["prompt_ids"] == wanted["prompt_ids"]
    monkeypatch.setattr(sys, "stdin", Stdin(terminal=True))
    assert run(["run", model]) == 2
    assert "no prompt (try: -p TEXT" in capsys.readouterr().err


def test_stop_string_is_not_in_the_text(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "-p", "hello", "--raw", "--max-tokens", "20", "--ignore-eos"]
    text = run_json(arguments, capsys)["text"]
    stop = text[4:6]
    told = run_json([*arguments, "--stop", stop], capsys)
    assert (told["text"], told["finish_reason"]) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("cache", ["paged", "contiguous", "none"])
def test_the_caches_give_the_same_text(model: str, cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [model, "-p", "hello there", "--max-tokens", "40", "--ignore-eos", "--context", "256"]
    told = run_json([*arguments, "--cache", cache], capsys)
    assert told["token_ids"] == run_json(arguments, capsys)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-p", "x" * 600], "512"),
        (["-p", "x" * 60, "--context", "50"], "50"),
        (["-p", "hi", "--backend", "abacus"], "abacus"),
        (["-p", "hi", "--weights", "float3"], "float3"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    model: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["run", model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_chat_keeps_its_history(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("one\n\n/help\ntwo\n/reset\none\n/exit\nnever\n"))
    assert run(["chat", model, "--max-tokens", "6", *FLOATS, "--block-size", "4"]) == 0
    out, err = capsys.readouterr()
    asked = [line for line in err.splitlines() if line.startswith("prompt ")]
    assert len(asked) == 3
    assert "/reset forgets" in err
    tokens = [int(line.split()[1]) for line in asked]
    llm = LLM(model, weights="float32", kv="float32")
    first = llm.chat([{"role": "user", "content": "one"}], max_tokens=6).completions[0].text
    history = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    second = llm.chat(history, max_tokens=6).completions[0].text
    assert out == f"{first}\n{second}\n{first}\n"
    assert tokens == [len(llm.chat_ids(history[:1])), len(llm.chat_ids(history)), len(llm.chat_ids(history[:1]))]


def test_a_slip_of_a_command_is_no_message(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = Stdin("/rest\n/exit\n", terminal=True)
    monkeypatch.setattr(sys, "stdin", stdin)
    assert run(["chat", model, "--max-tokens", "6", *FLOATS]) == 0
    out, err = capsys.readouterr()
    assert out.replace("> ", "") == ""
    assert "/rest is no command. /reset forgets" in err


def test_the_history_comes_from_the_cache(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin("a first message of some length\nand another\n"))
    assert run(["chat", model, "--max-tokens", "6", *FLOATS, "--block-size", "4"]) == 0
    assert "from the cache)" in capsys.readouterr().err


def test_what_a_turn_refuses_leaves_the_conversation(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Stdin(f"hi\n{'x' * 600}\nhi again\n"))
    assert run(["chat", model, "--max-tokens", "4", "--no-stats", *FLOATS]) == 0
    out, err = capsys.readouterr()
    assert err.count("error: ") == 1
    assert out.count("\n") >= 2


@pytest.mark.slow
def test_ctrl_c_while_an_answer_comes(model: str) -> None:
    command = [sys.executable, "-m", "kvarn", "run", model, "-p", "hi", "--max-tokens", "480", "--ignore-eos"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=hear_interrupts) as child:
        assert child.stdout is not None
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert b"Traceback" not in err
