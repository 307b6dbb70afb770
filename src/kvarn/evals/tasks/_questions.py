"""A context, a question, its answer: scored by the likelihood of the answer and by exact match, in both forms.

*Seen*: the question stands in the prompt when the cache's policy decides what to drop. *Unseen*: the policy decides
after the context alone, and the question comes later, as in a second turn. The second is the hard case: a policy that
looks at the question drops what does not belong to it, which no cache of a long conversation can do.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvarn.core.errors import InvalidRequest
from kvarn.evals.tasks.base import Bench, Value
from kvarn.text import Tokenizer

FORMS = ("seen", "unseen")


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids of each part. detail: where it belongs (length, depth)."""

    context: Sequence[int]
    question: Sequence[int]
    answer: Sequence[int]
    detail: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Asked:
    form: str
    logprob: float
    exact: bool
    detail: dict[str, float]


def ask(bench: Bench, questions: Iterable[Question], prefix: str = "", *, cells: bool = False) -> list[Value]:
    """Values FORM_logprob (nats a token of the answer, mean over the questions), FORM_exact (share), and with `cells`
    both again for each distinct detail. prefix: begins each metric's name."""
    asked = [a for q in questions for a in _both(bench, q)]
    values = _values(asked, prefix, {})
    if cells:
        details = [dict(d) for d in dict.fromkeys(tuple(sorted(a.detail.items())) for a in asked)]
        values += [v for d in details for v in _values([a for a in asked if a.detail == d], prefix, d)]
    return values


def _both(bench: Bench, q: Question) -> list[_Asked]:
    forms: dict[str, tuple[Sequence[int], Sequence[int]]] = {"seen": ([*q.context, *q.question], q.answer)}
    if bench.drops:
        forms["unseen"] = (q.context, [*q.question, *q.answer])
    scores = {form: bench.scorer.score(prompt, rest, len(q.answer)) for form, (prompt, rest) in forms.items()}
    scores.setdefault("unseen", scores["seen"])  # nothing is dropped, so there is nothing to have seen
    return [_Asked(form, scores[form].mean_logprob, scores[form].exact, q.detail) for form in FORMS]


def _values(asked: Sequence[_Asked], prefix: str, detail: dict[str, float]) -> list[Value]:
    values: list[Value] = []
    for form in FORMS:
        mine = [a for a in asked if a.form == form]
        if not mine:
            continue
        each = {"logprob": [a.logprob for a in mine], "exact": [float(a.exact) for a in mine]}
        for metric, samples in each.items():
            value = sum(samples) / len(samples)
            values.append(Value(f"{prefix}{form}_{metric}", value, len(samples), detail, samples))
    return values


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a piece of a prompt: no token that begins a text."""
    return tokenizer.encode(text, add_special=False)


def answered(tokenizer: Tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Ids of both. Tokens of white space alone that begin the answer belong to the question: whether a model puts a
    space or a line break there says nothing about what it remembers."""
    asked, told = plain(tokenizer, question), plain(tokenizer, answer)
    blank = 0
    while blank < len(told) - 1 and not tokenizer.decode([told[blank]]).strip():
        blank += 1
    return [*asked, *told[:blank]], told[blank:]


def haystack(
    tokenizer: Tokenizer, text: str, needles: Sequence[tuple[float, str]], size_tokens: int, rng: random.Random
) -> list[int]:
    """`size_tokens` of prose with each needle (depth 0 to 1, text) at the end of the line or sentence that is nearest
    before its depth. The prose begins anywhere in `text` (rng) and goes round. Raises InvalidRequest: too small."""
    pieces = [(depth, plain(tokenizer, needle)) for depth, needle in needles]
    head = tokenizer.encode("")
    room = size_tokens - len(head) - sum(len(ids) for _, ids in pieces)
    if room < 0:
        raise InvalidRequest(
            f"a context of {size_tokens} tokens has no room for the question", fixes=("--lengths 512",)
        )
    ids = plain(tokenizer, text)
    begin = rng.randrange(len(ids))
    prose = [ids[(begin + i) % len(ids)] for i in range(room)]
    ends = [i + 1 for i, token in enumerate(prose) if tokenizer.decode([token]).rstrip(" ").endswith((".", "\n"))]
    result, at = list(head), 0
    for depth, needle in sorted(pieces, key=lambda p: p[0]):
        stop = max([e for e in (0, *ends) if e <= depth * room and e >= at], default=at)
        stop = room if depth >= 1.0 else stop
        result += prose[at:stop] + needle
        at = stop
    return result + prose[at:]
