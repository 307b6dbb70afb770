"""Where results are to be written is looked at before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvarn.cli._frame import run

COMMANDS = (["serve", "http://127.0.0.1:9"], ["engine"], ["cache"], ["peers"])
REFUSED = (
    ("--plot", "no/such/x.png", "there is no directory no/such"),
    ("--plot", "x.bmp", ".svg or .png"),
    ("--json", "no/such/x.json", "there is no directory no/such"),
    ("--json", ".", "is a directory"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
@pytest.mark.parametrize(("option", "path", "said"), REFUSED)
def test_a_path_that_cannot_be_written_is_refused_in_one_line(
    command: list[str], option: str, path: str, said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    if (command[0], option) == ("peers", "--plot"):
        pytest.skip("bench peers draws nothing")
    monkeypatch.chdir(tmp_path)
    assert run(["bench", *command, option, path]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err and option in err
    assert not list(tmp_path.iterdir())
