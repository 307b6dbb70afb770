"""The frame of the command line: finds the commands, shows errors in one line, ends cleanly.

A command is a file of this folder. Its docstring's first line is its short help, read without importing the file, and
`COMMAND` is its click command. Only the command that is run is imported.
"""

from __future__ import annotations

import ast
import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import click

from kvarn import __version__
from kvarn.core.errors import KvarnError
from kvarn.core.registry import load, names_in

PACKAGE = "kvarn.cli"
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 1  # as click itself ends, when the reader leaves while a command writes
NO_ROOM = 2
DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})  # no bug of Kvarn's
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def short_help(name: str, package: str = PACKAGE) -> str:
    """First line of a command file's docstring, without importing it."""
    source = files(package).joinpath(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


class Commands(click.Group):
    """The commands found as files of `package`. kind: what an unknown one is called in the error."""

    def __init__(self, *arguments: Any, package: str = PACKAGE, kind: str = "command", **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.package, self.kind = package, kind

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name.replace("_", "-") for name in names_in(self.package)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Raises UnknownName, which offers the nearest command."""
        return load(self.package, cmd_name.replace("-", "_"), "COMMAND", self.kind)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, short_help(name.replace("-", "_"), self.package)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=Commands, context_settings=CONTEXT)
@click.version_option(__version__, "-V", "--version", message="kvarn %(version)s")
def kvarn() -> None:
    """LLM inference engine and planner whose KV cache is the programmable part."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, or the error's code, 130 after Ctrl-C."""
    if sys.stdout is None:  # closed by the caller (`kvarn ... >&-`)
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode is no reason to fail
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code. Errors that Kvarn raises on purpose become one line on stderr."""
    try:
        done = kvarn.main(list(arguments), prog_name="kvarn", standalone_mode=False)
        sys.stdout.flush()
        return done if isinstance(done, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        return _usage(error)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except KvarnError as error:
        return _fail(str(error), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # the reader left (`kvarn ... | head`)
        _forget_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK:
            raise
        _forget_output()
        return _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", NO_ROOM)


def _forget_output() -> None:
    """What is still buffered for stdout must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: click.UsageError) -> int:
    help_of = error.ctx.command_path if error.ctx else "kvarn"
    return _fail(f"{error.format_message()} (try: {help_of} --help)", error.exit_code)


def _fail(message: str, exit_code: int) -> int:
    line = " ".join(message.split())
    click.echo(f"{click.style('error:', fg='red', bold=True)} {line}", err=True)
    return exit_code
