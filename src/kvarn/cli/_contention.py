"""How many threads are worth having while others use the processor too.

A step is made of many short parallel pieces, each of which ends when the slowest thread does. A thread that has to wait
for its turn on a core makes all others wait, so with busy cores fewer threads are faster (measured: docs/log.md).
"""

from __future__ import annotations

import os
import time

import psutil

from kvarn.planner.hardware import usable_cores

LEAST_S = 0.2  # a shorter look sees single ticks of the clock


class Watch:
    """Looks at this process's cores from now on."""

    def __init__(self) -> None:
        self._begun_s, self._busy_s, self._own_s = time.monotonic(), _busy_s(), time.process_time()

    def others_cores(self) -> float:
        """Cores that others have kept busy since; 0 where too little time has passed to tell."""
        elapsed_s = time.monotonic() - self._begun_s
        if elapsed_s < LEAST_S:
            return 0.0
        return max(0.0, (_busy_s() - self._busy_s) - (time.process_time() - self._own_s)) / elapsed_s


def worthwhile_threads(cores: int, others_cores: float) -> int:
    """Threads that have a core to themselves; at least one."""
    return max(1, cores - round(others_cores))


def advice(watch: Watch) -> tuple[int, str] | None:
    """Fewer threads than there are cores, and why; None where the cores are free."""
    cores, others = usable_cores(), watch.others_cores()
    threads = worthwhile_threads(cores, others)
    if threads == cores:
        return None
    return threads, (
        f"others keep {others:.1f} of {cores} cores busy: running on {threads} "
        f"thread{'s' if threads > 1 else ''}, as more would wait for each other (--threads {cores} insists)"
    )


def _busy_s() -> float:
    """Seconds that the cores this process may run on have worked, for anybody."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return sum(
        sum(t) - t.idle - getattr(t, "iowait", 0.0) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0)
        for core, t in enumerate(psutil.cpu_times(percpu=True))
        if mine is None or core in mine
    )
