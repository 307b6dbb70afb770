"""What the server was told, checked once: addresses, limits, timeouts. The engine's own options are `EngineOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvarn.core.errors import InvalidRequest

MIB = 1 << 20


@dataclass(frozen=True)
class ServerSettings:
    """Limits and timeouts of one server; `_s` are seconds.

    served_name: the model's name in the API (None: as it was asked for). api_keys: TOML file of tenants.
    max_requests: requests in the server at once, running and waiting; more get 429, and so do answers beyond the
    engine's own places (max_seqs) and max_queue waiting ones. max_body_bytes, max_json_depth: of a request's body.
    header_timeout_s, body_timeout_s, send_timeout_s: a client that is slower at sending its headers or its body, or at
    taking a piece of an answer, is cut off. request_timeout_s: longest time from arrival to the last token (None:
    none). stall_s: with work to do and no step done for so long, /health says 503. drain_s: time for open requests when
    the server ends. share_prefixes: tenants find each other's cached prompts (timing then tells what others asked).
    Raises InvalidRequest.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_name: str | None = None
    api_keys: Path | None = None
    max_requests: int = 256
    max_queue: int = 192
    max_body_bytes: int = 4 * MIB
    max_json_depth: int = 64
    header_timeout_s: float = 15.0
    body_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_s: float = 30.0
    request_timeout_s: float | None = None
    stall_s: float = 60.0
    drain_s: float = 30.0
    share_prefixes: bool = False
    metrics_prefix: str = "kvarn"

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_body_bytes", "max_json_depth"):
            self._require(getattr(self, name) >= 1, name, "use 1 or more")
        for name in ("header_timeout_s", "body_timeout_s", "send_timeout_s", "keep_alive_s", "stall_s"):
            self._require(getattr(self, name) > 0, name, "use more than 0 seconds")
        self._require(self.request_timeout_s is None or self.request_timeout_s > 0, "request_timeout_s", "use above 0")
        self._require(self.max_queue >= 0 and self.drain_s >= 0, "max_queue or drain_s", "use 0 or more")
        self._require(0 <= self.port <= 65535, "port", "use 0 (any free one) to 65535")
        self._require(self.metrics_prefix.isidentifier(), "metrics_prefix", "use letters, digits and _")

    def _require(self, ok: bool, name: str, way_out: str) -> None:
        if not ok:
            raise InvalidRequest(f"{name} is {getattr(self, name, None)!r}", fixes=(way_out,))
