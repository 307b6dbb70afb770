"""The commands that start the servers, where something is there to start."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from kvarn.bench import serve_peers
from kvarn.bench.serve_peers import Asked, servers

ASKED = Asked(Path("/models/m.gguf"), 2, 32, 2048)


def test_without_peers_kvarn_is_there_and_the_others_are_named(tmp_path: Path) -> None:
    found, missing = servers(ASKED, tmp_path)
    assert [s.name for s in found] == ["kvarn"]
    assert len(missing) == 2 and "llama.cpp" in missing[0] and "vLLM" in missing[1]
    assert all("make peers" in line for line in missing)
    words = shlex.split(found[0].command)
    assert words[1:5] == ["-m", "kvarn", "serve", "/models/m.gguf"]
    assert words[words.index("--port") + 1] == str(found[0].port)


def test_every_server_gets_the_same_threads_requests_and_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "with space"
    (folder / "llama.cpp").mkdir(parents=True)
    (folder / "llama.cpp" / "llama-server").touch()
    (folder / "vllm" / "lib" / "python3.11" / "site-packages" / "vllm").mkdir(parents=True)
    monkeypatch.setattr(serve_peers, "hf_directory", lambda model, where: where / "m-hf")
    found, missing = servers(ASKED, folder)
    assert missing == [] and [s.name for s in found] == ["kvarn", "llama-server", "vllm"]
    assert len({s.port for s in found}) == 3
    kvarn, llama, vllm = (shlex.split(s.command) for s in found)
    assert kvarn[kvarn.index("--context") + 1] == vllm[vllm.index("--max-model-len") + 1] == "2048"
    assert llama[llama.index("-c") + 1] == str(32 * 2048)
    assert llama[llama.index("-np") + 1] == vllm[vllm.index("--max-num-seqs") + 1] == "32"
    assert llama[llama.index("-t") + 1] == kvarn[kvarn.index("--threads") + 1] == "2"
    assert vllm[vllm.index("--model") + 1] == str(folder / "models" / "m-hf")
