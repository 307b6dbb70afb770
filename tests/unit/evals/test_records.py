"""A results file can be continued, wherever it was cut off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvarn.core.errors import KvarnError
from kvarn.evals.records import Results, Row


def rows(fingerprint: str, n: int) -> list[Row]:
    return [
        Row("int8", "kl", f"metric{i}", 0.5 * i, 10, 2.5, 3.0, "model", 0, 4, {"depth": 0.5}, fingerprint, n)
        for i in range(n)
    ]


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    first = Results(path)
    first.add(rows("a", 2))
    first.add(rows("b", 1))
    again = Results(path)
    assert again.of("a") == rows("a", 2)
    assert again.of("b") == rows("b", 1)
    assert again.of("c") == []


def test_rows_of_older_files_have_no_errors(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path).add([replace(row, stderr=0.5, samples=(1.0, 2.0)) for row in rows("a", 2)])
    assert Results(path).of("a")[0].samples == (1.0, 2.0)
    found = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    older = [{k: v for k, v in row.items() if k not in ("stderr", "samples")} for row in found]
    path.write_text("".join(json.dumps(row) + "\n" for row in older), "utf-8")
    assert Results(path).of("a") == rows("a", 2)


@pytest.mark.parametrize("cut", [2, 30, 200])
def test_a_task_that_was_cut_off_counts_as_not_measured(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    results = Results(path)
    results.add(rows("a", 2))
    results.add(rows("b", 3))
    path.write_bytes(path.read_bytes()[:-cut])
    again = Results(path)
    assert again.of("a") == rows("a", 2)
    assert again.of("b") == []
    again.add(rows("c", 2))
    assert Results(path).of("c") == rows("c", 2)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KvarnError, match="cannot write"):
        Results(tmp_path / "file" / "results.jsonl").add(rows("a", 1))
