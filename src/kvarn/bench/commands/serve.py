"""Load one or more OpenAI-compatible servers and measure what they do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvarn.bench.commands._options import json_option, plot_option
from kvarn.bench.measure import context_for
from kvarn.bench.peers import OWN
from kvarn.bench.serve_client import Target
from kvarn.bench.serve_launch import launched
from kvarn.bench.serve_load import Conversation, LoadSpec, draw_load, parse_lengths
from kvarn.bench.serve_peers import Asked, servers
from kvarn.bench.serve_report import Goal, Summary, plot, ratios, summarise, table
from kvarn.bench.serve_run import Run, play, with_model
from kvarn.core.errors import InvalidRequest
from kvarn.hub import default_name, resolve
from kvarn.planner.hardware import usable_cores

RUN_NAMES = ("cold", "warm")


@click.command("serve")
@click.argument("urls", nargs=-1, metavar="[NAME=]URL...")
@click.option("--conversations", type=int, default=32, show_default=True, help="How many to hold.")
@click.option(
    "--turns", type=int, default=1, show_default=True, help="User messages of each; every one brings the history."
)
@click.option("--users", type=int, default=8, show_default=True, help="Closed loop: so many at once.")
@click.option("--rate", type=float, help="Open loop instead: Poisson arrivals, so many conversations a second.")
@click.option(
    "--system-tokens", type=int, default=0, show_default=True, help="A system prompt that all share, in words."
)
@click.option("--prompt-tokens", default="64", show_default=True, metavar="N|LOW:HIGH", help="User messages, in words.")
@click.option("--output-tokens", default="64", show_default=True, metavar="N|LOW:HIGH", help="Answers, in tokens.")
@click.option("--think-s", type=float, default=0.0, help="Mean pause before a further turn.")
@click.option("--repeat", type=int, default=1, show_default=True, help="Send the same load again (cold, warm, ...).")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the load.")
@click.option("--api", type=click.Choice(["chat", "completions"]), default="chat", show_default=True)
@click.option("--model", default="", help="Model name (default: the server's first).")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as the bearer token.")
@click.option("--stop-at-eos", is_flag=True, help="Let answers end early; else ignore_eos is asked for.")
@click.option("--goal-ttft-ms", type=float, help="Goodput: first token within so long.")
@click.option("--goal-tpot-ms", type=float, help="Goodput: mean token within so long.")
@click.option(
    "--start", "starts", multiple=True, metavar="NAME=COMMAND", help="Run COMMAND while the server NAME is measured."
)
@click.option(
    "--peers", is_flag=True, help="Start and measure Kvarn, and of llama.cpp and vLLM what `make peers` built."
)
@click.option("--peers-model", metavar="MODEL", help="The GGUF file, or its short name, that they serve.")
@click.option("--threads", type=click.IntRange(1), help="Of each server that --peers starts (default: the cores).")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("build/peers"),
    show_default=True,
    help="Where `make peers` put them.",
)
@click.option("--start-timeout-s", type=float, default=300.0, show_default=True, help="Until a started server answers.")
@click.option("--timeout-s", type=float, default=600.0, show_default=True, help="Of one read from a server.")
@json_option
@plot_option
def COMMAND(urls: tuple[str, ...], json_path: Path | None, plot_path: Path | None, repeat: int, **given: Any) -> None:
    """Load OpenAI-compatible servers, one after the other with the same requests, and measure: requests and tokens a
    second, time to the first token and per token, goodput under a goal, errors.

    \b
    kvarn bench serve http://127.0.0.1:8000
    kvarn bench serve ours=http://127.0.0.1:8000 theirs=http://127.0.0.1:8001 --rate 2 --turns 3
    kvarn bench serve --peers --users 32 --conversations 64 --system-tokens 1000 --repeat 2
    """
    targets = _with_commands([_target(url, given) for url in urls], given["starts"])
    peers = _peers(given) if given["peers"] else []
    targets = [*targets, *peers] or [_target("http://127.0.0.1:8000", given)]
    spec = LoadSpec(
        conversations=given["conversations"],
        turns=given["turns"],
        users=given["users"],
        rate_per_s=given["rate"],
        system_tokens=given["system_tokens"],
        prompt_tokens=parse_lengths(given["prompt_tokens"]),
        output_tokens=parse_lengths(given["output_tokens"]),
        think_s=given["think_s"],
        seed=given["seed"],
    )
    goal = Goal(*(ms / 1000 if ms is not None else None for ms in (given["goal_ttft_ms"], given["goal_tpot_ms"])))
    may_fail = {t.name for t in peers[1:]}
    runs = _play_all(targets, may_fail, spec, max(1, repeat), given["timeout_s"], given["start_timeout_s"])
    summaries = [summarise(run, goal) for run in runs]
    _show(summaries, spec, json_path)
    if plot_path is not None:
        plot(runs, plot_path)


def _target(text: str, given: dict[str, Any]) -> Target:
    name, equals, url = text.partition("=")
    url = (url if equals else text).rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise InvalidRequest(f"{text!r} is no address", fixes=("write [NAME=]http://HOST:PORT",))
    name = name if equals else url.split("//")[1]
    return Target(name, url, given["model"], given["api"], given["api_key"], not given["stop_at_eos"])


def _peers(given: dict[str, Any]) -> list[Target]:
    """Kvarn and its peers on this machine; says which are not there. Raises InvalidRequest."""
    path = resolve(given["peers_model"] or default_name()).path
    if not path.is_file():
        raise InvalidRequest(f"{path} is no GGUF file", fixes=("give a GGUF file, which all peers read",))
    words = given["system_tokens"] + given["turns"] * sum(
        parse_lengths(given[name]).high for name in ("prompt_tokens", "output_tokens")
    )
    asked = Asked(path, given["threads"] or usable_cores(), given["users"], context_for(2 * words))
    found, missing = servers(asked, given["folder"].resolve())
    for line in missing:
        click.echo(line, err=True)
    more = {"api": given["api"], "ignore_eos": not given["stop_at_eos"]}
    return [Target(server.name, server.url, "", command=server.command, **more) for server in found]


def _with_commands(targets: list[Target], starts: tuple[str, ...]) -> list[Target]:
    """Raises InvalidRequest for a command of a server that is not measured."""
    commands: dict[str, str] = {}
    for start in starts:
        name, _, commands[name] = start.partition("=")
        if not commands[name] or name not in {t.name for t in targets}:
            known = ", ".join(t.name for t in targets)
            raise InvalidRequest(f"--start {start!r} names no server", fixes=(f"NAME=COMMAND with NAME of {known}",))
    return [replace(t, command=commands.get(t.name)) for t in targets]


def _play_all(
    targets: list[Target], may_fail: set[str], spec: LoadSpec, repeat: int, timeout_s: float, start_timeout_s: float
) -> list[Run]:
    """The same load against each, one after the other. may_fail: names of those that are left out, which is said, if
    they do not start."""
    load = draw_load(spec)
    runs: list[Run] = []
    for target in targets:
        try:
            with launched(target.command, target.url, start_timeout_s):
                runs += asyncio.run(_play_one(target, spec, load, repeat, timeout_s))
        except InvalidRequest as error:
            if target.name not in may_fail:
                raise
            click.echo(f"{target.name} is left out: {error}", err=True)
    return runs


async def _play_one(
    target: Target, spec: LoadSpec, load: Sequence[Conversation], repeat: int, timeout_s: float
) -> list[Run]:
    known = await with_model(target, timeout_s)
    runs = []
    for index in range(repeat):
        name = "" if repeat == 1 else (RUN_NAMES[index] if index < len(RUN_NAMES) else f"run {index + 1}")
        what = f"{target.name} {name}".strip()
        with Console(stderr=True).status(what) as status:

            def progress(done: int, total: int, shown: Any = status, what: str = what) -> None:
                shown.update(f"{what}: {done} of {total}")

            runs.append(await play(known, spec, load, name=name, timeout_s=timeout_s, progress=progress))
    return runs


def _show(summaries: list[Summary], spec: LoadSpec, json_path: Path | None) -> None:
    compared = ratios(summaries, OWN)
    numbers = {"load": asdict(spec), "runs": [s.as_dict() for s in summaries], "ratios": compared}
    text = json.dumps(numbers, indent=2)
    if json_path is not None and str(json_path) != "-":
        json_path.write_text(text + "\n", encoding="utf-8")
    if json_path is not None and str(json_path) == "-":
        click.echo(text)
    else:
        Console().print(table(summaries))
        for line in compared:
            name = f"{line['run']} {line['figure']}".strip()
            click.echo(f"{name}: {line['ratio']:.2f} of the best peer's ({line['best_peer_server']})")
