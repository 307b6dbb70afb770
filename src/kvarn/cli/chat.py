"""Talk with a model; the history's cache blocks are reused."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Any

import click

from kvarn.cli._options import engine_options, engine_options_of, sampling_options, sampling_params_of
from kvarn.cli._session import Report, load, print_report
from kvarn.core.errors import KvarnError, ModelError
from kvarn.core.requests import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."
Messages = list[dict[str, str]]


@click.command("chat")
@click.argument("model", required=False)
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--stats/--no-stats", default=True, show_default=True, help="Statistics after every answer, on stderr.")
@sampling_options()
@engine_options()
def COMMAND(model: str | None, system: str | None, stats: bool, **given: Any) -> None:
    """Talk with a model. A line is a message; the history is kept, and its cache blocks are reused.

    /reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer. Without a terminal, every line
    of stdin is a message. MODEL is as for kvarn run; it needs a chat template.
    """
    params = sampling_params_of(given)
    llm = load(model, engine_options_of(given), require_gate=given["require_gate"])
    if not llm.tokenizer.has_chat_template:
        raise ModelError(f"{llm.files.name} has no chat template", fixes=("kvarn run --raw", "an instruction model"))
    opening: Messages = [] if system is None else [{"role": "system", "content": system}]
    if sys.stdin.isatty():
        # Line editing and history come with importing readline, where it exists.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        click.echo(f"{llm.files.name}. {HELP}", err=True)
    _converse(llm, params, opening, stats)


def _converse(llm: LLM, params: SamplingParams, opening: Messages, stats: bool) -> None:
    messages = list(opening)
    while (line := _next_line()) not in (None, "/exit", "/quit"):
        if line == "/reset":
            messages = list(opening)
        elif line == "/help":
            click.echo(HELP, err=True)
        elif line.startswith("/") and line[1:].isalpha() and sys.stdin.isatty():
            click.echo(f"{line} is no command. {HELP}", err=True)  # a slip of the fingers, not a message
        elif line:
            _turn(llm, params, messages, line, stats)


def _next_line() -> str | None:
    """The next message without surrounding white space; None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.strip() if line else None
    try:
        return input("> ").strip()
    except EOFError:
        click.echo("", err=True)
        return None


def _turn(llm: LLM, params: SamplingParams, messages: Messages, line: str, stats: bool) -> None:
    """One message and its answer. What the model refuses is said, and the conversation stays as it was."""
    asked = [*messages, {"role": "user", "content": line}]
    try:
        output = _answer(llm, llm.chat_ids(asked), params)
    except KvarnError as error:
        click.echo(f"error: {error}", err=True)
        return
    messages[:] = [*asked, {"role": "assistant", "content": output.completions[0].text}]
    if stats:
        print_report(Report.of(llm, output))


def _answer(llm: LLM, ids: list[int], params: SamplingParams) -> RequestOutput:
    """Ctrl-C ends the answer, not the conversation: what was said so far stays in it."""
    pieces = llm.stream(ids, params)
    with contextlib.suppress(KeyboardInterrupt):
        for delta in pieces:
            click.echo(delta.text, nl=False)
    pieces.close()  # pyright: ignore[reportAttributeAccessIssue]  (a generator; closing it cancels what still runs)
    click.echo()
    assert llm.last_output is not None
    return llm.last_output
