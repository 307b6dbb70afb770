"""Devices by name, and this machine measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvarn.core.errors import UnknownName
from kvarn.planner import hardware
from kvarn.planner.hardware import free_memory_bytes, hardware_names, load_hardware, this_machine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVARN_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "READ_BYTES", 4 << 20)
    monkeypatch.setattr(hardware, "MATRIX_SIDE", 64)
    monkeypatch.setattr(hardware, "is_busy", lambda _: False)
    return tmp_path


def test_named_devices() -> None:
    h100 = load_hardware("H100")
    assert (h100.accelerator, h100.measured, h100.peak("bf16")) == (True, False, 989_400_000_000_000)
    assert h100.source
    assert load_hardware("epyc-9654").accelerator is False
    with pytest.raises(UnknownName, match="rtx-4090"):
        load_hardware("rtx-4099")
    assert len(hardware_names()) >= 40


def test_this_machine_is_measured_once_and_kept(home: Path) -> None:
    first = load_hardware("this")
    assert first.measured
    assert not first.accelerator
    assert first.memory_bytes > 0
    assert first.bandwidth_bytes_per_s is not None
    assert first.bandwidth_bytes_per_s > 1e8
    assert first.flops["f32"] > 1e6
    kept = json.loads((home / "machine.json").read_text())
    again = this_machine()
    assert (again.bandwidth_bytes_per_s, again.flops) == (first.bandwidth_bytes_per_s, first.flops)
    assert kept["figures"]["bandwidth_bytes_per_s"] == first.bandwidth_bytes_per_s


@pytest.mark.parametrize("damage", ["", "{}", '{"figures": {"bandwidth_bytes_per_s": "x"}}', "other processor"])
def test_a_kept_measurement_that_does_not_fit_is_made_again(home: Path, damage: str) -> None:
    first = this_machine()
    path = home / "machine.json"
    content = json.loads(path.read_text())
    content["identity"]["processor"] = "another"
    content["figures"] = {"bandwidth_bytes_per_s": 1.0, "f32_flops": 1.0}
    path.write_text(json.dumps(content) if damage == "other processor" else damage)
    again = this_machine()
    assert again.bandwidth_bytes_per_s is not None
    assert again.bandwidth_bytes_per_s > 1e8
    assert again.name == first.name


def test_what_a_busy_machine_measures_is_not_kept(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_busy", lambda _: True)
    assert "busy" in this_machine().source
    assert not (home / "machine.json").exists()


def test_a_home_that_cannot_be_written_is_no_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("KVARN_HOME", str(home / "file" / "below"))
    assert this_machine().measured


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert free_memory_bytes(1000, tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    assert free_memory_bytes(1000, tmp_path) == 1000
    (tmp_path / "memory.max").write_text("800\n")
    assert free_memory_bytes(1000, tmp_path) == 500
    assert free_memory_bytes(100, tmp_path) == 100
    (tmp_path / "memory.current").write_text("900\n")
    assert free_memory_bytes(1000, tmp_path) == 0
