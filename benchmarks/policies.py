"""Questions over many policies, with one prefill each.

    scripts/bench policies --caches "window:25%,sinks=4; snapkv:25%" [--lengths 4096] [--cases 4] [--json rows.jsonl]

Measures what `kvarn eval --tasks needle,recall` does choice by choice. Each context is computed once, with the signals
that any policy may ask for; then the sequence is forked for each choice, the choice's policy decides, and question and
answer go through what it left, in steps that end with a block. The question's tokens then follow the context, for the
form in which policies saw it. Rows are as `kvarn eval` writes them, but for the decode speed, which is 0;
FORM_gain and its error are beside the first of the choices, question by question.
Printed beside them: how long a policy takes to decide over the whole context and to act on it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from kvarn.core.options import EngineOptions, Grain
from kvarn.engine.build import assemble
from kvarn.engine.rereading import read_again_where_due
from kvarn.engine.runner import run_model
from kvarn.evals.records import Results, Row
from kvarn.evals.tasks import needle, recall
from kvarn.evals.tasks._questions import FORMS, Question, _Asked, _values
from kvarn.evals.tasks.base import Settings, Value
from kvarn.evals.texts import shipped_text
from kvarn.hub import resolve
from kvarn.kernels import load_backend
from kvarn.kv.choice import parse_choices, policy_of
from kvarn.kv.policies.base import Decision, KVPolicy, SequenceView, Signal
from kvarn.kv.signals import QueryRing
from kvarn.kv.step import Span
from kvarn.models.loading import load_model
from kvarn.text import load_tokenizer

PARENT, CHILD, BLOCK, STEP_TOKENS = 0, 1, 32, 512


@dataclass(frozen=True)
class Collect(KVPolicy):
    """Keeps everything, and has every signal collected."""

    grain: ClassVar[Grain] = "head"
    needs: ClassVar[frozenset[Signal]] = frozenset(Signal) - {Signal.RECONSTRUCTION}
    query_tokens: int = field(default=1, kw_only=True)
    skip: int = field(default=0, kw_only=True)

    @property
    def first_query(self) -> int:
        return self.skip

    def due(self, length: int, prompt_tokens: int, longest_row: int, block_size: int, bytes_per_token: int) -> bool:
        return False

    def decide(self, view: SequenceView) -> Decision | None:
        return None


class Bench:
    """One model, one cache that holds two sequences."""

    def __init__(self, length: int, choices: dict[str, KVPolicy | None]) -> None:
        files = resolve("smollm2-135m")
        self.name, self.tokenizer, self._model = files.name, load_tokenizer(files), load_model(files, "native")
        options = EngineOptions(
            kv="bfloat16",
            grain="head",
            max_seqs=2,
            context_tokens=length + 1,
            prefix_caching=False,
            block_size=BLOCK,
            also=tuple(name for name in choices if name != "full"),
        )
        self._cache = assemble(self._model, self.tokenizer, load_backend(None), options).engine.cache
        policies = [p for p in choices.values() if p is not None]
        (skip,) = {p.first_query for p in policies if Signal.QUERY_MOMENTS in p.signals} or {0}
        self._collect = Collect(query_tokens=max((p.query_tokens for p in policies), default=1), skip=skip)
        self._reach = length + 1

    def begin(self, ids: Sequence[int]) -> None:
        if PARENT in self._cache.sequences:
            self._cache.release(PARENT)
        self._cache.assign(PARENT, self._collect, len(ids))
        assert self._cache.admit(PARENT, ids, b"") == 0
        self.read(PARENT, ids)

    def read(self, seq_id: int, ids: Sequence[int]) -> torch.Tensor:
        """Compute ids; returns the hidden state of the last one [hidden]."""
        at = self._cache.sequences[seq_id].length
        for begin in range(0, len(ids), STEP_TOKENS):
            hidden = self._step(seq_id, at + begin, ids[begin : begin + STEP_TOKENS])
        return hidden[-1]

    def _step(self, seq_id: int, at: int, ids: Sequence[int]) -> torch.Tensor:
        assert self._cache.extend(seq_id, at + len(ids)) is None, "the cache holds both sequences"
        run = run_model(self._model, self._cache, [Span(seq_id, at, len(ids))], [ids], [self._reach])
        self._cache.commit(seq_id, ids)
        return run.hidden

    def answer(self, policy: KVPolicy | None, last: torch.Tensor, replayed: Sequence[int], scored: int) -> Answer:
        """Fork, decide, replay. last: the hidden state after the parent's last token."""
        parent, groups = self._cache.sequences[PARENT], self._cache.groups
        if policy is None or not policy.tiers:  # a copy of what stays as it is would only take time
            parent.policy = None
        assert self._cache.fork(PARENT, CHILD) is None, "the cache holds both sequences"
        parent.policy = self._collect
        counted = [None if p.mass is None else p.mass.copy() for g in groups for p in g.pools]
        state = self._cache.sequences[CHILD]
        state.policy, state.prompt_tokens, state.decided_blocks = policy, state.length, -1
        wants = frozenset() if policy is None else policy.signals
        recent = policy.query_tokens if policy is not None and Signal.RECENT_QUERIES in wants else 0
        state.rings = tuple(newest(r, recent) if recent else None for r in state.rings)
        state.moments = state.moments if Signal.QUERY_MOMENTS in wants else ()
        begun = time.perf_counter()
        self._decide()
        decision_s = time.perf_counter() - begun
        hidden, at = [last[None]], 0
        while at < len(replayed):
            n = min(BLOCK - state.length % BLOCK, len(replayed) - at)
            hidden.append(self._step(CHILD, state.length, replayed[at : at + n]))
            self._decide()
            at += n
        with torch.inference_mode():
            logits = self._model.logits(torch.cat(hidden)[len(replayed) - scored : len(replayed)])
        lines = torch.log_softmax(logits, -1)
        wanted = torch.tensor(list(replayed)[len(replayed) - scored :])
        held, length = self._cache.sequence_bytes(CHILD)[0], state.length
        for group in groups:
            group.settle_mass()
        for pool, mass in zip((p for g in groups for p in g.pools), counted, strict=True):
            if pool.mass is not None and mass is not None:
                pool.mass[...] = mass
        self._cache.release(CHILD)
        chosen = lines.gather(1, wanted[:, None])[:, 0]
        exact = bool((lines.argmax(-1) == wanted).all())
        return Answer(float(chosen.double().mean()), exact, held, length, decision_s)

    def _decide(self) -> None:
        read_again_where_due(self._model, self._cache, CHILD, self.tokenizer)
        if decision := self._cache.decide(CHILD):
            assert self._cache.apply(CHILD, decision)

    @property
    def parent_bytes(self) -> int:
        return self._cache.sequence_bytes(PARENT)[0]


@dataclass(frozen=True)
class Answer:
    """logprob: mean of the answer's tokens. held_bytes, tokens: at its end. decision_s: of the first decision, by which
    the whole context is cut."""

    logprob: float
    exact: bool
    held_bytes: int
    tokens: int
    decision_s: float


def newest(ring: QueryRing | None, w: int) -> QueryRing | None:
    """The last w queries of a longer ring."""
    if ring is None or (kept := ring.kept) is None:
        return ring
    w = min(w, kept.shape[1])
    return QueryRing(w, kept[:, -w:].clone(), ring.params, w)


def measure(
    bench: Bench, policies: dict[str, KVPolicy | None], q: Question, forms: Sequence[str]
) -> dict[str, list[tuple[_Asked, Answer]]]:
    """These forms of one question, by choice."""
    found: dict[str, list[tuple[_Asked, Answer]]] = {name: [] for name in policies}
    rests = {"unseen": [*q.question, *q.answer], "seen": q.answer}
    bench.begin(q.context[:-1])
    last = bench.read(PARENT, q.context[-1:])
    for form in ("unseen", "seen"):
        if form == "seen":
            last = bench.read(PARENT, q.question)
        if form not in forms:
            continue
        for name, policy in policies.items():
            a = bench.answer(policy, last, rests[form], len(q.answer))
            found[name].append((_Asked(form, a.logprob, a.exact, q.detail), a))
    return found


def beside(mine: Sequence[_Asked], others: Sequence[_Asked], prefix: str) -> list[Value]:
    """How much likelier the answers to the same questions are than with the choice of reference, nats a token, and the
    standard error of that mean."""
    values: list[Value] = []
    for form in dict.fromkeys(a.form for a in mine):
        pairs = zip(mine, others, strict=True)
        gains = torch.tensor([a.logprob - b.logprob for a, b in pairs if a.form == form], dtype=torch.float64)
        error = float(gains.std() / len(gains) ** 0.5) if len(gains) > 1 else 0.0
        values += [Value(f"{prefix}{form}_gain", float(gains.mean()), len(gains))]
        values += [Value(f"{prefix}{form}_gain_error", error, len(gains))]
    return values


def rows_of(
    bench: Bench, task: str, prefix: str, asked: dict[str, list[tuple[_Asked, Answer]]], reference: str, seed: int
) -> list[Row]:
    """reference: the choice that the others are compared with, question by question."""
    rows: list[Row] = []
    for cache, pairs in asked.items():
        mine = [a for a, _ in pairs]
        values = [*_values(mine, prefix, {}), *beside(mine, [a for a, _ in asked[reference]], prefix)]
        if task == "needle":
            for detail in {tuple(sorted(a.detail.items())): a.detail for a in mine}.values():
                values += _values([a for a in mine if a.detail == detail], prefix, detail)
        longest = max((a for _, a in pairs), key=lambda a: a.tokens)
        for v in values:
            rows.append(
                Row(
                    cache=cache,
                    task=task,
                    metric=v.metric,
                    value=v.value,
                    physical_bytes_peak=bench.parent_bytes,
                    bytes_per_token=longest.held_bytes / longest.tokens,
                    decode_tokens_per_s=0.0,
                    model=bench.name,
                    seed=seed,
                    n=v.n,
                    detail=dict(v.detail),
                    fingerprint=f"{task} {prefix} {cache}",
                    of_rows=len(values),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--caches", required=True, help="policies, with semicolons between them; full comes first")
    parser.add_argument("--tasks", default="needle,recall")
    parser.add_argument("--lengths", type=lambda t: tuple(map(int, t.split(","))), default=(4096,))
    parser.add_argument("--depths", type=lambda t: tuple(map(float, t.split(","))), default=Settings("").depths)
    parser.add_argument("--cases", type=int, default=4)
    parser.add_argument("--forms", type=lambda t: tuple(t.split(",")), default=FORMS, help="seen, unseen")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    choices = {c.text: policy_of(c) for c in parse_choices(f"full; {asked.caches}")}
    bench = Bench(max(asked.lengths), choices)
    settings = Settings(
        text=shipped_text(), lengths=asked.lengths, depths=asked.depths, cases=asked.cases, seed=asked.seed
    )
    kinds = {
        ("needle", ""): needle.questions(bench.tokenizer, settings),
        ("recall", "kv_"): recall._each(bench.tokenizer, settings, recall.key_value),
        ("recall", "vt_"): recall._each(bench.tokenizer, settings, recall.tracking),
    }
    results = Results(asked.json)
    for (task, prefix), questions in kinds.items():
        if task not in asked.tasks.split(","):
            continue
        found: dict[str, list[tuple[_Asked, Answer]]] = {name: [] for name in choices}
        for number in itertools.count(1):
            if (question := next(questions, None)) is None:
                break
            begun = time.perf_counter()
            for name, pairs in measure(bench, choices, question, asked.forms).items():
                found[name] += pairs
            told = "; ".join(
                f"{n} {' '.join(f'{a.logprob:.2f}' for a, _ in p[-len(asked.forms) :])}" for n, p in found.items()
            )
            print(
                f"{task} {prefix}{number}, {time.perf_counter() - begun:.0f} s, unseen before seen: {told}", flush=True
            )
        rows = rows_of(bench, task, prefix, found, list(choices)[1], asked.seed)
        results.add(rows)
        for name in choices:
            told = {r.metric: r.value for r in rows if r.cache == name and not r.detail}
            decision_s = statistics.median(a.decision_s for _, a in found[name])
            scores = ", ".join(f"{m} {v:.3f}" for m, v in told.items())
            print(f"{name}: {scores}, decision {1e3 * decision_s:.0f} ms", flush=True)


if __name__ == "__main__":
    main()
