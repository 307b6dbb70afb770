"""schemathesis over the OpenAPI description: no 5xx, and every answer is one that the description knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import CHECKS, load_all_checks

from support.serving import Running, running_server

pytestmark = pytest.mark.slow
load_all_checks()
CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server({"request_timeout_s": 10}) as running:
        yield running


@pytest.fixture(scope="module")
def description(server: Running) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


SETTINGS = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPERATIONS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /tokenize",
    "POST /detokenize",
    "GET /v1/models",
    "GET /v1/models/{model}",
    "GET /health",
    "GET /metrics",
    "GET /v1/kvarn/stats",
    "GET /dashboard",
)
ENDLESS = "GET /v1/kvarn/events"


def test_every_operation_is_listed(description: schemathesis.BaseSchema) -> None:
    found = {operation.ok().label for operation in description.get_all_operations()}
    assert found == {*OPERATIONS, ENDLESS}


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_server_error(
    server: Running, description: schemathesis.BaseSchema, label: str, mode: schemathesis.GenerationMode
) -> None:
    method, path = label.split(" ")
    operation = description[path][method]
    checks = CHECKS.get_by_names(list(CHECKED))

    @given(case=operation.as_strategy(generation_mode=mode))
    @SETTINGS
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=checks, timeout=30)

    try:
        check()
    except Unsatisfiable:
        pytest.skip(f"{label} has nothing that could be {mode.value}")
    assert server.idle()
    assert server.held()[0] == 0
