"""`kvarn bench serve` against a real server over a tiny model."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvarn.cli._frame import run
from support.models import write_model_directory
from support.serving import Running, running_server

SMALL = ["--prompt-tokens", "2:6", "--output-tokens", "3:5", "--system-tokens", "5", "--conversations", "6"]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(context_tokens=512) as running:
        yield running


@pytest.mark.parametrize("shape", [["--users", "3", "--turns", "2"], ["--rate", "50"], ["--api", "completions"]])
def test_every_request_is_counted(server: Running, tmp_path: Path, shape: list[str]) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "a.png"
    names = [f"one={server.url}", f"two={server.url}/v1"]
    code = run(["bench", "serve", *names, *SMALL, *shape, "--repeat", "2", "--json", str(out), "--plot", str(picture)])
    assert code == 0
    numbers = json.loads(out.read_text())
    assert [(r["target"], r["run"]) for r in numbers["runs"]] == [
        (name, warmth) for name in ("one", "two") for warmth in ("cold", "warm")
    ]
    for found in numbers["runs"]:
        assert found["failed"] == 0
        assert found["requests"] == (12 if "--turns" in shape else 6)
        assert 3 * found["requests"] <= found["output_tokens"] <= 5 * found["requests"]
        assert found["ttft_s"]["p50"] <= found["e2e_s"]["p99"]
    assert len({r["prompt_tokens"] for r in numbers["runs"]}) == 1
    assert picture.stat().st_size > 1_000


def test_errors_are_counted_not_raised(server: Running, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(["bench", "serve", server.url, *SMALL, "--model", "nope", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["runs"][0]
    assert (found["failed"], found["errors"]) == (6, {"HTTP 404": 6})


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "http://127.0.0.1:9", *SMALL]) == 2
    assert "does not answer /v1/models" in capsys.readouterr().err


def test_no_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "localhost"]) == 2
    assert "is no address" in capsys.readouterr().err


@pytest.mark.slow
def test_a_server_that_is_started_for_the_measurement(tmp_path: Path) -> None:
    """It runs while it is measured, and no longer."""
    model, out = write_model_directory(tmp_path / "tiny"), tmp_path / "out.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m kvarn serve {model} --port {port}"
    url = f"http://127.0.0.1:{port}"
    code = run(["bench", "serve", f"own={url}", *SMALL, "--start", f"own={command}", "--json", str(out)])
    assert code == 0
    assert json.loads(out.read_text())["runs"][0]["failed"] == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("x=sleep 1", "names no server"),
        ("own=", "names no server"),
        ("own=/no/such/program", "cannot start"),
        (f"own={sys.executable} -c 'raise SystemExit(\"no luck\")'", "ended with code 1: no luck"),
    ],
)
def test_a_server_that_does_not_start(capsys: pytest.CaptureFixture[str], start: str, why: str) -> None:
    assert run(["bench", "serve", "own=http://127.0.0.1:9", *SMALL, "--start", start]) == 2
    assert why in capsys.readouterr().err
