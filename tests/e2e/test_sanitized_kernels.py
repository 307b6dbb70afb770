"""The kernels' own tests under AddressSanitizer and UndefinedBehaviorSanitizer, for the machine's best instruction set.

`scripts/sanitize` without arguments does all of them, which takes several times as long."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.kernels import backend_report

ROOT = Path(__file__).resolve().parents[2]
MISSING_A_TOOL = 77


@pytest.mark.slow
def test_kernels_are_clean_under_the_sanitizers() -> None:
    """One to two minutes of processor time."""
    if not any(r.name == "cpu" and r.available for r in backend_report()):
        pytest.skip("the native kernels were not built")
    from kvarn.kernels.cpu.backend import instruction_sets  # noqa: PLC0415

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVARN_ISAS": instruction_sets()[0]}
    command = [sys.executable, str(ROOT / "scripts" / "sanitize")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode == MISSING_A_TOOL:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert "sanitized:" in done.stdout and passed and int(passed[1]) > 200
    assert "runtime error" not in done.stdout + done.stderr
