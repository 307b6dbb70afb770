"""What is open, what is too much, and that everything comes back, on a real engine without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvarn import SamplingParams
from kvarn.core.errors import DoesNotFit
from kvarn.core.requests import Delta
from kvarn.server.bridge import EngineThread, Finished, Work
from kvarn.server.desk import Desk
from kvarn.server.errors import ApiError
from kvarn.server.settings import ServerSettings
from kvarn.server.tenants import Tenant
from support.serving import tiny_parts

ANYONE = Tenant("", b"", admin=True)
LIMITED = Tenant("small", b"x", max_requests=1)


def work(name: str, max_tokens: int = 5, n: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> Work:
    return Work(name, prompt, SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True))


@asynccontextmanager
async def open_desk(**limits: Any) -> AsyncIterator[Desk]:
    parts = tiny_parts(max_seqs=4)
    thread = EngineThread(parts.engine)
    thread.start()
    try:
        yield Desk(thread, ServerSettings(**limits), parts.plan.max_seqs)
        assert await asyncio.wrap_future(thread.call(lambda e: e.cache.memory().sequences)) == 0
    finally:
        assert thread.stop(10)


def on_loop(function: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test that is a coroutine."""

    def run() -> None:
        asyncio.run(asyncio.wait_for(function(), 30))

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


@on_loop
async def test_deltas_join_to_the_output() -> None:
    async with open_desk() as desk:
        ticket = desk.open([work("a", 6), work("b", 3, n=2)], ANYONE)
        await ticket.accepted()
        tokens: dict[tuple[str, int], list[int]] = {}
        async for item in ticket.items():
            if isinstance(item, Delta):
                tokens.setdefault((item.request_id, item.index), []).extend(item.token_ids)
        ticket.close()
        for name, finished in ticket.finished.items():
            for completion in finished.output.completions:
                assert tuple(tokens[name, completion.index]) == completion.token_ids
        assert {n: len(f.output.completions) for n, f in ticket.finished.items()} == {"a": 1, "b": 2}


@on_loop
async def test_results_keep_the_order_of_the_prompts() -> None:
    async with open_desk() as desk:
        ticket = desk.open([work("long", 20), work("short", 1)], ANYONE)
        await ticket.accepted()
        assert [r.output.request_id for r in await ticket.results()] == ["long", "short"]
        ticket.close()
        assert desk.open_requests == 0


@on_loop
async def test_one_refused_prompt_takes_back_the_others() -> None:
    async with open_desk() as desk:
        ticket = desk.open([work("a", 100), work("b", 10_000)], ANYONE)
        with pytest.raises(DoesNotFit):
            await ticket.accepted()
        ticket.close()
        again = desk.open([work("a", 2)], ANYONE)  # its id is free again
        await again.accepted()
        assert len(await again.results()) == 1
        again.close()


@on_loop
async def test_closing_cancels_and_twice_is_once() -> None:
    async with open_desk() as desk:
        ticket = desk.open([work("a", 100)], ANYONE)
        await ticket.accepted()
        ticket.close()
        ticket.close()
        assert desk.open_requests == 0
        assert not await asyncio.wrap_future(desk.thread.call(lambda e: e.has_work))


@on_loop
async def test_limits() -> None:
    async with open_desk(max_requests=2, max_queue=1) as desk:
        with pytest.raises(ApiError, match="6 answers in one request; at most 5") as never:
            desk.open([work("x", n=6)], ANYONE)
        assert never.value.status == 400
        first = desk.open([work("a", n=4)], ANYONE)
        with pytest.raises(ApiError, match="of at most 5") as busy:
            desk.open([work("b", n=2)], ANYONE)
        assert busy.value.status == 429
        assert 1 <= int(busy.value.headers["Retry-After"]) <= 60
        second = desk.open([work("b")], LIMITED)
        with pytest.raises(ApiError, match="2 requests are open, of at most 2"):
            desk.open([work("c")], ANYONE)
        first.close()
        with pytest.raises(ApiError, match="your 1 requests are open, of at most 1"):
            desk.open([work("c")], LIMITED)
        second.close()
        desk.open([work("c")], LIMITED).close()


@on_loop
async def test_nothing_new_while_draining() -> None:
    async with open_desk() as desk:
        desk.draining = True
        with pytest.raises(ApiError) as caught:
            desk.open([work("a")], ANYONE)
        assert caught.value.status == 503


@on_loop
async def test_stopping_ends_what_is_open() -> None:
    """Whoever still waits when the engine's thread stops gets an end."""
    parts = tiny_parts()
    thread = EngineThread(parts.engine)
    thread.start()
    desk = Desk(thread, ServerSettings(), parts.plan.max_seqs)
    ticket = desk.open([work("a", 100)], ANYONE)
    await ticket.accepted()
    assert await asyncio.to_thread(thread.stop, 10)
    items = [item async for item in ticket.items()]
    assert isinstance(items[-1], Finished)
    assert items[-1].output.completions[0].finish_reason in ("cancelled", "length")
    ticket.close()
    with pytest.raises(ApiError) as caught:
        desk.open([work("b")], ANYONE)
    assert caught.value.status == 503


@on_loop
async def test_an_observer_that_fails_harms_nobody() -> None:
    class Bad:
        def on_accepted(self, *args: Any) -> None:
            raise RuntimeError("bad")

        on_step = on_finished = on_accepted

    parts = tiny_parts()
    thread = EngineThread(parts.engine, [Bad()])  # type: ignore[list-item]
    thread.start()
    ticket = Desk(thread, ServerSettings(), 4).open([work("a")], ANYONE)
    await ticket.accepted()
    assert (await ticket.results())[0].output.completions[0].finish_reason == "length"
    assert thread.stop(10)


@on_loop
async def test_steps_that_always_fail_end_everything_and_then_work_again() -> None:
    parts = tiny_parts()
    engine, plain = parts.engine, parts.engine.step

    def broken() -> None:
        raise RuntimeError("the device is gone")

    engine.step = broken  # type: ignore[method-assign]
    thread = EngineThread(engine)
    thread.start()
    desk = Desk(thread, ServerSettings(), 4)
    ticket = desk.open([work("a"), work("b")], ANYONE)
    await ticket.accepted()
    assert {r.output.completions[0].finish_reason for r in await ticket.results()} == {"cancelled"}
    ticket.close()
    engine.step = plain  # type: ignore[method-assign]
    again = desk.open([work("c")], ANYONE)
    await again.accepted()
    assert (await again.results())[0].output.completions[0].finish_reason == "length"
    assert thread.stop(10)
