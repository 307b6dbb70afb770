"""Processes that hear Ctrl-C whatever started the tests: background jobs of a shell ignore it, as do their children."""

from __future__ import annotations

import signal


def hear_interrupts() -> None:
    """To be run in the child before its program starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
