"""The engines' processes: started when they are needed, asked a case at a time, ended."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvarn.bench.cases import Case, Timing, prompt_ids, tokens_per_s
from kvarn.bench.peers import Engine
from kvarn.core.errors import KvarnError

WARM_UP = Case("warm-up", 1, 16, 8, "all")
LAST_WORDS_BYTES = 500


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


class Workers:
    """The processes that run. notes: where it says what went wrong. broken: names of engines that did not start."""

    def __init__(self, model: Path, threads: int, notes: list[str], progress: Callable[[str], None]) -> None:
        self._model, self._threads, self._notes, self._progress = model, threads, notes, progress
        self._running: dict[str, Worker] = {}
        self.broken: set[str] = set()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self._end(name)

    def run(self, engine: Engine, case: Case) -> float | None:
        """The case's figure; None, with a note, where there is none."""
        try:
            return self._worker(engine).run(case)
        except (KvarnError, BrokenPipeError) as error:
            self._notes.append(str(error))
            if engine.name in self.broken or not self._running[engine.name].is_alive:
                self._end(engine.name)
            return None

    def stop(self, engines: Iterable[Engine]) -> None:
        """Free what they hold; those that take minutes to start stay."""
        for engine in engines:
            if not engine.slow_start:
                self._end(engine.name)

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

    def _end(self, name: str) -> None:
        if (worker := self._running.pop(name, None)) is not None:
            worker.close()
