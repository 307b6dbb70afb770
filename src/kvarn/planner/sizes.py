"""Sizes as people write and read them. Binary (GiB) and decimal (GB) units are never mixed and always labelled."""

from __future__ import annotations

import re

from kvarn.core.errors import InvalidRequest

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"^\s*([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-z]*)\s*$", re.IGNORECASE)
_TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
MAX_BYTES = 2**63 - 1
MAX_TOKENS = 2**40


def _split(text: str, what: str, example: str) -> tuple[float | int, str]:
    match = _SIZE.match(text)
    if match is None:
        raise InvalidRequest(f"{what} {text!r} is not a number with a unit", fixes=(f"write it like {example}",))
    digits = match[1].replace("_", "").replace(",", "")
    return (float(digits) if "." in digits else int(digits)), match[2].lower()


def parse_size(text: str | int, *, what: str = "size") -> int:
    """Bytes of '24GiB', '80GB', '512 MiB', '1073741824'. 'G' and 'K' alone are refused: they do not say which.
    Raises InvalidRequest for another form, for zero and for more than 2**63 bytes."""
    number, unit = (text, "") if isinstance(text, int) else _split(text, what, "24GiB or 80GB")
    if unit not in _UNITS:
        raise InvalidRequest(
            f"{what} {text!r} has no clear unit",
            fixes=("GiB is 2^30 bytes, GB is 10^9: write one of KiB MiB GiB TiB KB MB GB TB",),
        )
    nbytes = int(number * _UNITS[unit])
    if not 0 < nbytes <= MAX_BYTES:
        raise InvalidRequest(f"{what} {text!r} is {nbytes} bytes", fixes=("use more than 0 and less than 8 EiB",))
    return nbytes


def parse_tokens(text: str | int, *, what: str = "context") -> int:
    """Tokens of '4096', '128k', '1M', '1m'; k = 1024 and m = 1024 * 1024, as model cards mean them.
    Raises InvalidRequest."""
    number, unit = (text, "") if isinstance(text, int) else _split(text, what, "4096 or 128k")
    if unit not in _TOKEN_UNITS:
        raise InvalidRequest(f"{what} {text!r} has no clear unit", fixes=("k is 1024 and m is 1024*1024 tokens",))
    tokens = number * _TOKEN_UNITS[unit]
    if tokens != int(tokens) or not 0 < tokens <= MAX_TOKENS:
        raise InvalidRequest(f"{what} is {text!r}", fixes=(f"use a whole number of tokens, 1 to {MAX_TOKENS}",))
    return int(tokens)


def show_bytes(nbytes: int | float, digits: int = 2) -> str:
    """Bytes in the largest fitting binary unit: '1.25 GiB', '640 B'."""
    size = abs(nbytes)
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{nbytes / unit:,.{digits}f} {name}"
    return f"{nbytes:,.0f} B"


def show_both(nbytes: int) -> str:
    """Bytes in both kinds of units: '16.00 GiB = 17.18 GB'."""
    decimal = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
    for unit, name in decimal:
        if abs(nbytes) >= unit:
            return f"{show_bytes(nbytes)} = {nbytes / unit:,.2f} {name}"
    return show_bytes(nbytes)


def show_tokens(tokens: int) -> str:
    """Tokens with thousands separated, and the k form where it is exact: '131,072 (128k)'."""
    return f"{tokens:,} ({tokens // 1024}k)" if tokens >= 4096 and tokens % 1024 == 0 else f"{tokens:,}"


def show_seconds(seconds: float) -> str:
    """Seconds with a unit that keeps three digits: '12.3 ms'."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}" if seconds < 1000 * unit else f"{seconds / unit:,.0f} {name}"
    return f"{seconds * 1e9:.3g} ns"
