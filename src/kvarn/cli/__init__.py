"""The command `kvarn`. One file a command, found by its name; see `_frame`."""

from kvarn.cli._frame import main

__all__ = ["main"]
