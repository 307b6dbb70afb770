"""Results as JSON lines. A file can be continued: what has been measured under the same conditions is kept."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvarn.core.errors import KvarnError


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number.

    physical_bytes_peak: held at the fullest moment of the task, the prompt's prefill included. bytes_per_token: blocks
    held at the end of the task's longest sequence, over the tokens of its text. decode_tokens_per_s: of this cache, as
    measured last by then; speeds are to be compared by the rows of the task `speed` that share a fingerprint: those
    were measured together. n: tokens or cases behind the value. detail: where it belongs (length, depth). fingerprint:
    of all that the task's values hang on; of_rows: how many rows have it. stderr: standard error of the value, by its
    samples (windows, cases, turns); where the cache is not full, of its difference to the full cache on the same
    samples (speeds: of the value itself). None where fewer than two samples tell.
    """

    cache: str
    task: str
    metric: str
    value: float
    physical_bytes_peak: int
    bytes_per_token: float
    decode_tokens_per_s: float
    model: str
    seed: int
    n: int
    detail: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str = ""
    of_rows: int = 0
    stderr: float | None = None
    samples: Sequence[float] = ()


ADDED = frozenset({"stderr", "samples"})  # older files have rows without them


class Results:
    """Rows in a JSONL file, complete tasks only. path None: in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._rows: dict[str, list[Row]] = defaultdict(list)
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        """A line that was cut off by an interruption is passed over, and its task is measured again."""
        fields = set(Row.__dataclass_fields__)
        for line in path.read_text("utf-8").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict) and fields - ADDED <= set(found) <= fields:
                row = Row(**{**found, "samples": tuple(found.get("samples", ()))})
                self._rows[row.fingerprint].append(row)
        for fingerprint, rows in list(self._rows.items()):
            if len(rows) != rows[0].of_rows:
                del self._rows[fingerprint]

    def of(self, fingerprint: str) -> list[Row]:
        """The task's rows; empty where it has not been measured under these conditions."""
        return self._rows.get(fingerprint, [])

    def all(self) -> list[Row]:
        """The rows of all complete tasks, in the order of the file."""
        return [row for rows in self._rows.values() for row in rows]

    def add(self, rows: Iterable[Row]) -> None:
        """Keep one task's rows, in one write. Raises KvarnError where the file cannot be written."""
        new = list(rows)
        for row in new:
            self._rows[row.fingerprint].append(row)
        if self._path is None:
            return
        lines = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in new)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(_newline_before(self._path) + lines)
        except OSError as error:
            raise KvarnError(f"cannot write {self._path}: {error.strerror or error}") from error


def _newline_before(path: Path) -> str:
    """A line break, where the file ends in a line that was cut off."""
    with path.open("rb") as stream:
        stream.seek(0, 2)
        if stream.tell() == 0:
            return ""
        stream.seek(-1, 2)
        return "" if stream.read(1) == b"\n" else "\n"
