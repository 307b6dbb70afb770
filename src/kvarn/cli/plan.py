"""Say what a model's cache costs, what fits, and what to change, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from kvarn.core.errors import InvalidRequest, KvarnError
from kvarn.core.geometry import ModelGeometry, geometry_from_factors
from kvarn.planner.advise import advice_lines, advise
from kvarn.planner.api import ask, read_model
from kvarn.planner.compute import Case, build_case, make_plan
from kvarn.planner.engines import engine_names, engines_with_flag, load_engine, take_flags
from kvarn.planner.explain import explain
from kvarn.planner.logs import compare_log, engine_of_log, log_report, parse_log, settings_from_log
from kvarn.planner.machines import device_names, find_device
from kvarn.planner.report import compare, render
from kvarn.planner.roofline import Device
from kvarn.planner.search import Target, fit, fit_lines, parse_target
from kvarn.planner.settings import Settings
from kvarn.planner.sizes import parse_size

MEASURE = "kvarn.bench.engine_speed"
FACTORS = ("layers", "kv_heads", "head_dim", "query_heads", "hidden_size", "intermediate_size", "vocab_size")
FIGURES = ("context", "batch", "concurrency", "kv", "weights", "devices", "tp", "pp", "dp", "kv_memory", "block_size")
MODES = {"fit": "target", "compare": "compared", "log": "log_file"}
SINGLE = {"plot": "plot_file", "explain": "explained"}  # of one plan


class PlanCommand(click.Command):
    """Takes the chosen engine's own flags out of the command line before click reads it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        engine = "kvarn"
        for i, token in enumerate(args):
            if token == "--engine" and i + 1 < len(args):
                engine = args[i + 1]
            elif token.startswith("--engine="):
                engine = token.partition("=")[2]
        fields, rest = take_flags(load_engine(engine)[0], args)
        ctx.meta["kvarn.flags"] = fields
        try:
            return super().parse_args(ctx, rest)
        except click.NoSuchOption as error:
            if owners := engines_with_flag(error.option_name):
                raise InvalidRequest(
                    f"{error.option_name} is a flag of {', '.join(owners)}", fixes=(f"--engine {owners[0]}",)
                ) from error
            raise


@dataclass(frozen=True)
class Asked:
    """One thing to plan: what the command line says of it."""

    geometry: ModelGeometry
    engine: str
    settings: Settings
    device: Device | None

    def case(self) -> Case:
        return build_case(self.geometry, load_engine(self.engine)[0], self.settings)


@click.command("plan", cls=PlanCommand)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--context", metavar="TOKENS", help="Tokens each sequence may reach; 128k is 131072. Default: 8192 at most."
)
@click.option("--batch", type=int, metavar="N", help="Sequences decoded in one step. Default: --concurrency, or 1.")
@click.option("--concurrency", type=int, metavar="N", help="Sequences resident at once. Default: --batch, or 1.")
@click.option("--kv", metavar="FORMAT", help="KV format, or k=FORMAT,v=FORMAT. Default: the engine's.")
@click.option("--weights", metavar="FORMAT", help="Weight format (bf16, fp8, int4, q4_k_m ...). Default: as stored.")
@click.option("--weights-size", metavar="SIZE", help="Bytes of the weights, where nothing else says.")
@click.option(
    "--hardware", metavar="NAME", help="A device (see --list-hardware), 'this', or custom:96GiB[:BANDWIDTH[:FLOPS]]."
)
@click.option("--devices", type=int, metavar="N", help="How many devices. Default: tp x pp x dp.")
@click.option("--tp", type=int, metavar="N", help="Tensor-parallel ranks.")
@click.option("--pp", type=int, metavar="N", help="Pipeline stages.")
@click.option("--dp", type=int, metavar="N", help="Data-parallel replicas.")
@click.option(
    "--engine",
    default="kvarn",
    show_default=True,
    metavar="NAME[@VERSION]",
    help="Whose rules; its own flags are accepted too.",
)
@click.option("--kv-memory", metavar="SIZE", help="Memory of the cache on one device, such as 24GiB.")
@click.option("--block-size", type=int, metavar="N", help="Tokens of a block.")
@click.option("--layers", type=int, metavar="N", help="Instead of a model: its layers, with --kv-heads and --head-dim.")
@click.option("--kv-heads", type=int, metavar="N", help="KV heads of a layer.")
@click.option("--head-dim", type=int, metavar="N", help="Numbers of one head.")
@click.option("--query-heads", type=int, metavar="N", help="Query heads of a layer.")
@click.option("--hidden-size", type=int, metavar="N", help="Width of the residual stream.")
@click.option("--intermediate-size", type=int, metavar="N", help="Width of the feed-forward part.")
@click.option("--vocab-size", type=int, metavar="N", help="Tokens of the vocabulary.")
@click.option("--window", type=int, metavar="TOKENS", help="Sliding window of every layer.")
@click.option("--parameters", metavar="N", help="Parameters of the model, such as 8e9.")
@click.option("--explain", "explained", is_flag=True, help="Write every formula with its factors put in.")
@click.option("--compare", "compared", is_flag=True, help="Models, or settings such as kv=int8,tp=2, side by side.")
@click.option(
    "--fit",
    "target",
    is_flag=False,
    flag_value="",
    metavar="[TEXT]",
    help="Search settings for a target: '32 users at 32k on two L40S', or for the other flags' figures.",
)
@click.option(
    "--log",
    "log_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Compare with an engine's log.",
)
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Write plots: .svg, .png or .html."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; bytes are integers.")
@click.option("--measure", is_flag=True, help="With --hardware this: measure this machine again.")
@click.option("--no-advice", is_flag=True, help="Leave out what could be changed.")
@click.option("--list-hardware", is_flag=True, help="Print the devices known.")
@click.option("--list-models", is_flag=True, help="Print the models known.")
@click.option("--list-engines", is_flag=True, help="Print the engines known.")
@click.pass_context
def COMMAND(ctx: click.Context, models: tuple[str, ...], **options: Any) -> int:
    """Say what MODEL's cache costs, whether it fits, how fast it can be, and what to change. Nothing is loaded.

    MODEL is a name of the catalogue, a hub id (its config only is fetched), a config.json, a model directory, a GGUF
    file, or left out with --layers, --kv-heads and --head-dim. Exit code: 0 fits, 1 does not, 2 cannot tell.
    """
    if shown := _listing(options):
        click.echo(json.dumps(shown, indent=2) if options["as_json"] else "\n".join(shown))
        return 0
    _refuse_idle(options)
    if options["target"] is not None:
        return _fit(models, options, ctx.meta["kvarn.flags"])
    if options["compared"]:
        return _compare(models, options, ctx.meta["kvarn.flags"])
    if options["log_file"]:
        own = ctx.get_parameter_source("engine") is ParameterSource.DEFAULT
        return _log(_one(models), options, ctx.meta["kvarn.flags"], name_engine=own)
    return _plan(_asked(_one(models), options, ctx.meta["kvarn.flags"]), options)


def _listing(options: dict[str, Any]) -> tuple[str, ...]:
    if options["list_hardware"]:
        return device_names()
    if options["list_models"]:
        from kvarn.planner.sources import model_names  # noqa: PLC0415

        return tuple(model_names())
    return engine_names() if options["list_engines"] else ()


def _refuse_idle(options: dict[str, Any]) -> None:
    """Raises InvalidRequest for options that would do nothing beside the others."""
    modes = [f"--{name}" for name, key in MODES.items() if options[key] not in (None, False)]
    idle = [f"--{name}" for name, key in SINGLE.items() if options[key]]
    if len(modes) > 1 or (modes and idle):
        raise InvalidRequest(f"{' and '.join((modes + idle)[:2])} do not go together", fixes=("give one of them",))
    if options["measure"] and options["hardware"] != "this":
        raise InvalidRequest("--measure measures this machine", fixes=("--hardware this",))


def _one(models: tuple[str, ...]) -> str | None:
    if len(models) > 1:
        raise InvalidRequest(
            f"{len(models)} models: {', '.join(models)}", fixes=("add --compare to see them side by side",)
        )
    return models[0] if models else None


def _geometry(model: str | None, options: dict[str, Any]) -> ModelGeometry:
    """The model named, or the one made of factors."""
    given = {name: options[name] for name in FACTORS if options[name] is not None}
    more = [name for name in ("window", "parameters") if options[name] is not None]
    if model is not None:
        if given or more:
            words = ", ".join(f"--{name.replace('_', '-')}" for name in (*given, *more))
            raise InvalidRequest(f"both a model and factors ({words})", fixes=("give one of them",))
        geometry = read_model(model)
    elif missing := [n for n in FACTORS[:3] if n not in given]:
        raise InvalidRequest(
            "no model was given",
            fixes=("name one, such as llama-3-8b", f"give its factors; --{missing[0].replace('_', '-')} is missing"),
        )
    else:
        count = _count(options["parameters"]) if options["parameters"] else None
        geometry = geometry_from_factors(**given, window_tokens=options["window"], parameters=count)
    if options["weights_size"]:
        geometry = replace(
            geometry, weight_bytes=(("given", parse_size(options["weights_size"], what="--weights-size")),)
        )
    return geometry


def _count(text: str) -> int:
    """'8e9', '8B' or '8000000000' parameters."""
    scale = {"B": 10**9, "M": 10**6, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        count = int(float(text.rstrip("bBmMtT")) * scale)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"--parameters is {text!r}", fixes=("write it like 8e9 or 8B",)) from error
    if not 0 < count < 10**16:
        raise InvalidRequest(f"--parameters is {text!r}", fixes=("use a positive figure",))
    return count


def _asked(model: str | None, options: dict[str, Any], fields: dict[str, Any]) -> Asked:
    geometry = _geometry(model, options)
    profile, version = load_engine(options["engine"])
    settings = ask(geometry, profile, version, fields=fields, **{name: options[name] for name in FIGURES})
    device = _device(options) if options["hardware"] else None
    return Asked(geometry, options["engine"], settings, device)


def _device(options: dict[str, Any]) -> Device:
    """The device named. For this machine Kvarn's own speed is measured the first time, in a process of its own."""
    device = find_device(options["hardware"])
    own = options["engine"].partition("@")[0] == "kvarn"
    if not device.measured or not own or (device.kvarn is not None and not options["measure"]):
        return device
    click.echo("measuring this machine's speed with Kvarn's engine (once; about half a minute)", err=True)
    try:
        done = subprocess.run([sys.executable, "-m", MEASURE], capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        click.echo(f"that failed ({error}); the speed below is the roofline", err=True)
        return device
    click.echo(done.stdout.strip() or f"that failed; the speed below is the roofline\n{done.stderr[-500:]}", err=True)
    return find_device(options["hardware"])


def _plan(asked: Asked, options: dict[str, Any]) -> int:
    case = asked.case()
    plan = make_plan(case, asked.device)
    advice = () if options["no_advice"] else advise(case, asked.settings, asked.device, plan)
    if options["plot_file"]:
        from kvarn.planner import plots  # noqa: PLC0415  slow to load, and rarely wanted

        plots.save(case, plan, options["plot_file"])
        click.echo(f"wrote {options['plot_file']}", err=True)
    if options["as_json"]:
        data = plan.to_dict() | {"advice": [vars_of(a) for a in advice]}
        click.echo(json.dumps(data, indent=2, ensure_ascii=False))
        return plan.exit_code
    parts = [render(plan), "\n".join(advice_lines(advice, plan))]
    if options["explained"]:
        parts.append(explain(case, plan))
    _show("\n\n".join(p for p in parts if p))
    return plan.exit_code


def vars_of(record: Any) -> dict[str, Any]:
    """A flat frozen dataclass as a dict."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _show(text: str) -> None:
    """The report, its first line in colour where the output is a terminal."""
    first, _, rest = text.partition("\n")
    colour = {"FITS": "green", "DOES": "red", "CANN": "yellow"}.get(first[:4])
    click.echo(click.style(first, fg=colour, bold=True) + ("\n" + rest if rest else ""))


def _overrides(text: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options changed by 'kv=int8,tp=2'. Raises InvalidRequest for another name."""
    changed = dict(options)
    known = (*FIGURES, "hardware", "engine")
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        key = name.replace("-", "_")
        if key not in known or not value:
            raise InvalidRequest(f"setting {part!r}", fixes=(f"write NAME=VALUE with one of {', '.join(known)}",))
        whole = key in ("batch", "concurrency", "devices", "tp", "pp", "dp", "block_size")
        if whole and not value.isdigit():
            raise InvalidRequest(f"{name} is {value!r}", fixes=("use a whole number",))
        changed[key] = int(value) if whole else value
    return changed


def _compare(models: Sequence[str], options: dict[str, Any], fields: dict[str, Any]) -> int:
    """Models or settings side by side; settings apply to the first model named."""
    names = [m for m in models if "=" not in m]
    settings = [m for m in models if "=" in m]
    if len(models) < 2 or (settings and len(names) > 1):
        raise InvalidRequest(
            "--compare needs two or more models, or one model and settings",
            fixes=("--compare llama-3-8b qwen3-8b", "--compare llama-3-8b kv=bfloat16 kv=int8,tp=2"),
        )
    if settings:
        todo = [_asked(names[0] if names else None, _overrides(text, options), fields) for text in settings]
    else:
        todo = [_asked(name, options, fields) for name in names]
    plans = [make_plan(a.case(), a.device) for a in todo]
    if options["as_json"]:
        click.echo(json.dumps([p.to_dict() for p in plans], indent=2, ensure_ascii=False))
    else:
        click.echo(compare(plans))
    return max(p.exit_code for p in plans)


def _fit(models: tuple[str, ...], options: dict[str, Any], fields: dict[str, Any]) -> int:
    """Search settings; the target's figures stand in for flags that were not given."""
    target = parse_target(options["target"]) if options["target"] else Target()
    chosen = dict(options)
    for key, value in (
        ("concurrency", target.sequences),
        ("context", target.context_tokens),
        ("hardware", target.hardware),
    ):
        chosen[key] = options[key] if value is None else value
    if not chosen["hardware"]:
        raise InvalidRequest(
            "no hardware to fit on", fixes=("say it: --fit '32 users at 32k on two L40S'", "--hardware NAME")
        )
    devices = options["devices"] or target.devices
    asked = _asked(_one(models), chosen | {"devices": None}, fields)
    assert asked.device is not None  # the hardware was just checked
    found = fit(asked.geometry, load_engine(asked.engine)[0], asked.settings, asked.device, devices)
    users = f"{asked.settings.sequences} users at {asked.settings.context_tokens:,} tokens"
    words = f"{users} on {devices or 'some'} x {asked.device.name}"
    if options["as_json"]:
        click.echo(
            json.dumps([{"settings": f.words, "plan": f.plan.to_dict()} for f in found], indent=2, ensure_ascii=False)
        )
    else:
        click.echo("\n".join(fit_lines(found, f"{words} ({asked.engine})")))
    return 0 if found else 1


def _log(model: str | None, options: dict[str, Any], fields: dict[str, Any], *, name_engine: bool) -> int:
    """Compare with a log: 0 all figures agree, 1 some differ, 2 none could be compared. name_engine: by the rules of
    the engine that the log names, since the command line names none."""
    path: Path = options["log_file"]
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise KvarnError(f"cannot read {path}: {error.strerror or error}") from error
    if name_engine and (engine := engine_of_log(text)):
        click.echo(f"the log is {engine}'s (--engine takes another's rules)", err=True)
        options = options | {"engine": engine}
    asked, logged = _asked(model, options, fields), parse_log(text)
    case = replace(asked, settings=settings_from_log(asked.settings, logged)).case()
    found = compare_log(case, logged)
    if options["as_json"]:
        click.echo(json.dumps([vars_of(c) for c in found], indent=2))
    else:
        click.echo("\n".join(log_report(found, case)))
    judged = [c.agrees for c in found if c.agrees is not None]
    return 2 if not judged else 0 if all(judged) else 1
