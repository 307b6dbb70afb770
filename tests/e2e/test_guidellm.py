"""A public load tool runs unchanged against the server: guidellm, where it is installed (or named by $GUIDELLM)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.models import write_model_directory
from support.serving import running_server

GUIDELLM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
REQUESTS = 8
pytestmark = pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_request_is_answered(path: str, tmp_path: Path) -> None:
    assert GUIDELLM is not None
    words, found = write_model_directory(tmp_path / "model"), tmp_path / "found.json"
    with running_server() as server:
        asked = {
            "backend": f"kind=openai_http,target={server.url},request_format={path}",
            "profile": "kind=concurrent,streams=4",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=huggingface_auto,model={words}",
            "data": "kind=synthetic_text,prompt_tokens=12,output_tokens=4",
            "data-loader": f"kind=pytorch,samples={REQUESTS},prefetch_factor=4",
            "output": f"kind=json,path={found}",
        }
        command = [GUIDELLM, "run", *(part for name, value in asked.items() for part in (f"--{name}", value))]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, "--disable-progress"], env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert server.idle()
    totals = json.loads(found.read_text("utf-8"))["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
