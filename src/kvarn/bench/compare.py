"""Engines side by side: each a process of its own, repetitions interleaved, medians and ratios."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from kvarn.bench.cases import Case, Timing, prompt_ids, tokens_per_s
from kvarn.bench.peers import Engine
from kvarn.core.errors import KvarnError

UNIT = "tokens/s"


class Worker:
    """One engine's process; loads its model at once, then answers one case at a time."""

    def __init__(self, engine: Engine, model: Path, threads: int) -> None:
        self.engine = engine
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            engine.start(model, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_ready(self) -> None:
        """Raises KvarnError where the engine did not come up."""
        if not self._read().get("ready"):
            raise KvarnError(f"{self.engine.name} did not start", fixes=("run its worker by hand to see why",))

    def run(self, case: Case) -> float:
        """The case's figure. Raises KvarnError with what the engine said."""
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps({"case": case.as_dict(), "prompts": prompt_ids(case)}) + "\n")
        pipe.flush()
        answer = self._read()
        if "error" in answer:
            raise KvarnError(f"{self.engine.name}, {case.name}: {answer['error']}")
        return tokens_per_s(case, Timing(answer["prefill_s"], answer["decode_s"]))

    def _read(self) -> dict[str, Any]:
        """The next line that is JSON; engines also talk on their own."""
        for line in _pipe(self._process.stdout):
            if line.startswith("{"):
                return json.loads(line)
        raise KvarnError(f"{self.engine.name} ended with {self._process.wait()}")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@dataclass(slots=True)
class Comparison:
    """runs[case, engine]: tokens a second of each repetition; notes: what went wrong."""

    cases: tuple[Case, ...]
    engines: tuple[str, ...]
    runs: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def median(self, case: str, engine: str) -> float | None:
        runs = self.runs.get((case, engine))
        return statistics.median(runs) if runs else None

    def best(self, case: str, own: bool) -> tuple[str, float] | None:
        """The fastest of Kvarn's engines (own) or of the peers."""
        found = [
            (name, value)
            for name in self.engines
            if (name == "kvarn" if own else not name.startswith("kvarn"))
            and (value := self.median(case, name)) is not None
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
) -> Comparison:
    """Run every case `repeats` times on every engine, round by round, each engine once a round; a first round of the
    smallest case warms up and does not count. An engine that fails is left out from there, with a note."""
    result = Comparison(tuple(cases), tuple(e.name for e in engines))
    with ExitStack() as stack:
        workers: list[Worker] = []
        for engine in engines:
            progress(f"starting {engine.name}")
            worker = stack.enter_context(Worker(engine, model, threads))
            if _guarded(result, lambda w=worker: (w.wait_ready(), w.run(Case("warm-up", 1, 16, 8, "all")))):
                workers.append(worker)
        for case in cases:
            able = list(workers)
            for round_number in range(repeats):
                for worker in list(able):
                    progress(f"{case.name}, round {round_number + 1} of {repeats}: {worker.engine.name}")
                    runs = result.runs.setdefault((case.name, worker.engine.name), [])
                    if not _guarded(result, lambda w=worker, r=runs, c=case: r.append(w.run(c))):
                        able.remove(worker)
    return result


def _guarded(result: Comparison, act: Callable[[], object]) -> bool:
    try:
        act()
    except (KvarnError, BrokenPipeError) as error:
        result.notes.append(str(error))
        return False
    return True


def table(result: Comparison) -> Table:
    """Medians, a line a case; then Kvarn against the best peer."""
    shown = Table(title=f"{UNIT}, medians")
    shown.add_column("case")
    for engine in result.engines:
        shown.add_column(engine, justify="right")
    shown.add_column("kvarn / best peer", justify="right")
    ratios = {r["case"]: r["ratio"] for r in result.ratios()}
    for case in result.cases:
        values = [result.median(case.name, e) for e in result.engines]
        ratio = ratios.get(case.name)
        cells: Iterable[str] = ("-" if v is None else f"{v:,.1f}" for v in values)
        shown.add_row(case.name, *cells, "-" if ratio is None else f"{ratio:.2f}")
    return shown
