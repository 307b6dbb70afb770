"""Answer one prompt."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvarn.cli._options import engine_options, engine_options_of, sampling_options, sampling_params_of
from kvarn.cli._session import Report, load, print_report
from kvarn.core.errors import InvalidRequest, KvarnError
from kvarn.core.requests import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from kvarn.engine.llm import LLM


@click.command("run")
@click.argument("model", required=False)
@click.option("-p", "--prompt", metavar="TEXT", help="The prompt.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--system", metavar="TEXT", help="A system message before the prompt.")
@click.option(
    "--compress-prompt",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="RATIO",
    help="Drop what the model finds least informative of the prompt, down to this share of its tokens.",
)
@click.option("--raw", is_flag=True, help="No chat template: continue the prompt. The default for base models.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@sampling_options()
@engine_options()
def COMMAND(
    model: str | None,
    prompt: str | None,
    file: Path | None,
    system: str | None,
    compress_prompt: float | None,
    raw: bool,
    as_json: bool,
    **given: Any,
) -> None:
    """Answer one prompt: text to stdout as it comes, statistics to stderr.

    MODEL is a short name, a GGUF file, a Hugging Face directory or a hub id (see kvarn pull); without it, the default
    model. The prompt comes from -p, -f or stdin; one newline at the end of a file or of stdin is not part of it.
    """
    params = sampling_params_of(given)
    options = engine_options_of(given)
    text = read_prompt(prompt, file)
    llm = load(model, options, require_gate=given["require_gate"])
    if compress_prompt is not None:
        text = compressed(llm, text, compress_prompt)
    report = Report.of(llm, answer(llm, prompt_ids(llm, text, system, raw), params, echo=not as_json))
    if as_json:
        click.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print_report(report)


def compressed(llm: LLM, text: str, ratio: float) -> str:
    """The prompt made shorter; says how much on stderr."""
    from kvarn.evals.compress import compress  # noqa: PLC0415  (torch, which the help pages must not load)

    found = compress(text, ratio, llm)
    click.echo(f"prompt compressed: {found.tokens_before} tokens to {found.tokens_after}", err=True)
    return found.text


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """From -p, -f or stdin. Raises InvalidRequest: none, several, empty, not UTF-8."""
    if prompt is not None and file is not None:
        raise InvalidRequest("both -p and -f were given", fixes=("give one of them",))
    if prompt is not None:
        return _not_empty(prompt)
    if file is None and sys.stdin.isatty():
        raise InvalidRequest("no prompt", fixes=("-p TEXT", "-f FILE", "a pipe into stdin"))
    return _not_empty(_read(file).removesuffix("\n"))


def _read(file: Path | None) -> str:
    name = "stdin" if file is None else str(file)
    try:
        return (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise InvalidRequest(f"cannot read the prompt from {name}: {error.strerror or error}") from error


def _not_empty(text: str) -> str:
    if not text:
        raise InvalidRequest("the prompt is empty", fixes=("-p TEXT", "-f FILE", "a pipe into stdin"))
    return text


def prompt_ids(llm: LLM, text: str, system: str | None, raw: bool) -> list[int]:
    """Token ids of the prompt, in the model's chat template where it has one and `raw` does not forbid it."""
    if raw or not llm.tokenizer.has_chat_template:
        if system is not None:
            raise InvalidRequest(
                "--system needs a chat template", fixes=("put the text into the prompt", "leave --raw")
            )
        return llm.tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return llm.chat_ids([*messages, {"role": "user", "content": text}])


def answer(llm: LLM, ids: list[int], params: SamplingParams, *, echo: bool) -> RequestOutput:
    """Generate; with `echo`, write the pieces to stdout as they come, and a newline at the end."""
    for delta in llm.stream(ids, params):
        if echo and delta.text:
            click.echo(delta.text, nl=False)
    if echo:
        click.echo()
    assert llm.last_output is not None
    if (error := llm.last_output.completions[0].error) is not None:
        raise KvarnError(error)
    return llm.last_output
