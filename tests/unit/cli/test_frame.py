"""The frame: errors in one line with their exit code, clean ends, nothing heavy loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvarn import __version__
from kvarn.cli import _frame
from kvarn.core.errors import DoesNotFit
from kvarn.core.registry import names_in
from support.interrupts import hear_interrupts

COMMANDS = names_in("kvarn.cli")


def kvarn(*arguments: str, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvarn", *arguments], capture_output=True, text=True, check=False, timeout=120, **more
    )


def test_version() -> None:
    done = kvarn("--version")
    assert (done.returncode, done.stdout) == (0, f"kvarn {__version__}\n")


def test_help_lists_every_command() -> None:
    done = kvarn("--help")
    assert done.returncode == 0
    for name in COMMANDS:
        assert _frame.short_help(name), f"{name}.py has no docstring"
        assert f"\n  {name.replace('_', '-')} " in done.stdout


@pytest.mark.parametrize("code", ["import kvarn", "from kvarn.cli import _frame; _frame.run(['--help'])"])
def test_nothing_heavy_is_loaded(code: str) -> None:
    heavy = "torch", "transformers", "numpy", "huggingface_hub", "matplotlib", "rich"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint([m for m in {heavy} if m in sys.modules])"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_are_there() -> None:
    import kvarn as package  # noqa: PLC0415

    assert set(package.__all__) <= set(dir(package))
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = package.Nonsense


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pul"], "unknown command 'pul'; did you mean: pull"),
        (["pull", "--nonsense"], "--nonsense"),
        (["run", "--max-tokens", "x"], "'x' is not a valid integer"),
        (["run", "-p", "x", "--max-tokens", "0"], "max_tokens is 0 (try: use 1 or more)"),
        (["run", "-p", "x", "--temperature", "nan"], "temperature is nan"),
        (["run", "-p", "x", "--temperature", "-1"], "temperature is -1"),
        (["run", "-p", "x", "--top-p", "0"], "top_p is 0"),
        (["run", "-p", "x", "--kv", "int9"], "unknown KV format 'int9'; did you mean"),
        (["run", "-p", "x", "--kv-memory", "3zb"], "is no size"),
        (["run", "-p", "", "smollm2-135m"], "the prompt is empty"),
        (["run", "-p", "x", "-f", "y"], "both -p and -f"),
        (["run", "-f", "/nonexistent/prompt"], "cannot read the prompt"),
        (["run", "-p", "x", "smolm2"], "unknown model 'smolm2'; did you mean: smollm2-135m"),
        (["run", "-p", "x", "/nonexistent/m.gguf"], "does not exist"),
        (["run", "-p", "x", __file__], "is not a GGUF file"),
        (["inspect", "--block-size", "0", __file__], "block_size is 0"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _frame.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_prompt_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p").write_bytes(b"ab\xff")
    assert _frame.run(["run", "-f", str(tmp_path / "p")]) == 2
    assert "is not UTF-8 text (byte 2)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("raised", "code"),
    [(DoesNotFit("too big", fixes=("less",)), 2), (KeyboardInterrupt(), 130), (click.Abort(), 130), (None, 0)],
)
def test_exit_codes(raised: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("probe")
    def probe() -> None:
        if raised is not None:
            raise raised

    monkeypatch.setattr(_frame.Commands, "get_command", lambda self, ctx, name: probe)
    assert _frame.run(["probe"]) == code


def test_a_bug_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("probe")
    def probe() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(_frame.Commands, "get_command", lambda self, ctx, name: probe)
    with pytest.raises(ZeroDivisionError):
        _frame.run(["probe"])


SLEEPING = """
import time
from kvarn.cli import _frame
_frame.Commands.get_command = lambda *_: (print("up", flush=True), time.sleep(60))
_frame.main(["x"])
"""
TALKING = """
import click
from kvarn.cli import _frame
@click.command()
def probe():
    for _ in range(9999):
        click.echo("x" * 99)
_frame.Commands.get_command = lambda *_: probe
_frame.main(["probe"])
"""


def test_ctrl_c_ends_cleanly() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    assert (child.returncode, err.strip()) == (130, "")


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TALKING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "x" * 99 + "\n"
        child.stdout.close()
        err = child.stderr.read()
    assert (child.returncode, err) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--list-models"], ["plan", "llama-3.1-8b"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvarn", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write the output: No space left on device\n")


@pytest.mark.skipif(sys.platform == "win32", reason="closes a descriptor of the child")
def test_a_closed_stdout_is_no_bug() -> None:
    done = kvarn("--version", preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr) == (0, "")
