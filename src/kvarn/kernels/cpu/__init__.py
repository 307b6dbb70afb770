"""Kvarn's own kernels for CPUs: C++ compiled for several instruction sets, the best of which is chosen at run time."""

from kvarn.kernels.cpu.backend import CpuBackend

BACKEND = CpuBackend
