"""Engine profiles by name, and their own flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvarn.core.errors import InvalidRequest, UnknownName
from kvarn.core.registry import load, names_in
from kvarn.planner.profiles.base import Flag, Profile
from kvarn.planner.version import Version, parse_version

PACKAGE = "kvarn.planner.profiles"
_ALIASES = {"trtllm": "tensorrt_llm", "trt_llm": "tensorrt_llm", "tensorrt": "tensorrt_llm", "mlc_llm": "mlc"}
_ALIASES |= {"llamacpp": "llama_cpp", "llama": "llama_cpp", "ik_llama_cpp": "llama_cpp"}


def engine_names() -> tuple[str, ...]:
    """Names as the command line writes them."""
    shown = {"llama_cpp": "llama.cpp", "tensorrt_llm": "tensorrt-llm"}
    return tuple(shown.get(n, n) for n in names_in(PACKAGE))


def load_engine(text: str) -> tuple[Profile, Version]:
    """'vllm' or 'vllm@0.20.1'. Raises UnknownName."""
    name, _, version = text.partition("@")
    key = name.strip().lower().replace(".", "_").replace("-", "_")
    key = _ALIASES.get(key, key)
    if key not in names_in(PACKAGE):
        raise UnknownName("engine", name, engine_names())
    return load(PACKAGE, key, "PROFILE", "engine"), parse_version(version)


def take_flags(profile: Profile, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Take the engine's own flags ('--flag value', '--flag=value', 'NAME=value') out of a command line.

    Returns Settings fields and the arguments that are left. Raises InvalidRequest for a flag without its value and for
    one that cannot be read."""
    known = {name: flag for flag in profile.flags for name in flag.names}
    fields: dict[str, Any] = {}
    rest: list[str] = []
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        name, equals, value = token.partition("=")
        flag = known.get(name)
        if flag is None:
            rest.append(token)
        elif flag.const is not None:
            fields[flag.field] = flag.const
        else:
            if not equals:
                if not queue:
                    raise InvalidRequest(f"{name} needs a value")
                value = queue.pop(0)
            fields[flag.field] = _read(flag, name, value)
    return fields, rest


def engines_with_flag(name: str) -> tuple[str, ...]:
    """Engines that have a flag of that name."""
    return tuple(e for e in engine_names() if any(name in flag.names for flag in load_engine(e)[0].flags))


def _read(flag: Flag, name: str, text: str) -> Any:
    try:
        return flag.read(text)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name} is {text!r}: {error}") from error


def flag_fields(profile: Profile, arguments: Sequence[str]) -> dict[str, Any]:
    """Settings fields of flags only; anything else is refused. Raises InvalidRequest."""
    fields, rest = take_flags(profile, arguments)
    if rest:
        known = sorted({flag.names[0] for flag in profile.flags})
        raise InvalidRequest(f"{profile.name} has no flag {rest[0]!r} here", fixes=(f"known: {', '.join(known)}",))
    return fields
