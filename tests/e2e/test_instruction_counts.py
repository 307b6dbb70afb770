"""The instructions that fixed workloads of the scheduler, the pool and the kernels take are those on record."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "instructions.json"


def script(name: str) -> ModuleType:
    """A file of scripts/ that has no suffix, as a module."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_what_takes_more_than_the_tolerance_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"pool": 1090, "manager": 1110, "seal_int8": 1040, "seal_int4": 1060, "product_int8": 500, "new": 1}
    recorded = {**dict.fromkeys(counts, 1000), "gone": 1}
    del recorded["new"]
    assert script("callgrind").compare(counts, recorded) == ["gone", "manager", "new", "seal_int4"]
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said if line.endswith("ABOVE")] == ["manager", "seal_int4"]
    assert [line.split()[0] for line in said if line.endswith("below")] == ["product_int8"]


def test_the_record_covers_scheduler_pool_and_kernels() -> None:
    names = json.loads(RECORD.read_text("utf-8"))["counts"]
    assert {"scheduler", "pool", "manager"} < set(names)
    assert {n.split("_")[0] for n in names} >= {"attend", "seal", "product"}


@pytest.mark.slow
def test_no_workload_takes_more_instructions_than_on_record() -> None:
    """Half a minute of processor time."""
    command = [sys.executable, str(ROOT / "scripts" / "callgrind")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    print(done.stdout)
    if done.returncode == script("callgrind").NOT_COMPARED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
