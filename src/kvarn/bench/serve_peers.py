"""Kvarn's server and those that `make peers` built, each with the command that starts it on this machine."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvarn.bench.peers import VLLM_CACHE_GIB, is_installed
from kvarn.bench.prepare import hf_directory
from kvarn.core.errors import KvarnError


@dataclass(frozen=True, slots=True)
class Server:
    """Listens on 127.0.0.1 and `port` once `command` runs."""

    name: str
    port: int
    command: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What every server is given: a GGUF file, threads, requests at once, tokens that each may take at most."""

    model: Path
    threads: int
    users: int
    context_tokens: int


def servers(asked: Asked, folder: Path) -> tuple[list[Server], list[str]]:
    """Kvarn first; then whichever of llama.cpp and vLLM is in `folder`, and why another is not."""
    ports = _free_ports(3)
    found, missing = [Server("kvarn", ports[0], _kvarn(asked, ports[0]))], []
    for name, port, command in (("llama-server", ports[1], _llama_server), ("vllm", ports[2], _vllm)):
        try:
            found.append(Server(name, port, command(asked, port, folder)))
        except KvarnError as error:
            missing.append(str(error))
    return found, missing


def _kvarn(asked: Asked, port: int) -> str:
    command = [sys.executable, "-m", "kvarn", "serve", asked.model, "--port", port, "--threads", asked.threads]
    return _line([*command, "--context", asked.context_tokens, "--log-level", "warning"])


def _llama_server(asked: Asked, port: int, folder: Path) -> str:
    """As many slots as users, each with a context of its own."""
    programs = folder / "llama.cpp"
    if not (programs / "llama-server").exists():
        raise KvarnError(f"llama.cpp: no llama-server in {programs}", fixes=("make peers",))
    command = ["env", f"LD_LIBRARY_PATH={programs}", programs / "llama-server", "-m", asked.model]
    command += ["--host", "127.0.0.1", "--port", port, "-t", asked.threads, "-tb", asked.threads]
    return _line([*command, "-np", asked.users, "-c", asked.users * asked.context_tokens])


def _vllm(asked: Asked, port: int, folder: Path) -> str:
    if not is_installed(folder / "vllm", "vllm"):
        raise KvarnError(f"vLLM: not installed in {folder / 'vllm'}", fixes=("make peers",))
    weights = hf_directory(asked.model, folder / "models")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: asked.threads]))
    command = ["env", f"VLLM_CPU_OMP_THREADS_BIND={cores}", f"VLLM_CPU_KVCACHE_SPACE={VLLM_CACHE_GIB}"]
    command += [folder / "vllm" / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", weights]
    command += ["--host", "127.0.0.1", "--port", port, "--dtype", "bfloat16"]
    command += ["--enable-prompt-tokens-details"]  # else its answers do not say what was cached
    return _line([*command, "--max-model-len", asked.context_tokens, "--max-num-seqs", asked.users])


def _line(words: list[object]) -> str:
    return shlex.join(map(str, words))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
