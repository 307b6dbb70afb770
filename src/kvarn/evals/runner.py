"""Runs tasks over cache choices of one model: the weights are loaded once, each task gets a cache of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvarn import __version__
from kvarn.core.files import ModelFiles
from kvarn.core.options import EngineOptions
from kvarn.engine.build import assemble, check_before_loading
from kvarn.evals.choices import FULL, EvalChoice
from kvarn.evals.identity import model_identity
from kvarn.evals.records import Results, Row
from kvarn.evals.scoring import Known, Scorer, Tick, Usage
from kvarn.evals.tasks.base import Bench, Settings, Task, Value, error_of, load_task
from kvarn.evals.tasks.speed import Speed
from kvarn.kernels import load_backend
from kvarn.kv.choice import policy_of, settled
from kvarn.models.base import CausalLM
from kvarn.models.loading import load_model
from kvarn.text import Tokenizer, load_tokenizer

VERSION = 2  # of what tasks measure: raising it measures everything again
SPEED = "speed"
UNSTATED_CONTEXT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Unit:
    """One task over one choice, or the speeds of all choices; and whether it was measured before."""

    choices: tuple[EvalChoice, ...]
    task: str
    fingerprint: str
    cost_tokens: int
    done: bool

    @property
    def cache(self) -> str:
        return self.choices[0].text if len(self.choices) == 1 else f"{len(self.choices)} caches"


@dataclass(frozen=True, slots=True)
class Listener:
    """Who hears about the progress: units that begin, tokens that were computed, units with their rows."""

    begin: Callable[[Unit], None] = lambda unit: None
    tick: Tick = lambda tokens: None
    end: Callable[[Unit, Sequence[Row]], None] = lambda unit, rows: None


class Evaluation:
    """Everything is checked on construction, before weights are loaded. options: the engine's, without `kv`. Raises
    UnknownName, IncompatiblePlan, DoesNotFit."""

    def __init__(
        self,
        files: ModelFiles,
        choices: Sequence[EvalChoice],
        tasks: Sequence[str],
        settings: Settings,
        options: EngineOptions,
        results: Results,
    ) -> None:
        self._files, self._settings, self._results = files, settings, results
        self._options = replace(options, max_seqs=1, prefix_caching=False)
        self._choices = tuple(dict.fromkeys((FULL, *choices)))
        self._tasks = {name: load_task(name) for name in dict.fromkeys((SPEED, *tasks))}
        for choice in self._choices:
            check_before_loading(files, settled(replace(choice.options(self._options), context_tokens=None)))
        self.identity = model_identity(files)
        self._models: dict[int, CausalLM] = {}
        self._known: dict[EvalChoice, Known] = {}
        self._tokenizer: Tokenizer | None = None

    def units(self, trained_tokens: int | None = None) -> list[Unit]:
        """What there is to do: all speeds together, since another hour's are not to be compared with them; then choice
        by choice."""
        trained = trained_tokens or UNSTATED_CONTEXT_TOKENS
        each = [((choice,), name) for choice in self._choices for name in self._tasks if name != SPEED]
        return [self._unit(choices, name, trained) for choices, name in [(self._choices, SPEED), *each]]

    def _unit(self, choices: tuple[EvalChoice, ...], name: str, trained_tokens: int) -> Unit:
        fingerprint = self._fingerprint(choices, name)
        cost = len(choices) * self._tasks[name].cost_tokens(self._settings, trained_tokens)
        return Unit(choices, name, fingerprint, cost, bool(self._results.of(fingerprint)))

    def _fingerprint(self, choices: tuple[EvalChoice, ...], name: str) -> str:
        """Of all that the values hang on."""
        task = self._tasks[name]
        read = {key: getattr(self._settings, key) for key in task.reads}
        engine = {k: str(getattr(self._options, k)) for k in ("weights", "block_size", "residual_tokens", "backend")}
        if self._options.numerics != "invariant":
            engine["numerics"] = self._options.numerics
        facts = {
            "version": [VERSION, __version__],
            "model": self.identity,
            "cache": "; ".join(sorted(choice.text for choice in choices)),
            "task": name,
            **engine,
            **read,
            **({"task_version": task.version} if task.version > 1 else {}),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]

    def run(self, listener: Listener | None = None) -> list[Row]:
        """Measure what has not been measured; returns the rows of all units, in their order."""
        heard = listener or Listener()
        rows: list[Row] = []
        for unit in self.units():
            if not unit.done:
                heard.begin(unit)
                self._results.add(self._measure(unit, heard.tick))
                heard.end(unit, self._results.of(unit.fingerprint))
            rows += self._results.of(unit.fingerprint)
        return rows

    def _measure(self, unit: Unit, tick: Tick) -> list[Row]:
        task = self._tasks[unit.task]
        self._known = {choice: known for choice, known in self._known.items() if choice in (FULL, *unit.choices)}
        benches = [self._bench(choice, task, tick) for choice in unit.choices]
        if isinstance(task, Speed):
            values = task.together(benches, self._settings)
        else:
            values = [task.run(bench, self._settings) for bench in benches]
        total = sum(len(mine) for mine in values)
        rows: list[Row] = []
        for choice, bench, mine in zip(unit.choices, benches, values, strict=True):
            rows += self._rows(unit, choice, bench.scorer.usages, mine, total)
        return rows

    def _bench(self, choice: EvalChoice, task: Task, tick: Tick) -> Bench:
        scorer = self._scorer(choice, task, tick)
        full = scorer if choice.is_full or isinstance(task, Speed) else self._scorer(FULL, task, tick)
        policy = policy_of(choice.params)
        drops = policy is not None and policy.decides
        return Bench(scorer, full, self._loaded_tokenizer(), self._trained_tokens(), drops)

    def _rows(
        self, unit: Unit, choice: EvalChoice, usages: Sequence[Usage], values: Sequence[Value], of_rows: int
    ) -> list[Row]:
        longest = max(usages, key=lambda u: u.tokens)
        speed = values[0].value if unit.task == SPEED else self._speed(choice)
        return [
            Row(
                cache=choice.text,
                task=unit.task,
                metric=value.metric,
                value=value.value,
                physical_bytes_peak=max(u.peak_bytes for u in usages),
                bytes_per_token=longest.held_bytes / longest.tokens,
                decode_tokens_per_s=speed,
                model=self._files.name,
                seed=self._settings.seed,
                n=value.n,
                detail=dict(value.detail),
                fingerprint=unit.fingerprint,
                of_rows=of_rows,
                stderr=error_of(value, self._beside(choice, unit.task, value)),
                samples=tuple(value.samples),
            )
            for value in values
        ]

    def _speed(self, choice: EvalChoice) -> float:
        """The choice's decode speed, which the first unit measured."""
        rows = self._results.of(self._fingerprint(self._choices, SPEED))
        return next(r.value for r in rows if r.cache == choice.text)

    def _beside(self, choice: EvalChoice, task: str, value: Value) -> Sequence[float] | None:
        """The full cache's samples of the same value, where it is the difference to them that counts."""
        if choice.is_full or not self._tasks[task].paired:
            return None
        rows = self._results.of(self._fingerprint((FULL,), task))
        return next((r.samples for r in rows if (r.metric, r.detail) == (value.metric, dict(value.detail))), None)

    def _scorer(self, choice: EvalChoice, task: Task, tick: Tick) -> Scorer:
        """An engine with a cache that holds one sequence as long as the task needs, and no less than the budget."""
        needed = task.context_tokens(self._settings, self._trained_tokens())
        budget = getattr(policy_of(choice.params), "budget", None)
        context = max(needed, budget.tokens or 0 if budget is not None else 0)
        options = replace(choice.options(self._options), context_tokens=context)
        backend = load_backend(options.backend)
        model = self._loaded_model(choice.share_layers)
        engine = assemble(model, self._loaded_tokenizer(), backend, options).engine
        return Scorer(engine, tick, self._known.setdefault(choice, {}))

    def _loaded_model(self, share_layers: int) -> CausalLM:
        if share_layers not in self._models:
            self._models[share_layers] = load_model(
                self._files, self._options.weights, share_layers, self._options.numerics
            )
        return self._models[share_layers]

    def _loaded_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._files)
        return self._tokenizer

    def _trained_tokens(self) -> int:
        return self._loaded_model(1).max_context_tokens or UNSTATED_CONTEXT_TOKENS
