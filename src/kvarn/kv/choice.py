"""Cache choices as text: what `kvarn run --kv`, `kvarn eval --caches` and `EngineOptions.kv` say.

    choice  = part { "+" part }            at most one policy and one format, in any order
    format  = NAME | "k=" NAME ",v=" NAME  [ ",residual=" TOKENS ]
    policy  = NAME [ ":" argument { "," argument } ]
    argument = budget | PARAMETER "=" value
    budget  = TOKENS | BYTES ("64MiB", "1.5GB") | SHARE ("25%")

Examples: `full`, `int8`, `k=int8,v=int4`, `window:1024,sinks=4`, `h2o:25%`, `snapkv:1024,query_tokens=32+int8`.
"""

from __future__ import annotations

import difflib
import re
import typing
from dataclasses import MISSING, Field, fields, replace
from typing import Any

from kvarn.core.cache_params import CacheParams
from kvarn.core.errors import IncompatiblePlan, UnknownName
from kvarn.core.formats import format_names, parse_kv_format
from kvarn.core.options import EngineOptions
from kvarn.kv.policies.base import Budget, KVPolicy, load_policy, policy_names

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
ALIASES = {"window": "query_tokens"}  # SnapKV's word for its last queries
_BUDGET = re.compile(r"([+-]?[0-9]*\.?[0-9]+)\s*(%|[a-z]+)?", re.IGNORECASE)


def parse_choice(text: str) -> CacheParams:
    """A cache choice in its canonical words. Raises UnknownName (policy, format, parameter: the known ones are listed)
    and IncompatiblePlan (a value that means nothing)."""
    kv: str | None = None
    policy: str | None = None
    residual: int | None = None
    for part in _parts(text):
        if _is_format(part):
            if kv is not None:
                raise IncompatiblePlan(f"{text!r} names two formats, {kv!r} and {part!r}", fixes=("name one",))
            kv, residual = _format_of(part)
        elif policy is not None:
            raise IncompatiblePlan(f"{text!r} names two policies, {policy!r} and {part!r}", fixes=("name one",))
        else:
            policy = policy_text(parse_policy(part))
    return CacheParams(kv, policy or "full", residual)


def parse_choices(text: str) -> tuple[CacheParams, ...]:
    """Several choices with semicolons between them. Raises as `parse_choice`, and IncompatiblePlan for none."""
    found = tuple(dict.fromkeys(parse_choice(part) for part in text.split(";") if part.strip()))
    if not found:
        raise IncompatiblePlan(f"{text!r} names no cache", fixes=("write, for example, 'full; int8; h2o:25%'",))
    return found


def policy_of(params: CacheParams) -> KVPolicy | None:
    """The policy that `params` names; None: the engine's own."""
    return None if params.policy is None else parse_policy(params.policy)


def settled(options: EngineOptions) -> EngineOptions:
    """The options with the choice in `kv` taken apart: a format, a policy in canonical words, the residual, and the
    grain that the policies need which may be asked for. Raises as `parse_choice`."""
    own = parse_choice(options.kv) if options.kv else CacheParams()
    if options.policy is not None:
        stated = policy_text(parse_policy(options.policy))
        if own.policy not in (None, "full", stated):
            raise IncompatiblePlan(f"two policies, {own.policy} and {stated}", fixes=("name one",))
        own = replace(own, policy=stated)
    also = tuple(parse_choice(text).text for text in options.also)
    further = [parse_choice(text) for text in also]
    policies = [policy_of(p) for p in (own, *further)]
    formats = [p.format for p in further if p.format not in (None, own.format) and p.policy == "full"]
    grain = "head" if any(p is not None and p.grain == "head" for p in policies) else options.grain
    tiers = tuple(
        dict.fromkeys((*options.tiers, *map(str, formats), *(t for p in policies if p is not None for t in p.tiers)))
    )
    residual = options.residual_tokens if own.residual_tokens is None else own.residual_tokens
    return replace(
        options, kv=own.format, policy=own.policy, also=also, residual_tokens=residual, grain=grain, tiers=tiers
    )


def parse_policy(text: str) -> KVPolicy:
    """'h2o:25%,sinks=4' -> the policy. Raises UnknownName, IncompatiblePlan."""
    name, colon, given = text.strip().partition(":")
    name = name.strip()
    if name not in policy_names():
        raise _unknown(name, is_policy=bool(given))
    known = _parameters(load_policy(name))
    values: dict[str, Any] = {}
    for argument in _arguments(text, given) if colon else ():
        key, equals, value = argument.partition("=")
        key = key.strip() if equals else "budget"
        key = key if key in known else ALIASES.get(key, key)
        if key not in known:
            raise _unknown_parameter(name, argument if not equals else key, known)
        if key in values:
            raise IncompatiblePlan(f"{name}: {key} is given twice", fixes=("give it once",))
        values[key] = _value(name, key, known[key], value.strip() if equals else argument)
    return load_policy(name)(**values)


def _arguments(text: str, given: str) -> list[str]:
    """What stands between the commas. Raises IncompatiblePlan where that is nothing: the default was hardly meant."""
    arguments = [a.strip() for a in given.split(",")]
    if not all(arguments):
        name = text.partition(":")[0].strip()
        where = "after the colon" if len(arguments) == 1 else "between or behind its commas"
        raise IncompatiblePlan(f"{text.strip()!r} says nothing {where}", fixes=(f"{name}:25%", name))
    return arguments


def policy_name(policy: KVPolicy) -> str:
    """As a choice names it: its file's name."""
    return type(policy).__module__.rpartition(".")[2]


def policy_text(policy: KVPolicy) -> str:
    """The canonical text: the budget, then the parameters that are not the default, in their order."""
    arguments: list[str] = []
    for name, spec in _parameters(type(policy)).items():
        value = getattr(policy, name)
        if name == "budget":
            arguments.insert(0, budget_text(value))
        elif value != _default(spec):
            arguments.append(f"{name}={_written(value)}")
    return policy_name(policy) + (f":{','.join(arguments)}" if arguments else "")


def parse_budget(text: str) -> Budget:
    """'1024' tokens, '64MiB' or '25%'. Raises IncompatiblePlan."""
    match = _BUDGET.fullmatch(text.strip())
    unit = (match[2] or "").lower() if match else ""
    if not match or unit not in ("", "%", *UNITS):
        raise IncompatiblePlan(f"{text!r} is no budget", fixes=("write tokens (1024), bytes (64MiB) or a share (25%)",))
    number = float(match[1])
    if unit == "%":
        return Budget(share=number / 100)
    if unit:
        return Budget(nbytes=int(number * UNITS[unit]))
    if number != int(number):
        raise IncompatiblePlan(f"a budget of {text} tokens", fixes=("use a whole number", "write a share as 25%"))
    return Budget(tokens=int(number))


def budget_text(budget: Budget) -> str:
    """The shortest text that `parse_budget` reads as this budget."""
    if budget.share is not None:
        return f"{budget.share * 100:.10g}%"
    if budget.tokens is not None:
        return str(budget.tokens)
    assert budget.nbytes is not None, "a budget has a unit"
    unit = next((u for u in ("GiB", "MiB", "KiB") if budget.nbytes % UNITS[u.lower()] == 0), "B")
    return f"{budget.nbytes // UNITS[unit.lower()]}{unit}"


def check_context(params: CacheParams, context_tokens: int) -> None:
    """Raises IncompatiblePlan where a budget in tokens is above the context: it would never do anything."""
    budget = getattr(policy_of(params), "budget", None)
    if budget is not None and budget.tokens is not None and budget.tokens > context_tokens:
        raise IncompatiblePlan(
            f"{params.policy}: a budget of {budget.tokens} tokens is above the context of {context_tokens}",
            fixes=(f"a budget of at most {context_tokens}", f"--context {budget.tokens}", "full"),
        )


def _parts(text: str) -> list[str]:
    parts = [p.strip() for p in text.split("+")]
    if not all(parts):
        raise IncompatiblePlan(f"{text!r} is no cache choice", fixes=("write, for example, 'int8' or 'h2o:25%+int8'",))
    return parts


def _is_format(part: str) -> bool:
    name = part.partition(",")[0].strip()
    return name in format_names() or re.match(r"[kv]\s*=", part) is not None


def _format_of(part: str) -> tuple[str, int | None]:
    """(canonical format, residual tokens) of a format part."""
    pieces = [p.strip() for p in part.split(",")]
    residual = [p for p in pieces if p.startswith("residual")]
    sides = ",".join(p for p in pieces if p not in residual)
    try:
        kv = parse_kv_format(sides).name
    except ValueError as error:
        known = f"formats: {', '.join(format_names())}"
        raise IncompatiblePlan(f"{part!r} is no KV format", fixes=("write NAME, or k=NAME,v=NAME", known)) from error
    if not residual:
        return kv, None
    return kv, _whole("residual", residual[0].partition("=")[2])


def _parameters(policy: type[KVPolicy]) -> dict[str, Field[Any]]:
    """What may be given: all fields, but query_tokens only where the policy reads queries, or has a default of its own
    for them."""
    reads = "recent_queries" in policy.needs or "query_tokens" in vars(policy)
    return {f.name: f for f in fields(policy) if f.name != "query_tokens" or reads}


def _default(spec: Field[Any]) -> Any:
    return spec.default if spec.default is not MISSING else None


def _unknown(name: str, *, is_policy: bool) -> UnknownName:
    """Neither a policy nor a format: named as what it is nearest to."""
    names = (*policy_names(), *(() if is_policy else format_names()))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    kind = "KV policy" if is_policy or (near and near[0] in policy_names()) else "KV format"
    return UnknownName(kind, name, names)


def _unknown_parameter(policy: str, name: str, known: dict[str, Field[Any]]) -> Exception:
    if not known:
        return IncompatiblePlan(f"{policy} takes no parameters; {name!r} was given", fixes=(policy,))
    return UnknownName(f"parameter of {policy}", name, tuple(known))


def _value(policy: str, key: str, spec: Field[Any], text: str) -> Any:
    """`text` as the field's type. Literal types list what they know."""
    kind = str(spec.type)
    if kind == "Budget":
        return parse_budget(text)
    if kind == "int":
        return _whole(f"{policy}: {key}", text)
    if kind == "float":
        return _number(f"{policy}: {key}", text)
    options = typing.get_args(typing.get_type_hints(load_policy(policy))[key])
    if options and text not in options:
        raise UnknownName(f"{policy}: {key}", text, options)
    return text


def _whole(what: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise IncompatiblePlan(f"{what} is {text!r}", fixes=("use a whole number",)) from error


def _number(what: str, text: str) -> float:
    percent = text.endswith("%")
    try:
        number = float(text.removesuffix("%"))
    except ValueError as error:
        raise IncompatiblePlan(f"{what} is {text!r}", fixes=("use a number",)) from error
    return number / 100 if percent else number


def _written(value: Any) -> str:
    if isinstance(value, Budget):
        return budget_text(value)
    return f"{value:.10g}" if isinstance(value, float) else str(value)
