"""What `kvarn doctor` finds, and that it would find a broken kernel."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from kvarn.cli.doctor import COMMAND, examine
from kvarn.kernels import backend_report, load_backend
from kvarn.kernels._selfcheck import self_check
from kvarn.kernels.api import Attended
from kvarn.kernels.reference import BACKEND as REFERENCE


class Careless(REFERENCE):
    """Reads one slot too many: adds a little to each result."""

    def attend(self, *arguments: object) -> Attended:
        attended = super().attend(*arguments)  # type: ignore[arg-type]
        return Attended(attended.out + 1e-3, attended.lse)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.full_like(x, torch.nan)


def test_the_reference_agrees_with_itself() -> None:
    assert all(c.ok for c in self_check(REFERENCE(), REFERENCE()))


def test_a_broken_kernel_is_found() -> None:
    bad = {c.name for c in self_check(Careless(), REFERENCE()) if not c.ok}
    assert "attend float32, float32" in bad
    assert {"rms_norm", "add_rms_norm"} <= bad
    assert not any(name.startswith("seal") for name in bad)


@pytest.mark.skipif(backend_report()[0].name != "cpu", reason="the native kernels were not built")
def test_doctor_says_what_runs() -> None:
    result = CliRunner().invoke(COMMAND, ["--json", "--no-measure"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["backend"] == load_backend().name == "cpu"
    assert all(c["ok"] for c in found["checks"]["cpu"])
    text = CliRunner().invoke(COMMAND, ["--no-measure"]).output
    assert "instruction set" in text and "agree" in text


def test_a_machine_without_native_kernels_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    report = backend_report()
    only = tuple(r for r in report if r.name == "reference")
    monkeypatch.setattr("kvarn.cli.doctor.backend_report", lambda: only)
    monkeypatch.setattr("kvarn.cli.doctor.load_backend", lambda name=None: REFERENCE())
    found = examine(measure=True)
    assert found["backend"] == "reference" and found["checks"] == {} and found["rates"] is None
