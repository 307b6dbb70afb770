"""Which threads run the kernels: PyTorch's own OpenMP team where it can be had.

PyTorch's products run on its team, whose threads spin for a while after each region, so a second team would fight them
for the cores. libgomp and libomp both export GOMP_parallel; its address is handed to the C++ side.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


def shared_team() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that PyTorch has loaded; None where there is none."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    folder = Path(torch.__file__).parent
    for path in sorted([*folder.glob("lib/lib*omp*"), *folder.parent.glob("torch.libs/lib*omp*")]):
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
