"""Starts a server for as long as it is measured, so that only one of them runs at a time."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import httpx

from kvarn.core.errors import InvalidRequest

STOP_S = 30.0
TAIL_BYTES = 2_000


@contextmanager
def launched(command: str | None, url: str, start_timeout_s: float) -> Iterator[None]:
    """Run `command` (None: it runs already) until the block ends, from when it answers /v1/models at url. Raises
    InvalidRequest where it cannot be started, ends, or does not answer in time, with the end of what it wrote."""
    if command is None:
        yield
        return
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(shlex.split(command), stdout=output, stderr=subprocess.STDOUT)
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


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tail(output: IO[bytes]) -> str:
    size = output.seek(0, 2)
    output.seek(max(0, size - TAIL_BYTES))
    return " ".join(output.read().decode("utf-8", "replace").split())
