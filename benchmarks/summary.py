"""One page of all results: `python -m benchmarks.summary` writes it anew from the files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, shown

NAMES = (
    "training_step",
    "resident",
    "one_device",
    "told_cores",
    "own_process",
    "step_latency",
    "inference",
)
"""The benchmarks, in the order in which they are run and shown."""


def load(folder: Path) -> dict[str, Any]:
    """Read the kept results, by name."""
    files = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def write(folder: Path = RESULTS) -> list[Path]:
    """Write the page of the results in a folder."""
    page = folder / "summary.md"
    page.write_text(markdown(load(folder)), encoding="utf-8")
    return [page]


def markdown(found: dict[str, Any]) -> str:
    """The page."""
    parts = ["# Benchmarks: last results", _machines(found), _asked(found)]
    for name, result in found.items():
        parts += [f"## {result['question']}", f"`python -m benchmarks.{name}`"]
        parts += [_table(t["columns"], t["rows"], t["title"]) for t in result["tables"]]
        if result["notes"]:
            parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n\n".join(parts) + "\n"


def _machines(found: dict[str, Any]) -> str:
    about = ("processor", "cores", "torch", "ray")
    rows = [
        [name, result["date"], result["effort"], *(result["machine"][what] for what in about)]
        for name, result in found.items()
    ]
    line = "Times are medians of interleaved runs. Ratios of two rows of one table hold elsewhere."
    return f"{line}\n\n{_table(['', 'date', 'rounds', *about], rows)}"


def _asked(found: dict[str, Any]) -> str:
    rows = [
        [a["what"], a["value"], a["limit"], "yes" if a["met"] else "**no**"]
        for result in found.values()
        for a in result["asked"]
    ]
    met = sum(row[-1] == "yes" for row in rows)
    return _table(
        ["ratio", "measured", "asked at most", "met"], rows, f"{met} of {len(rows)} as asked"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "") -> str:
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    lines = [columns, ruler, *rows]
    text = "\n".join("| " + " | ".join(shown(cell) for cell in line) + " |" for line in lines)
    return f"**{title}**\n\n{text}" if title else text


if __name__ == "__main__":
    for written in write():
        print(f"wrote {written}")
