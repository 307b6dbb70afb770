"""Serve a model by an OpenAI-compatible API."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from kvarn import hub
from kvarn.cli._gate import pass_gate
from kvarn.cli._options import engine_options, engine_options_of
from kvarn.core.errors import InvalidRequest, ModelError
from kvarn.server.settings import ServerSettings
from kvarn.server.tenants import load_tenants

SETTINGS = (
    ("--host", str, "127.0.0.1", "Address to listen on."),
    ("--port", int, 8000, "Port to listen on; 0: any free one."),
    ("--served-name", str, None, "The model's name in the API (default: MODEL as given)."),
    ("--api-keys", click.Path(path_type=Path), None, "TOML file of tenants and their keys (default: no keys)."),
    ("--max-requests", int, 256, "Requests open at once; more get 429."),
    ("--max-queue", int, 192, "Answers that may wait for a place; more get 429."),
    ("--max-body-bytes", int, 4 << 20, "Longest body of a request."),
    ("--max-json-depth", int, 64, "Deepest nesting of a body."),
    ("--header-timeout-s", float, 15.0, "Time for a request's headers to arrive."),
    ("--body-timeout-s", float, 30.0, "Time for a request's body to arrive."),
    ("--send-timeout-s", float, 60.0, "Time for a client to take a piece of an answer."),
    ("--keep-alive-s", float, 30.0, "Time an idle connection stays open."),
    ("--request-timeout-s", float, None, "Longest time from arrival to the last token (default: no limit)."),
    ("--stall-s", float, 60.0, "Without progress for so long, /health says 503."),
    ("--drain-s", float, 30.0, "Time for open requests when the server ends."),
    ("--metrics-prefix", str, "kvarn", "Before the names of metrics; vllm: for dashboards written for vLLM."),
)


def _read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """The file's values become defaults, so flags and environment go before them. Raises InvalidRequest."""
    if path is None:
        return None
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"configuration {path}: {getattr(error, 'strerror', None) or error}") from error
    given = {key.replace("-", "_"): value for key, value in table.items()}
    options = {o.lstrip("-").replace("-", "_"): p.name for p in ctx.command.params for o in p.opts}
    if unknown := sorted(set(given) - set(options)):
        known = ", ".join(sorted(o for o in options if len(o) > 1))
        raise InvalidRequest(f"configuration {path} has {', '.join(unknown)}", fixes=(f"known: {known}",))
    ctx.default_map = {options[key]: value for key, value in given.items()}
    return path


def _settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for flag, kind, default, text in reversed(SETTINGS):
        option = click.option(flag, type=kind, default=default, show_default=default is not None, help=text)
        function = option(function)
    return function


@click.command("serve", context_settings={"auto_envvar_prefix": "KVARN"})
@click.argument("model", required=False)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file of these options, without the dashes.",
)
@click.option("--max-seqs", type=int, default=64, show_default=True, help="Sequences that run at once.")
@click.option("--step-tokens", type=int, default=512, show_default=True, help="Token rows of one step at most.")
@click.option(
    "--also",
    multiple=True,
    metavar="CHOICE",
    help="A further cache that single requests may ask for: a policy, or a format. May be given several times.",
)
@click.option("--share-prefixes", is_flag=True, help="Tenants find each other's cached prompts.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@_settings_options
@engine_options()
@click.pass_context
def COMMAND(
    ctx: click.Context,
    model: str | None,
    log_level: str,
    max_seqs: int,
    step_tokens: int,
    also: tuple[str, ...],
    **given: Any,
) -> None:
    """Serve a model by an OpenAI-compatible API, until Ctrl-C or SIGTERM.

    MODEL is a short name, a GGUF file, a Hugging Face directory or a hub id; without it, the default model. Each option
    can also be given by the environment (KVARN_PORT=9000) or in the file of --config; a flag goes first, then the
    environment, then the file. What holds is printed at the start.
    """
    settings = ServerSettings(**{f.name: given[f.name] for f in fields(ServerSettings)})
    if settings.api_keys is not None:
        load_tenants(settings.api_keys)  # a mistake there shows before anything is loaded
    for name, value in (("max_seqs", max_seqs), ("step_tokens", step_tokens)):
        if value < 1:
            raise InvalidRequest(f"{name} is {value}", fixes=("use 1 or more",))
    options = replace(engine_options_of(given), max_seqs=max_seqs, step_tokens=step_tokens, also=also)
    server = _server_package()
    _print_sources(ctx)
    for choice in (options.kv, *also):
        pass_gate(hub.resolve(model or hub.default_name()), replace(options, kv=choice), required=given["require_gate"])
    server.start_logging(log_level)
    server.serve_model(model, settings, options, on_ready=lambda url: click.echo(f"ready: {url}", err=True))


def _server_package() -> Any:
    try:
        from kvarn.server import start  # noqa: PLC0415  (optional extra)
    except ModuleNotFoundError as error:
        raise ModelError(f"the server needs {error.name}", fixes=("pip install 'kvarn[serve]'",)) from error
    return start


def _print_sources(ctx: click.Context) -> None:
    """Every option's value and where it comes from, under the name that flags and file give it."""
    words = {"COMMANDLINE": "flag", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file", "DEFAULT": "default"}
    flags = {p.name: p.opts[0].lstrip("-") for p in ctx.command.params}
    for name, value in sorted(ctx.params.items(), key=lambda item: flags[item[0]]):
        source = ctx.get_parameter_source(name)
        shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        shown = "not set" if shown in (None, "") else shown
        click.echo(f"  {flags[name]} = {shown} ({words.get(source.name if source else '', 'default')})", err=True)
