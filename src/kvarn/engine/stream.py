"""Several readers of one engine: whoever reads steps it, and what a step brings for another waits for that one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from kvarn.core.requests import Delta, RequestOutput
from kvarn.engine.engine import Engine


class Outbox:
    """What each open request brought and nobody has read yet."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._deltas: dict[str, deque[Delta]] = {}
        self._outputs: dict[str, RequestOutput] = {}
        self._errors: dict[str, Exception] = {}
        self._left: deque[str] = deque()
        self._stepping = False

    def open(self, request_id: str) -> None:
        """Keep what comes for this request, until `close`."""
        self._deltas[request_id] = deque()

    def step(self) -> None:
        """One step of the engine."""
        self._stepping = True
        try:
            result = self._engine.step()
        finally:
            self._stepping = False
            while self._left:
                self.close(self._left.popleft())
        for delta in result.deltas:
            if delta.request_id in self._deltas:
                self._deltas[delta.request_id].append(delta)
        self._outputs.update((r.request_id, r) for r in result.finished if r.request_id in self._deltas)
        self._errors.update((r, error) for r, error in result.failures if r in self._deltas)

    def next_delta(self, request_id: str) -> Delta | None:
        """The next piece of an open request, stepping as long as there is none; None at its end. Raises what ended
        it."""
        mine = self._deltas[request_id]
        while not mine and request_id not in self._outputs and self._engine.has_work:
            self.step()
        self._raise_for(request_id)
        return mine.popleft() if mine else None

    def finish(self, request_id: str) -> None:
        """Step until an open request has ended. Raises what ended it."""
        while request_id not in self._outputs and self._engine.has_work:
            self.step()
        self._raise_for(request_id)

    def _raise_for(self, request_id: str) -> None:
        if (error := self._errors.pop(request_id, None)) is not None:
            raise error

    def close(self, request_id: str) -> RequestOutput | None:
        """Forget an open request and cancel what is unfinished of it. Returns its output, None where it was closed."""
        if self._deltas.pop(request_id, None) is None:
            return None
        self._errors.pop(request_id, None)
        return self._outputs.pop(request_id, None) or self._engine.cancel(request_id)

    def leave(self, request_id: str) -> None:
        """`close`, from wherever garbage is collected: in the middle of a step it waits for the step's end."""
        if self._stepping:
            self._left.append(request_id)
        else:
            self.close(request_id)


class Stream(Iterator[Delta]):
    """One request's pieces as they come. Leaving it early (`close`, the end of a `with`, losing it) cancels it.
    output: the whole request, once it has ended."""

    def __init__(self, outbox: Outbox, request_id: str, ended: Callable[[RequestOutput], None]) -> None:
        self._outbox, self._ended, self.request_id = outbox, ended, request_id
        self.output: RequestOutput | None = None

    def __next__(self) -> Delta:
        if self.output is None:
            try:
                if (delta := self._outbox.next_delta(self.request_id)) is not None:
                    return delta
            except BaseException:
                self.close()
                raise
            self.close()
        raise StopIteration

    def close(self) -> None:
        """End it; nothing happens where it has ended."""
        if (output := self._outbox.close(self.request_id)) is not None:
            self.output = output
            self._ended(output)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is there to see it
            self._outbox.leave(self.request_id)
