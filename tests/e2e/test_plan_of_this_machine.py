"""What the planner says of this machine, against what Kvarn's engine then does on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvarn.planner.speed import EngineSpeed, EngineSpeeds, keep_speed, kept_speed
from support.fetched import fetched

PEAK = """
import sys
from kvarn.cli._frame import run
code = run(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")), code, file=sys.stderr)
"""


def test_speed_holds_for_this_machine_and_version_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    assert kept_speed("a processor", 2) is None
    speeds = EngineSpeeds(EngineSpeed(1e-3, 1e-4, 3e10, 2e10, 1e11), EngineSpeed(2e-3, 2e-4, 2e10, 2e10, 1e11), 2.5e8)
    place = keep_speed("a processor", 2, speeds)
    assert kept_speed("a processor", 2) == speeds
    assert kept_speed("another", 2) is None
    assert kept_speed("a processor", 4) is None
    with monkeypatch.context() as other:
        other.setattr(sys, "prefix", "another environment")
        assert kept_speed("a processor", 2) is None
    place.write_text("{")
    assert kept_speed("a processor", 2) is None


def test_predicted_steps_add_their_parts_up() -> None:
    speed = EngineSpeed(1e-3, 1e-4, 3e10, 2e10, 1e11)
    assert speed.decode_s(30, 3e8, 2e8) == pytest.approx(1e-3 + 3e-3 + 1e-2 + 1e-2)
    assert speed.prefill_s(30, 1024, 1e11) == pytest.approx(1.0 + 2 * 4e-3)


def test_codes_and_floats_have_speeds_of_their_own() -> None:
    codes, floats = EngineSpeed(1e-3, 1e-4, 3e10, 2e10, 1e11), EngineSpeed(2e-3, 2e-4, 2e10, 2e10, 1e11)
    speeds = EngineSpeeds(codes, floats, 2.5e8)
    assert (speeds.of(0.625), speeds.of(1.0625), speeds.of(2.0), speeds.of(4.0)) == (codes, codes, floats, floats)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_peak_memory_is_predicted(name: str) -> None:
    """Within 10% of the peak of `kvarn run`, the memory of loading included."""
    fetched(name)
    arguments = ["run", name, "-p", "Say hello", "--max-tokens", "8", "--ignore-eos"]
    for _ in range(2):  # the first one may measure what this machine's memory gives, once, and large
        done = subprocess.run(
            [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, timeout=600, check=False
        )
    kib, code = done.stderr.strip().splitlines()[-1].split()
    assert code == "0", done.stderr
    planned = subprocess.run(
        [sys.executable, "-m", "kvarn", "plan", name, "--hardware", "this", "--context", "64", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    predicted = json.loads(planned.stdout)["process_bytes"]
    assert predicted == pytest.approx(int(kib) * 1024, rel=0.1)
