"""Soaks a server: random clients that behave, leave, or send nonsense, over a pool far too small for them."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field

import psutil

from support.serving import Running, running_server
from support.soak_clients import CLIENTS, STUCK_S, ClientReport, play

WARM_SHARE = 0.5  # of the time, before memory is measured for the first time
GROWTH_BYTES = 16e6  # by which the server's resident memory may grow from then to the end


@dataclass
class SoakReport:
    """clients: what they saw. rss: the server's resident bytes after WARM_SHARE of the time, and at the end."""

    seconds: float
    clients: ClientReport = field(default_factory=ClientReport)
    idle: bool = False
    preemptions: int = 0
    leaked_sequences: int = -1
    ledger_error: str | None = None
    rss_warm: int = 0
    rss_end: int = 0

    @property
    def growth_bytes(self) -> float:
        return self.rss_end - self.rss_warm if self.rss_warm else float("inf")

    @property
    def good(self) -> bool:
        wrong = self.clients.lost or self.clients.unexpected or self.leaked_sequences or self.ledger_error
        return self.idle and not wrong and self.growth_bytes <= GROWTH_BYTES

    def __str__(self) -> str:
        seen = self.clients
        return (
            f"{'good' if self.good else 'BAD'}: {self.seconds:.0f} s, {sum(seen.outcomes.values())} requests "
            f"{dict(seen.outcomes)}, lost or stuck {seen.lost}, unexpected {seen.unexpected[:5]}, preemptions "
            f"{self.preemptions}, sequences left {self.leaked_sequences}, ledger {self.ledger_error or 'balanced'}, "
            f"resident memory {self.rss_warm / 1e6:.1f} MB at half of the time, {self.rss_end / 1e6:.1f} MB at "
            f"the end ({self.growth_bytes / 1e6:+.1f} MB, {GROWTH_BYTES / 1e6:.0f} allowed)"
        )


def soak(seconds: float, *, seed: int = 0, progress: bool = False) -> SoakReport:
    """Run a server and its clients for so long; the pool holds about 3 of the 24 clients' sequences. Few different step
    sizes: oneDNN keeps a primitive for each one that it met, up to 1,024, which looks like growth while they fill."""
    report = SoakReport(seconds)
    limits = {"max_requests": CLIENTS - 2, "body_timeout_s": 2.0, "send_timeout_s": 5.0}
    sizes = {
        "kv_memory_bytes": _pool_bytes(),
        "max_seqs": 16,
        "step_tokens": 20,
        "context_tokens": 128,
        "poison": False,
    }
    with running_server(limits, **sizes) as server, _apart() as pool:
        playing = pool.submit(play, server.url, seconds, seed)
        _watch(report, playing, seconds, progress)
        report.clients = playing.result(seconds + 2 * STUCK_S)
        _settle(server, report)
    return report


def _apart() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _pool_bytes() -> int:
    """About 400 tokens of the tiny model: 2 layers x K and V x 2 heads x 8 numbers x 4 bytes."""
    return 400 * 2 * 2 * 2 * 8 * 4


def _watch(report: SoakReport, playing: Future[ClientReport], seconds: float, progress: bool) -> None:
    begun, shown_s = time.monotonic(), 0.0
    while not playing.done():
        time.sleep(min(1.0, seconds / 20))
        passed_s = time.monotonic() - begun
        if not report.rss_warm and passed_s > seconds * WARM_SHARE:
            report.rss_warm = _resident()
        if progress and passed_s > shown_s + 10:
            shown_s = passed_s
            sys.stderr.write(f"{passed_s:.0f} s, {_resident() / 1e6:.1f} MB\n")


def _settle(server: Running, report: SoakReport) -> None:
    """Everything must come back: no open request, no sequence, a balanced ledger."""
    report.idle = server.idle(STUCK_S)
    report.leaked_sequences = server.held()[0]
    try:
        server.thread.call(lambda e: e.cache.check()).result(30)
    except AssertionError as error:
        report.ledger_error = str(error)
    text = server.context.metrics.text().decode()
    report.preemptions = int(float(next(x for x in text.splitlines() if "num_preemptions_total{" in x).split()[-1]))
    report.rss_end = _resident()


def _resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss
