"""Measure speed: a server under load, or engines side by side."""

from __future__ import annotations

import ast
from importlib.resources import files

import click

from kvarn.core.errors import ModelError
from kvarn.core.registry import load, names_in

PACKAGE = "kvarn.bench.commands"


def _short_help(name: str) -> str:
    """First line of a command file's docstring, without importing it."""
    source = files(PACKAGE).joinpath(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


class _Benches(click.Group):
    """The commands found as files."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name.replace("_", "-") for name in names_in(PACKAGE)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Raises UnknownName, which offers the nearest command."""
        try:
            return load(PACKAGE, cmd_name.replace("-", "_"), "COMMAND", "benchmark")
        except ModuleNotFoundError as error:
            raise ModelError(f"this benchmark needs {error.name}", fixes=("pip install 'kvarn[serve]'",)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(n, _short_help(n.replace("-", "_"))) for n in self.list_commands(ctx)])


@click.group("bench", cls=_Benches)
def COMMAND() -> None:
    """Measure speed: a server under load, or engines side by side."""
