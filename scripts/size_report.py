"""Lists source files over 400 lines and functions over 60: the house keeps both rare. A report, not a failure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES = 400, 60


def long_functions(path: Path) -> Iterator[tuple[int, str]]:
    """(lines, where) of every function over the limit."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield lines, f"{path}:{node.lineno} {node.name}"


def main() -> None:
    files = sorted(Path("src").rglob("*.py"))
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    for path, lines in sorted(counts.items(), key=lambda item: -item[1]):
        if lines > FILE_LINES:
            print(f"{lines:5} lines  {path}")
    for lines, where in sorted((found for path in files for found in long_functions(path)), reverse=True):
        print(f"{lines:5} lines  {where}")
    print(f"{len(files)} files, {sum(counts.values()):,} lines, median {sorted(counts.values())[len(files) // 2]}")


if __name__ == "__main__":
    main()
