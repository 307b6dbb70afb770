"""Hub ids, from the command line: the real huggingface_hub against a hub on localhost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub_server import hub_server

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}
REPOS = {
    "org/tiny": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": b"12345678",
        "pytorch_model.bin": b"not wanted",
        "onnx/model.safetensors": b"not wanted",
        "README.md": b"not wanted",
    },
    "org/large": {
        "config.json": json.dumps(LLAMA).encode(),
        "model.safetensors.index.json": b'{"metadata": {"total_size": 12000000000}, "weight_map": {}}',
        "m.safetensors": b"12 GB",
    },
    "org/quantized": {"a.Q4_0.gguf": b"GGUF" + bytes(8), "sub/b.gguf": b"GGUF" + bytes(4)},
    "org/pickled": {"config.json": b"{}", "pytorch_model.bin": b"x"},
}


@pytest.fixture(scope="module")
def hub() -> Iterator[tuple[str, list[str]]]:
    with hub_server(REPOS) as found:
        yield found


@pytest.fixture
def environment(hub: tuple[str, list[str]], tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    proxies = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    return {**kept, **proxies, "HF_ENDPOINT": hub[0], "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}


def pull(name: str, environment: dict[str, str], command: str = "pull") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvarn", command, name],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_fetched_once_and_offline_after(environment: dict[str, str], hub: tuple[str, list[str]]) -> None:
    done = pull("org/tiny", environment)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert {found.name for found in path.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    before = len(hub[1])
    again = pull("org/tiny", {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert len(hub[1]) == before


def test_one_gguf_of_a_repository(environment: dict[str, str]) -> None:
    done = pull("org/quantized/sub/b.gguf", environment)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == REPOS["org/quantized"]["sub/b.gguf"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/quantized", "but 2 GGUF files (try: org/quantized/a.Q4_0.gguf; org/quantized/sub/b.gguf)"),
        ("org/pickled", "has no safetensors"),
        ("org/missing", "org/missing was not found on the Hugging Face hub"),
        ("org/quantized/c.gguf", "was not found on the Hugging Face hub"),
    ],
)
def test_what_cannot_be_fetched(name: str, said: str, environment: dict[str, str]) -> None:
    done = pull(name, environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow  # huggingface_hub tries for 25 s
def test_no_network(environment: dict[str, str]) -> None:
    done = pull("org/other", {**environment, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.returncode == 2
    assert "no network: the Hugging Face hub could not be reached for org/other" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_alone(environment: dict[str, str]) -> None:
    code = "import os\nfrom kvarn.hub import fetch_config_only\nprint(os.listdir(fetch_config_only('org/tiny')))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "['config.json']\n"
    # The config alone does not pass for the model.
    assert "model.safetensors" in os.listdir(pull("org/tiny", environment).stdout.strip())


def test_inspect_fetches_no_weights(environment: dict[str, str], hub: tuple[str, list[str]]) -> None:
    done = pull("org/large", environment, "inspect")
    assert done.returncode == 0, done.stderr
    assert "3 layers x 2 KV heads x 2 (K and V) x 16 head dim x 2 bytes = 384 bytes a token" in done.stdout
    assert "12,000,000,000 bytes = 11.18 GiB = 12.00 GB" in done.stdout
    assert not any(asked.endswith("m.safetensors") for asked in hub[1])
