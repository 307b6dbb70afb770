"""What README.md and CONTRIBUTING.md tell people to do, works."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvarn.cli._frame import kvarn
from support.fetched import fetched

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md")
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}


def blocks(language: str) -> Iterator[str]:
    for text in TEXT.values():
        yield from re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def shell_lines(first_word: str) -> list[list[str]]:
    lines = (shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines())
    return [words for words in lines if words and words[0] == first_word]


@pytest.mark.parametrize("words", shell_lines("kvarn"), ids=" ".join)
def test_command_lines_are_understood(words: list[str]) -> None:
    command: click.Command = kvarn
    arguments = [word for word in words[1:] if word != "--help"]
    context = click.Context(command, info_name="kvarn")
    while isinstance(command, click.Group):
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    assert command.make_context(words[-1], arguments, parent=context.parent).command is command


@pytest.mark.parametrize("words", shell_lines("make"), ids=" ".join)
def test_make_targets_exist(words: list[str]) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    done = subprocess.run([*words, "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PAGES)
def test_links_and_scripts_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", TEXT[name])
    scripts = re.findall(r"`((?:scripts|\.ci|docs|src|tests)/[\w./-]+)[ `]", TEXT[name])
    assert links or scripts
    missing = [path for path in {*links, *scripts} if not (ROOT / path).exists()]
    assert missing == []


@pytest.mark.model
@pytest.mark.slow
def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    fetched("smollm2-135m")
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert "Paris" in out
    assert "bytes of KV cache at most" in out
