"""`kvarn serve` as a process: options, curl, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.models import write_model_directory

SECRET = "a-very-secret-prompt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("tiny") / "tiny")


class Process:
    """A running `kvarn serve`."""

    def __init__(self, arguments: list[str], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self.child = subprocess.Popen(
            [sys.executable, "-m", "kvarn", "serve", *arguments],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(iter(self.child.stderr.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def url(self, timeout_s: float = 60) -> str:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.child.poll() is None:
            if found := re.search(r"ready: (\S+)", self.text):
                return found[1]
            time.sleep(0.02)
        raise AssertionError(f"not ready: {self.text}")


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[Process]:
    process = Process([*arguments, "--port", "0"], environment)
    try:
        yield process
    finally:
        process.child.kill()
        process.child.wait(10)


def test_curl_and_sigterm(model: Path) -> None:
    if (curl := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    with serving(str(model), "--context", "128") as process:
        body = json.dumps({"prompt": SECRET, "max_tokens": 100, "ignore_eos": True, "stream": True})
        command = [curl, "-sN", f"{process.url()}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            assert asking.stdout is not None
            first = asking.stdout.readline()
            process.child.send_signal(signal.SIGTERM)
            rest = asking.stdout.read()
        assert first.startswith("data: {")
        assert rest.rstrip().endswith("data: [DONE]")
        assert process.child.wait(20) in (0, -signal.SIGTERM)
        logged = [json.loads(line) for line in process.lines if line.startswith("{")]
        requests = [line for line in logged if line["message"] == "request" and line["route"] == "/v1/completions"]
        assert len(requests) == 1
        assert requests[0]["status"] == 200
        assert requests[0]["usage"]["completion_tokens"] == 100
        assert SECRET not in process.text


@pytest.mark.slow
def test_flag_before_environment_before_file(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text('served-name = "from-file"\nmax_seqs = 3\nmax-queue = 5\ncontext = 96\n')
    arguments = [str(model), "--config", str(config), "--max-seqs", "2"]
    with serving(*arguments, KVARN_MAX_QUEUE="7", KVARN_MAX_SEQS="9") as process:
        url = process.url()
        assert "max-seqs = 2 (flag)" in process.text
        assert "max-queue = 7 (environment)" in process.text
        assert "served-name = from-file (file)" in process.text
        assert "context = 96 (file)" in process.text
        assert "host = 127.0.0.1 (default)" in process.text
        card = httpx.get(f"{url}/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"]) == ("from-file", 96)
        assert httpx.get(f"{url}/v1/kvarn/stats").json()["max_seqs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--config", "none.toml"], "No such file"),
        (["--max-seqs", "0"], "max_seqs is 0"),
        (["--max-requests", "0"], "max_requests is 0"),
        (["--api-keys", "none.toml"], "No such file"),
        (["--kv", "nonsense"], "nonsense"),
    ],
)
def test_errors_are_one_line(model: Path, arguments: list[str], why: str) -> None:
    with serving(str(model), *arguments) as process:
        assert process.child.wait(60) == 2
        time.sleep(0.1)
        errors = [line for line in process.lines if line.startswith("error:")]
        assert len(errors) == 1 and why in errors[0]
        assert "Traceback" not in process.text


@pytest.mark.slow
def test_unknown_key_in_the_file(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "serve.toml"
    config.write_text("prot = 8000\n")
    with serving(str(model), "--config", str(config)) as process:
        assert process.child.wait(60) == 2
        time.sleep(0.1)
        assert "has prot" in process.text and "port" in process.text


@pytest.mark.slow
def test_port_in_use(model: Path) -> None:
    with serving(str(model)) as process:
        port = process.url().rsplit(":", 1)[1]
        second = Process([str(model), "--port", port], {})
        assert second.child.wait(60) != 0
        assert process.child.poll() is None
