"""A server that the benchmark started ends with it, whatever ends the benchmark: real processes, real signals."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from kvarn.bench import serve_launch
from kvarn.bench.serve_launch import launched
from kvarn.cli._frame import run
from kvarn.core.errors import InvalidRequest
from support.interrupts import hear_interrupts

# Starts a child as servers start workers, writes both ids, and then does as it is told by its last argument.
SERVER = """
import http.server, os, pathlib, signal, subprocess, sys, time
where, port, way = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if way == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
where.with_suffix(".part").write_text(f"{os.getpid()} {worker.pid}")
where.with_suffix(".part").rename(where)
if way == "ends":
    sys.exit(3)
if way == "silent":
    time.sleep(600)
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "m"}]}' if way != "useless" else b"{}"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        where.with_suffix(".loaded").touch()
        time.sleep(600)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


class Started:
    """The server's command, and what became of its processes."""

    def __init__(self, folder: Path) -> None:
        self._script, self._ids = folder / "server.py", folder / "ids"
        self._script.write_text(SERVER)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.loaded = self._ids.with_suffix(".loaded")

    def command(self, way: str) -> str:
        return shlex.join([sys.executable, str(self._script), str(self._ids), str(self.port), way])

    def bench(self, way: str, *more: str) -> list[str]:
        small = ["--conversations", "2", "--prompt-tokens", "2", "--output-tokens", "2"]
        return ["bench", "serve", *small, "--start", f"own={self.command(way)}", f"own={self.url}", *more]

    @contextmanager
    def benching(self, way: str) -> Iterator[subprocess.Popen[bytes]]:
        """The benchmark as a process of its own, from when a request is under way; killed where a test fails."""
        command = [sys.executable, "-m", "kvarn", *self.bench(way)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=hear_interrupts) as bench:
            try:
                assert _until(self.loaded.exists), "the load does not begin"
                assert all(map(_lives, self.processes()))
                yield bench
            finally:
                bench.kill()

    def processes(self) -> list[int]:
        return [int(i) for i in self._ids.read_text().split()]

    def is_gone(self) -> bool:
        """Also a moment after it was killed, which takes that long."""
        return _until(lambda: not any(map(_lives, self.processes())), seconds=5.0)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _until(done: Callable[[], bool], seconds: float = 30.0) -> bool:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.02)
    return done()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Started]:
    started = Started(tmp_path)
    yield started
    for pid in filter(_lives, started.processes()):
        os.kill(pid, signal.SIGKILL)


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_in_the_middle_of_the_load_ends_the_server_too(server: Started, number: int, code: int) -> None:
    with server.benching("serves") as bench:
        bench.send_signal(number)
        _, said = bench.communicate(timeout=30)
    assert bench.returncode == code
    assert b"Traceback" not in said
    assert server.is_gone()


def test_a_second_signal_does_not_wait_for_a_server_that_does_not_listen(server: Started) -> None:
    with server.benching("deaf") as bench:
        bench.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert bench.poll() is None, "it gives the server time to end"
        bench.send_signal(signal.SIGTERM)
        bench.communicate(timeout=serve_launch.STOP_S / 2)
    assert bench.returncode == 143
    assert server.is_gone()


@pytest.mark.parametrize(
    ("way", "more", "why"),
    [
        ("useless", (), "/v1/models"),
        ("silent", ("--start-timeout-s", "2"), "did not answer"),
        ("ends", (), "ended with code 3"),
    ],
)
def test_a_failure_or_a_time_limit_ends_the_server_too(
    server: Started, way: str, more: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server.bench(way, *more)) == 2
    assert why in capsys.readouterr().err
    assert server.is_gone()


def test_what_does_not_listen_is_killed_in_the_end(server: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_launch, "STOP_S", 0.3)
    with launched(server.command("deaf"), server.url, 30.0):
        assert all(map(_lives, server.processes()))
    assert server.is_gone()


def test_the_process_hears_signals_as_before(server: Started) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(InvalidRequest), launched(server.command("silent"), server.url, 1.0):
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert server.is_gone()
