"""The gate: verdicts on lossy cache choices, by model and choice, and what loading one without a verdict means.

`kvarn eval --gate` records them; `run`, `chat` and `serve` look them up by the model's content.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvarn.core.errors import IncompatiblePlan, KvarnError
from kvarn.core.files import ModelFiles, atomic_write, kvarn_home
from kvarn.core.formats import Format, parse_kv_format
from kvarn.evals.identity import model_identity
from kvarn.evals.summary import ChoiceSummary, broken

FOLDER = "verdicts"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a cache choice keeps a model's quality. rise: of perplexity, as a share; most_rise: what was allowed.
    context_tokens: of the windows in which it was measured. why: the reasons of a failure. rise_error: its standard
    error."""

    model: str
    cache: str
    passed: bool
    rise: float
    most_rise: float
    context_tokens: int
    why: tuple[str, ...] = ()
    rise_error: float | None = None

    def __str__(self) -> str:
        outcome = "passed" if self.passed else "failed"
        reasons = f": {'; '.join(self.why)}" if self.why else ""
        error = "" if self.rise_error is None else f" ± {self.rise_error:.2%}"
        measured = f"perplexity {self.rise:+.2%}{error} at {self.context_tokens} tokens, allowed {self.most_rise:+.2%}"
        return f"{self.cache} {outcome} ({measured}){reasons}"


def judge(
    found: Sequence[ChoiceSummary], most_rise: float, context_tokens: int, identity: str, lossy: Sequence[str]
) -> list[Verdict]:
    """A verdict for each of the lossy choices. found: the full cache first. Raises KvarnError without perplexity."""
    verdicts: list[Verdict] = []
    for choice in found:
        if choice.cache not in lossy:
            continue
        if (rise := choice.rise(found[0])) is None:
            raise KvarnError("the gate judges by perplexity, which was not measured", fixes=("--tasks ppl,kl",))
        why = broken(choice, found[0])
        passed = rise <= most_rise and not why
        error = choice.rise_error(found[0])
        verdicts.append(Verdict(identity, choice.cache, passed, rise, most_rise, context_tokens, tuple(why), error))
    return verdicts


def is_lossy(kv: str | None, policy: str | None, share_layers: int = 1) -> bool:
    """Does the choice lose anything that full precision keeps? Float formats do not count: models compute in them."""
    lossless = kv is None or all(side.lossless for side in _sides(kv))
    return not lossless or policy not in (None, "full") or share_layers > 1


def _sides(kv: str) -> tuple[Format, Format]:
    pair = parse_kv_format(kv)
    return (pair.k, pair.v)


def record(verdicts: Sequence[Verdict]) -> Path | None:
    """Keep the verdicts; newer ones replace those on the same model and choice. Raises KvarnError."""
    if not verdicts:
        return None
    path = _path(verdicts[0].model)
    kept = {**_read(path), **{v.cache: v for v in verdicts}}
    try:
        with atomic_write(path) as stream:
            stream.write(json.dumps([asdict(v) for v in kept.values()], indent=1).encode())
    except OSError as error:
        raise KvarnError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def verdict_on(files: ModelFiles, cache: str) -> Verdict | None:
    """The verdict on a choice, in its canonical words, for the model of this content; None: never judged."""
    identity = model_identity(files)
    return _read(_path(identity)).get(cache)


def check_gate(files: ModelFiles, cache: str, *, lossy: bool, required: bool) -> str | None:
    """What to say before a choice is used: one line where a lossy one has no passed verdict, else None. With `required`
    that line is raised as IncompatiblePlan."""
    if not lossy:
        return None
    verdict = verdict_on(files, cache)
    if verdict is not None and verdict.passed:
        return None
    told = "has not been judged on this model" if verdict is None else f"did not pass: {verdict}"
    message = f"the cache {cache} loses information and {told}"
    fix = f"kvarn eval {files.name} --caches '{cache}' --gate"
    if required:
        raise IncompatiblePlan(message, fixes=(fix, "--kv bfloat16", "leave --require-gate"))
    return f"{message} (measure it: {fix})"


def _path(identity: str) -> Path:
    return kvarn_home() / FOLDER / f"{identity}.json"


def _read(path: Path) -> dict[str, Verdict]:
    """By choice. A file that cannot be read says nothing: its choices count as never judged."""
    try:
        found = json.loads(path.read_text("utf-8"))
        verdicts = [Verdict(**{**entry, "why": tuple(entry["why"])}) for entry in found]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {v.cache: v for v in verdicts}
