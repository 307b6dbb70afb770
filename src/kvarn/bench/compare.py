"""Engines side by side: each a process of its own, repetitions interleaved, medians and ratios."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kvarn.bench.cases import Case
from kvarn.bench.peers import OWN, Engine
from kvarn.bench.processes import Workers

UNIT = "tokens/s"
NEARLY = 0.9  # one measurement may be off by so much


@dataclass(slots=True)
class Comparison:
    """runs[case, engine]: tokens a second of each repetition; notes: what went wrong; interrupted: before its end."""

    cases: tuple[Case, ...]
    engines: tuple[str, ...]
    runs: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def median(self, case: str, engine: str) -> float | None:
        runs = self.runs.get((case, engine))
        return statistics.median(runs) if runs else None

    def best(self, case: str, own: bool) -> tuple[str, float] | None:
        """The fastest of Kvarn's engines (own: with the default cache) or of the peers, among those that ran in every
        round."""
        rounds = max((len(runs) for (name, _), runs in self.runs.items() if name == case), default=0)
        found = [
            (name, statistics.median(runs))
            for name in self.engines
            if (name == OWN if own else not name.startswith(OWN))
            and len(runs := self.runs.get((case, name), [])) == rounds > 0
        ]
        return max(found, key=lambda f: f[1], default=None)

    def ratios(self) -> list[dict[str, Any]]:
        """Kvarn with its default cache against the best peer of each case."""
        lines = []
        for case in self.cases:
            own, peer = self.best(case.name, True), self.best(case.name, False)
            if own and peer:
                line = {"case": case.name, "kvarn": own[1], "best_peer": peer[1], "best_peer_engine": peer[0]}
                lines.append({**line, "ratio": own[1] / peer[1]})
        return lines

    def as_dict(self, machine: dict[str, Any]) -> dict[str, Any]:
        results = [
            {"case": case, "engine": engine, "value": statistics.median(runs), "unit": UNIT, "runs": runs}
            for (case, engine), runs in self.runs.items()
            if runs
        ]
        return {"machine": machine, "results": results, "ratios": self.ratios(), "notes": self.notes}


def compare(
    engines: Sequence[Engine],
    cases: Sequence[Case],
    model: Path,
    threads: int,
    repeats: int,
    progress: Callable[[str], None],
    fit: Callable[[Case, Sequence[Engine]], bool] = lambda *_: True,
) -> Comparison:
    """Run every case `repeats` times, round by round, each engine once a round; engines that were clearly slower in the
    first round than another of their family do not go on. fit: whether what the engines hold of a kept case fits into
    memory at once; where it does not, each runs all its rounds before the next one, with a note. An engine that fails
    is left out of the case, one that does not start of all, with a note. Interrupted (KeyboardInterrupt), it gives the
    rounds that were complete, with a note."""
    result = Comparison(tuple(cases), tuple(e.name for e in engines))
    with Workers(model, threads, result.notes, progress) as workers:
        run = _Run(result, engines, repeats, workers, progress)
        try:
            for case in cases:
                run.case(case, fit)
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append("interrupted: later rounds and cases are missing")
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    """What fills `result`."""

    result: Comparison
    engines: Sequence[Engine]
    repeats: int
    workers: Workers
    progress: Callable[[str], None]

    def case(self, case: Case, fit: Callable[[Case, Sequence[Engine]], bool]) -> None:
        """All rounds of a case. Where it is kept, other processes' memory is free before it and its own behind it."""
        able = [e for e in self.engines if e.name not in self.workers.broken]
        if not case.kept:
            self._rounds(case, able)
            return
        self.workers.stop(self.engines)
        together = fit(case, able)
        if not together:
            self.result.notes.append(
                f"{case.name}: the caches do not fit into memory at once: all rounds of an engine before the next one's"
            )
        for group in [able] if together else [[e] for e in able]:
            self._rounds(case, group)
            self.workers.stop(group)

    def _rounds(self, case: Case, able: Sequence[Engine]) -> None:
        number = self.result.cases.index(case) + 1
        for round_number in range(1, self.repeats + 1):
            where = f"{case.name} (case {number} of {len(self.result.cases)}, round {round_number} of {self.repeats})"
            speeds: dict[str, float] = {}
            for engine in able:
                self.progress(f"{where}: {engine.name}")
                speed = self.workers.run(engine, case)
                if speed is not None:
                    speeds[engine.name] = speed
                    self.progress(f"{where}: {engine.name}: {speed:,.1f} {UNIT}")
            for name, speed in speeds.items():
                self.result.runs.setdefault((case.name, name), []).append(speed)
            going = self._go_on(case, able, round_number)
            if case.kept:
                self.workers.stop(e for e in able if e not in going)
            able = going

    def _go_on(self, case: Case, able: Sequence[Engine], rounds: int) -> list[Engine]:
        """Those that ran in every round so far and were, in the first, as fast as the fastest of their family that has
        run, or nearly."""
        first = {e.name: runs[0] for e in self.engines if (runs := self.result.runs.get((case.name, e.name)))}
        best: dict[str, float] = {}
        for engine in self.engines:
            best[engine.family] = max(best.get(engine.family, 0.0), first.get(engine.name, 0.0))
        return [
            e
            for e in able
            if len(self.result.runs.get((case.name, e.name), [])) == rounds and first[e.name] >= NEARLY * best[e.family]
        ]


def table(result: Comparison) -> Table:
    """Medians, a line an engine; then Kvarn against the best peer."""
    shown = Table(title=f"{UNIT}, medians")
    shown.add_column("")
    for case in result.cases:
        shown.add_column(case.name, justify="right")
    for engine in result.engines:
        values = [result.median(case.name, engine) for case in result.cases]
        shown.add_row(engine, *("-" if v is None else f"{v:,.1f}" for v in values))
    ratios = {r["case"]: f"{r['ratio']:.2f}" for r in result.ratios()}
    shown.add_section()
    shown.add_row("kvarn / best peer", *(ratios.get(case.name, "-") for case in result.cases))
    return shown
