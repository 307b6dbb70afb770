"""Engines side by side: each a process of its own, repetitions interleaved, medians and ratios."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.table import Table

from kvarn.bench.cases import Case, Timing, prompt_ids, tokens_per_s
from kvarn.bench.peers import OWN, Engine
from kvarn.core.errors import KvarnError

UNIT = "tokens/s"
WARM_UP = Case("warm-up", 1, 16, 8, "all")
LAST_WORDS_BYTES = 500
NEARLY = 0.9  # one measurement may be off by so much
# Of cases that hold more tokens the caches of all engines together would not fit into a small machine's memory.
TOKENS_BESIDE_OTHERS = 16_384


class Worker:
    """One engine's process; loads its model at once, then answers one case at a time."""

    def __init__(self, engine: Engine, model: Path, threads: int) -> None:
        self.engine = engine
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close())
        self._process = subprocess.Popen(
            engine.start(model, threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _pipe(self._process.stdout).close()
        self._said.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self) -> None:
        """Until it has loaded and answered something small, which does not count. Raises KvarnError where it did not
        come up."""
        if not self._read().get("ready"):
            raise KvarnError(f"{self.engine.name} did not start")
        self.run(WARM_UP)

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
        raise KvarnError(f"{self.engine.name} ended with {self._process.wait()}: {self._last_words()}")

    def _last_words(self) -> str:
        self._said.seek(max(0, self._said.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        return " ".join(self._said.read().decode("utf-8", "replace").split())


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


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
) -> Comparison:
    """Run every case `repeats` times, round by round, each engine once a round; engines that were clearly slower in the
    first round than another of their family do not go on. In cases of many tokens the processes come and go in each
    round. An engine that fails is left out of the case, one that does not start of all, with a note. Interrupted
    (KeyboardInterrupt), it gives the rounds that were complete, with a note."""
    result = Comparison(tuple(cases), tuple(e.name for e in engines))
    with _Workers(model, threads, result, progress) as workers:
        try:
            _run(result, engines, repeats, workers, progress)
        except KeyboardInterrupt:
            result.interrupted = True
            result.notes.append("interrupted: later rounds and cases are missing")
    return result


def _run(
    result: Comparison, engines: Sequence[Engine], repeats: int, workers: _Workers, progress: Callable[[str], None]
) -> None:
    for number, case in enumerate(result.cases):
        able = [e for e in engines if e.name not in workers.broken]
        for round_number in range(repeats):
            where = f"{case.name} (case {number + 1} of {len(result.cases)}, round {round_number + 1} of {repeats})"
            speeds: dict[str, float] = {}
            for engine in able:
                progress(f"{where}: {engine.name}")
                speed = workers.run(engine, case)
                if speed is not None:
                    speeds[engine.name] = speed
                    progress(f"{where}: {engine.name}: {speed:,.1f} {UNIT}")
            for name, speed in speeds.items():
                result.runs.setdefault((case.name, name), []).append(speed)
            able = _go_on(result, case, able, round_number + 1)


def _go_on(result: Comparison, case: Case, engines: Sequence[Engine], rounds: int) -> list[Engine]:
    """Those that ran in every round so far and were, in the first, as fast as the fastest of their family or nearly."""
    first = {
        engine.name: runs[0]
        for engine in engines
        if len(runs := result.runs.get((case.name, engine.name), [])) == rounds
    }
    best: dict[str, float] = {}
    for engine in engines:
        best[engine.family] = max(best.get(engine.family, 0.0), first.get(engine.name, 0.0))
    return [e for e in engines if e.name in first and first[e.name] >= NEARLY * best[e.family]]


class _Workers:
    """The engines' processes. broken: names of those that did not start."""

    def __init__(self, model: Path, threads: int, result: Comparison, progress: Callable[[str], None]) -> None:
        self._model, self._threads, self._result, self._progress = model, threads, result, progress
        self._running: dict[str, Worker] = {}
        self.broken: set[str] = set()

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop(keep_slow=False)

    def run(self, engine: Engine, case: Case) -> float | None:
        """The case's figure; None, with a note, where there is none."""
        alone = case.streams * (case.prompt_tokens + case.output_tokens) > TOKENS_BESIDE_OTHERS
        if alone:
            self._stop(keep_slow=True)
        try:
            return self._worker(engine).run(case)
        except (KvarnError, BrokenPipeError) as error:
            self._result.notes.append(str(error))
            if engine.name in self.broken or not self._running[engine.name].is_alive:
                self._end(engine.name)
            return None
        finally:
            if alone:
                self._stop(keep_slow=True)

    def _worker(self, engine: Engine) -> Worker:
        """Running, started if need be. Raises KvarnError."""
        if (found := self._running.get(engine.name)) is not None:
            return found
        self._progress(f"starting {engine.name}")
        worker = self._running[engine.name] = Worker(engine, self._model, self._threads)
        try:
            worker.wait_ready()
        except (KvarnError, BrokenPipeError):
            self.broken.add(engine.name)
            raise
        return worker

    def _stop(self, keep_slow: bool) -> None:
        for name, worker in list(self._running.items()):
            if not (keep_slow and worker.engine.slow_start):
                self._end(name)

    def _end(self, name: str) -> None:
        if (worker := self._running.pop(name, None)) is not None:
            worker.close()


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
