"""Devices by name, from the catalogue, and 'this' machine: its free memory asked, its speed measured once and kept."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvarn.core.errors import UnknownName
from kvarn.core.files import atomic_write, kvarn_home
from kvarn.planner.catalogue import DeviceEntry, device_entries, find_device_entry
from kvarn.planner.roofline import Device

READ_BYTES = 256 << 20
MATRIX_SIDE = 1536
ROUNDS = 5
_FORMAT = 1


def load_hardware(text: str) -> Device:
    """'h100', 'NVIDIA L40S', 'rtx 4090', or 'this' machine. Raises UnknownName with the nearest names."""
    if text.strip().lower() == "this":
        return this_machine()
    if entry := find_device_entry(text):
        return _device(entry)
    raise UnknownName("hardware", text, ("this", *hardware_names()), listed_by="kvarn plan --list-hardware")


def known_read_bytes_per_s() -> float | None:
    """Bytes a second that this machine reads from memory: the kept measurement, or one taken now (about a second, the
    first time). None while others keep the machine busy: what is measured then would be about them."""
    name, cores = processor_name(), usable_cores()
    found = _kept(name, cores)
    if found is None:
        if is_busy(cores):
            return None
        found = _measure(cores)
        _keep(name, cores, found)
    return found["bandwidth_bytes_per_s"]


def hardware_names() -> tuple[str, ...]:
    return tuple(entry.name for entry in device_entries())


def this_machine(*, measure_again: bool = False) -> Device:
    """This machine's CPU: memory free now, read bandwidth and float32 FLOP/s as measured here with all its cores.

    The measurement takes about a second and is kept in KVARN_HOME; a change of processor, of cores or of NumPy makes a
    new one. What is measured while others keep the machine busy is used, said to be so, and not kept.
    """
    import psutil  # noqa: PLC0415

    name, cores = processor_name(), usable_cores()
    found, remark = None if measure_again else _kept(name, cores), ""
    if found is None:
        busy = is_busy(cores)
        found = _measure(cores)
        if busy:
            remark = ", while others kept it busy: it can do more"
        else:
            _keep(name, cores, found)
    memory = free_memory_bytes(psutil.virtual_memory().available)
    return Device(
        name=f"this machine ({name}, {cores} cores)",
        memory_bytes=memory,
        bandwidth_bytes_per_s=found["bandwidth_bytes_per_s"],
        flops={"f32": found["f32_flops"]},
        accelerator=False,
        measured=True,
        source=f"measured here with NumPy on {cores} cores{remark}; memory: free at the moment",
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def is_busy(cores: int) -> bool:
    """Whether, over the last minute, as many tasks as there are cores wanted to run."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > cores


def processor_name() -> str:
    """The processor's model, as the system words it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def free_memory_bytes(available_bytes: int, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that may still be used: what the system has free, or what the container's limit leaves."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (root / limit_name).read_text().strip(), (root / used_name).read_text().strip()
        except OSError:
            continue
        if limit.isdigit() and used.isdigit():
            return max(0, min(available_bytes, int(limit) - int(used)))
    return available_bytes


def _device(entry: DeviceEntry) -> Device:
    return Device(
        name=entry.name,
        memory_bytes=entry.memory_bytes,
        bandwidth_bytes_per_s=entry.bandwidth_bytes_per_s,
        flops=entry.flops,
        link_bytes_per_s=entry.link_bytes_per_s,
        accelerator=entry.accelerator,
        source=f"{entry.name}: {entry.source}" + (f" ({entry.note})" if entry.note else ""),
    )


def _place() -> Path:
    return kvarn_home() / "machine.json"


def _identity(name: str, cores: int) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415

    return {"format": _FORMAT, "processor": name, "cores": cores, "numpy": np.__version__}


def _kept(name: str, cores: int) -> Mapping[str, float] | None:
    """The measurement of this very machine, or None where there is none or it cannot be read."""
    try:
        found = json.loads(_place().read_text("utf-8"))
        figures = {key: float(found["figures"][key]) for key in ("bandwidth_bytes_per_s", "f32_flops")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    fits = found.get("identity") == _identity(name, cores) and all(value > 0 for value in figures.values())
    return figures if fits else None


def _keep(name: str, cores: int, figures: Mapping[str, float]) -> None:
    content = {"identity": _identity(name, cores), "figures": dict(figures), "measured_s": time.time()}
    try:
        with atomic_write(_place()) as stream:
            stream.write(json.dumps(content, indent=1).encode())
    except OSError:
        return  # a read-only home: the next call measures again


def _measure(cores: int) -> Mapping[str, float]:
    return {"bandwidth_bytes_per_s": read_bandwidth(cores), "f32_flops": f32_flops()}


def read_bandwidth(cores: int, nbytes: int = READ_BYTES) -> float:
    """Bytes a second that all cores read from memory: each sums its own part of an array far larger than the caches."""
    import numpy as np  # noqa: PLC0415

    data = np.ones(nbytes // 8, np.float64)
    parts = np.array_split(data, cores)
    with ThreadPoolExecutor(cores) as pool:
        best_s = _best(lambda: list(pool.map(np.max, parts)))
    return data.nbytes / best_s


def f32_flops(side: int = MATRIX_SIDE) -> float:
    """FLOP a second of a float32 matrix product, on as many cores as NumPy's BLAS uses."""
    import numpy as np  # noqa: PLC0415

    generator = np.random.default_rng(0)
    a, b = (generator.random((side, side), np.float32) for _ in range(2))
    out = np.empty((side, side), np.float32)
    return 2.0 * side**3 / _best(lambda: np.matmul(a, b, out=out))


def _best(action: Callable[[], Any]) -> float:
    """Seconds of the fastest of some rounds: what the machine can do when nothing else runs."""
    times = []
    action()  # first touch of the memory, start of the threads
    for _ in range(ROUNDS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)
