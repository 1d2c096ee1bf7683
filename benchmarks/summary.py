"""One page of all that was kept: `python -m benchmarks.summary` writes it anew from the results,
and plots them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, shown

NAMES = (
    *(
        "training_step",
        "one_device",
        "told_cores",
        "own_process",
        "step_latency",
        "payload_sweep",
        "weights_sweep",
        "scaling",
        "inference",
    ),
    *("memory", "scale"),
)
"""The benchmarks, in the order in which they are run and shown."""


def load(folder: Path) -> dict[str, Any]:
    """The kept results, by name."""
    files = {name: folder / f"{name}.json" for name in NAMES}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def write(folder: Path = RESULTS) -> list[Path]:
    """Write the summary of what a folder keeps, and its plot if there is matplotlib."""
    found = load(folder)
    plotted = importlib.util.find_spec("matplotlib") is not None
    page = folder / "summary.md"
    page.write_text(markdown(found, plotted), encoding="utf-8")
    if not plotted:
        print("summary.png left out: not installed: matplotlib")
        return [page]
    from benchmarks.plot import draw  # matplotlib is optional

    picture = folder / "summary.png"
    draw(found, picture)
    return [page, picture]


def markdown(found: dict[str, Any], plotted: bool) -> str:
    """The page."""
    parts = ["# Benchmarks: last results", _machines(found), _asked(found)]
    if plotted:
        parts.append("![The medians, plotted](summary.png)")
    for name, result in found.items():
        parts += [f"## {result['question']}", f"`python -m benchmarks.{name}`"]
        parts += [
            _table(table["columns"], table["rows"], table["title"]) for table in result["tables"]
        ]
        if result["notes"]:
            parts.append("\n".join(f"- {note}" for note in result["notes"]))
    return "\n\n".join(parts) + "\n"


def _machines(found: dict[str, Any]) -> str:
    lines = [
        "Times are medians of interleaved runs. Ratios of two rows of one table hold; "
        "times belong to a machine."
    ]
    rows = []
    for name, result in found.items():
        m = result["machine"]
        rows.append(
            [
                name,
                result["date"],
                result["effort"],
                m["processor"],
                m["cores"],
                m["torch"],
                m["ray"],
            ]
        )
    return "\n\n".join(
        [*lines, _table(["", "date", "rounds", "processor", "cores", "torch", "ray"], rows)]
    )


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
