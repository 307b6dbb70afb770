"""Settings are checked once."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvarn.cli.serve import SETTINGS
from kvarn.core.errors import InvalidRequest
from kvarn.server.settings import ServerSettings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_requests", 0),
        ("max_body_bytes", 0),
        ("max_json_depth", 0),
        ("max_queue", -1),
        ("body_timeout_s", 0),
        ("send_timeout_s", -1),
        ("stall_s", 0),
        ("drain_s", -1),
        ("request_timeout_s", 0),
        ("port", 65536),
        ("port", -1),
        ("metrics_prefix", "a b"),
    ],
)
def test_bad_values(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest):
        ServerSettings(**{name: value})


def test_the_command_line_has_the_same_defaults() -> None:
    """The options are written out there, so that `kvarn --help` needs no server package."""
    stated = {flag.lstrip("-").replace("-", "_"): default for flag, _, default, _ in SETTINGS}
    assert stated | {"share_prefixes": False} == {f.name: f.default for f in fields(ServerSettings)}
