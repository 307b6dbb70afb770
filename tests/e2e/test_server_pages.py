"""The pages that people look at need nothing from another host: they work without a network."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from support.serving import Running, client, running_server

PAGES = ("/dashboard", "/docs")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server() as running:
        yield running


@pytest.mark.parametrize("path", PAGES)
def test_a_page_asks_only_this_server_and_only_for_what_it_has(server: Running, path: str) -> None:
    with client(server) as http:
        page = http.get(path)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert not re.search(r"""https?:|=["']?//""", page.text), "an address elsewhere"
        asked = set(re.findall(r'(?:fetch\(|href=|src=)"([^"]+)"', page.text)) - {"data:,"}
        assert asked, "it shows something"
        for address in asked:
            with http.stream("GET", f"/{address}") as answer:
                assert answer.status_code == 200, address


def test_a_question_that_nobody_waits_for_is_not_asked_and_is_no_error(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a dashboard that was closed, or whose question took too long."""
    asked, go_on = list[str](), threading.Event()
    server.thread.call(lambda _: go_on.wait(10))
    given_up = server.thread.call(lambda _: asked.append("given up"))
    last = server.thread.call(lambda _: asked.append("last"))
    assert given_up.cancel()
    go_on.set()
    last.result(10)
    assert asked == ["last"]
    assert not [r for r in caplog.records if r.levelname == "ERROR"]
