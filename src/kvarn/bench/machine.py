"""What the figures were measured on."""

from __future__ import annotations

import platform
from typing import Any

import psutil
import torch

from kvarn.kernels import backend_report
from kvarn.planner.hardware import processor_name


def machine(threads: int) -> dict[str, Any]:
    """Processor, cores, threads used, load when it began (a busy machine's figures compare only as ratios)."""
    return {
        "processor": processor_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
        "threads": threads,
        "load_before": round(psutil.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": next((f"{r.name}: {r.detail}" for r in backend_report() if r.available), "none"),
    }
