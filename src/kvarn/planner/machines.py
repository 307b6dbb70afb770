"""Devices by name: the catalogue, 'this' machine, or 'custom:96GiB'."""

from __future__ import annotations

from dataclasses import replace

from kvarn.core.errors import InvalidRequest
from kvarn.planner.roofline import Device
from kvarn.planner.sizes import parse_size
from kvarn.planner.speed import kept_speed


def find_device(text: str) -> Device:
    """'h100', 'this', 'custom:96GiB' or 'custom:96GiB:3350GB:989TFLOPS' (memory, bandwidth a second, dense bf16
    FLOP/s). Raises UnknownName for another name, InvalidRequest for a custom device that cannot be read."""
    if text.lower().startswith("custom:"):
        return _custom(text)
    from kvarn.planner.hardware import load_hardware, processor_name, usable_cores  # noqa: PLC0415  needs numpy

    device = load_hardware(text)
    return replace(device, kvarn=kept_speed(processor_name(), usable_cores())) if device.measured else device


def device_names() -> tuple[str, ...]:
    """Names of the devices that the catalogue knows."""
    from kvarn.planner.hardware import hardware_names  # noqa: PLC0415

    return ("this", "custom:96GiB", *hardware_names())


def _custom(text: str) -> Device:
    memory, *rest = text.split(":")[1:]
    bandwidth = float(parse_size(rest[0], what="bandwidth")) if rest else None
    flops = {"bf16": _flops(rest[1])} if len(rest) > 1 else {}
    if len(rest) > 2:
        raise InvalidRequest(f"custom device {text!r}", fixes=("custom:MEMORY[:BANDWIDTH[:FLOPS]]",))
    return Device(
        f"custom {memory}", parse_size(memory, what="device memory"), bandwidth, flops, source="given by hand"
    )


def _flops(text: str) -> float:
    number = text.upper().removesuffix("FLOPS").removesuffix("FLOP/S")
    scale = {"T": 1e12, "G": 1e9, "P": 1e15}.get(number[-1:], 1.0)
    try:
        value = float(number.rstrip("TGP")) * scale
    except ValueError as error:
        raise InvalidRequest(f"FLOP/s is {text!r}", fixes=("write it like 989TFLOPS",)) from error
    if not 0 < value < 1e21:
        raise InvalidRequest(f"FLOP/s is {text!r}", fixes=("use a positive figure",))
    return value
