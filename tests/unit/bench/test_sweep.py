"""The cases of `kvarn bench engine` and the mix of `kvarn bench cache`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvarn.bench.commands._options import json_option, plot_option
from kvarn.bench.commands.cache import _mix
from kvarn.bench.commands.engine import numbers
from kvarn.bench.sweep import engine_cases


def test_cases_of_the_sweep() -> None:
    cases = {c.name: c for c in engine_cases([32, 4096], [1, 8])}
    assert set(cases) == {"prefill_512", "decode_at_32", "decode_at_4096", "batch_1", "batch_8"}
    assert cases["decode_at_4096"].prompt_tokens == 4096 and cases["batch_8"].streams == 8


def test_the_mix_fits_its_context_and_repeats() -> None:
    mix = _mix(200, 512, seed=3)
    assert mix == _mix(200, 512, seed=3) != _mix(200, 512, seed=4)
    assert all(p >= 1 and a >= 1 and p + a < 512 for p, a in mix)


@pytest.mark.parametrize("text", ["", "1,x", "0"])
def test_lists_of_numbers_are_checked(text: str) -> None:
    with pytest.raises(click.BadParameter):
        numbers(text)


@pytest.mark.parametrize("option", [json_option, plot_option])
def test_a_path_that_cannot_be_written_stops_at_once(option: Callable, tmp_path: Path) -> None:
    measured: list[object] = []
    command = click.command()(option(lambda **given: measured.append(given)))
    name = command.params[0].opts[0]
    for path in (tmp_path / "no" / "x.png", tmp_path):
        done = CliRunner().invoke(command, [name, str(path)])
        assert done.exit_code == 2 and not measured, done.output


@pytest.mark.parametrize(("path", "said"), [("no/such/x.png", "no directory"), ("x.bmp", ".svg or .png")])
def test_where_no_picture_can_be_written_nothing_is_measured(path: str, said: str) -> None:
    measured: list[object] = []
    command = click.command()(plot_option(lambda plot_path: measured.append(plot_path)))
    done = CliRunner().invoke(command, ["--plot", path])
    assert done.exit_code == 2 and said in done.output and not measured
