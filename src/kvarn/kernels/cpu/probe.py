"""What this machine's processor can do at most: bytes read from memory and float32 operations a second."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvarn.kernels.cpu import _native
from kvarn.kernels.cpu.backend import instruction_sets

PROBE_BYTES = 256 << 20  # more than any cache


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Best of a few runs on `threads` threads; a machine with other work to do shows less than it has."""

    isa: str
    threads: int
    read_bytes_per_s: float
    float_ops_per_s: float


def measure(threads: int | None = None, repeats: int = 5) -> MachineRates:
    """Takes about a second and PROBE_BYTES of memory."""
    threads, isa = threads or torch.get_num_threads(), instruction_sets()[0]
    memory = torch.ones(PROBE_BYTES, dtype=torch.uint8)
    return MachineRates(
        isa,
        threads,
        _native.read_bandwidth(isa, memory.data_ptr(), PROBE_BYTES, threads, repeats),
        _native.float_rate(isa, threads, repeats),
    )
