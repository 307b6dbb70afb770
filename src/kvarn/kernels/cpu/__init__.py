"""Kvarn's own kernels for CPUs: C++ compiled for several instruction sets, the best of which is chosen at run time."""

from importlib.util import find_spec

if find_spec("kvarn.kernels.cpu._native") is None:
    raise ImportError(
        "the native kernels were not built when kvarn was installed (no C++17 compiler, or another Python)"
    )

from kvarn.kernels.cpu.backend import CpuBackend

BACKEND = CpuBackend
