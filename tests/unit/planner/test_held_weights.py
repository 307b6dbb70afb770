"""Weights as Kvarn holds a quantized file's: counted from the file's types."""

from __future__ import annotations

from dataclasses import replace

from kvarn.planner.sources import load_geometry
from kvarn.planner.weights import held_by_kvarn


def planned(**types: int):
    held = held_by_kvarn(replace(load_geometry("smollm2-135m"), weight_bytes=tuple(types.items())), "native")
    assert held is not None
    return held[0]


def test_four_and_eight_bit_files_are_held_byte_for_byte() -> None:
    """The default model's file: its tensors take 96,576,768 B in memory too (measured)."""
    term = planned(F32=140_544, Q4_1=66_355_200, Q8_0=30_081_024)
    assert term.certainty == "exact" and term.bytes == 96_576_768


def test_wider_types_grow_to_8_bits_and_their_range_is_told() -> None:
    """Gemma 3 270M in Q4_K_M: 275,249,664 B in memory (measured)."""
    term = planned(F32=223_744, Q8_0=179_824_640, Q5_0=43_591_680, Q4_K=13_271_040, Q6_K=9_676_800)
    assert term.certainty == "estimated" and term.low <= 275_249_664 <= term.high
    assert abs(term.bytes / 275_249_664 - 1) < 0.01
