"""Starts a server for as long as it is measured, so that only one of them runs at a time."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, NoReturn

import httpx

from kvarn.core.errors import InvalidRequest

STOP_S = 30.0
ENDINGS = ("SIGTERM", "SIGHUP")  # as Ctrl-C, these are to stop the server too
TAIL_BYTES = 2_000


@contextmanager
def launched(command: str | None, url: str, start_timeout_s: float) -> Iterator[None]:
    """Run `command` (None: it runs already) until the block ends, from when it answers /v1/models at url. However the
    block ends, also by a signal, the server is stopped, with whatever it started itself. Raises InvalidRequest where it
    cannot be started, ends, or does not answer in time, with the end of what it wrote."""
    if command is None:
        yield
        return
    with tempfile.TemporaryFile() as output, _signals_unwind():
        try:
            child = subprocess.Popen(
                shlex.split(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"cannot start {command!r}: {error}") from error
        try:
            why = _wait(child, url, start_timeout_s)
            if why is not None:
                raise InvalidRequest(f"{command!r} {why}: {_tail(output)}")
            yield
        finally:
            _stop(child)


def _wait(child: subprocess.Popen[bytes], url: str, timeout_s: float) -> str | None:
    """Until the server answers; else why it does not."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if child.poll() is not None:
            return f"ended with code {child.returncode}"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/v1/models", timeout=2.0).status_code in (200, 401):
                return None
        time.sleep(0.2)
    return f"did not answer at {url} within {timeout_s:g} s"


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Meanwhile a signal that would end this process at once leaves by way of every `finally`, with the code that
    shells give it. A signal that is ignored (nohup) or heard already stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    known = [signal.Signals[name] for name in ENDINGS if name in signal.Signals.__members__]
    unheard = [number for number in known if signal.getsignal(number) is signal.SIG_DFL]
    for number in unheard:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in unheard:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asked to end, and killed where that takes too long or is interrupted; then what is left of its processes."""
    try:
        _tell_all(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
    finally:
        _tell_all(child, getattr(signal, "SIGKILL", signal.SIGTERM))
        child.wait()


def _tell_all(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """The server and its children, which stay in its process group; only itself where there are no groups."""
    if not hasattr(os, "killpg"):
        child.send_signal(number)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, 2)
    output.seek(max(0, size - TAIL_BYTES))
    return " ".join(output.read().decode("utf-8", "replace").split())
