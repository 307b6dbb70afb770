"""Processes that hear Ctrl-C whatever started the tests: background jobs of a shell ignore it, as do their children."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """To be run in the child before its program starts."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
