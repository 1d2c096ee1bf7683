"""The table of tested versions: `docs/versions.json` has the runs, `docs/versions.md` shows them.

    scripts/test --oldest --record=FILE
    .venv-oldest/bin/python tests/support/tested_versions.py FILE

enters what a record of the suite says, with the versions of the environment that runs this. Without
a record the table is made anew. A run takes the place of an earlier one with the same versions.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- the table, made by tests/support/tested_versions.py -->", "<!-- its end -->"


def counted(lines: Iterable[str]) -> dict[str, Any]:
    """What a record says: how many tests passed at last, failed, or were skipped, and which they
    were. What did not end has failed.
    """
    last = {name: outcome for outcome, _, name in (x.strip().partition(" ") for x in lines)}
    outcomes = Counter("failed" if how == "begun" else how for how in last.values())
    parts = sorted({Path(name.partition("::")[0]).parts[1] for name in last})
    return {"tests": parts, **{how: outcomes[how] for how in ("passed", "failed", "skipped")}}


def environment() -> dict[str, str]:
    """The versions that run this."""
    found = {name: version(name) for name in ("torch", "ray", "numpy")}
    libc = " ".join(platform.libc_ver())
    system = f"{platform.system()} {platform.machine()}, {libc}"
    return {"python": platform.python_version(), **found, "system": system}


def entered(runs: Sequence[Mapping[str, Any]], run: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The runs with one more, in order of their versions."""
    kept = [one for one in runs if _which(one) != _which(run)]
    return sorted([*kept, run], key=lambda one: [_numbers(one[name]) for name in _NAMES])


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs as a table of a page."""
    head = "| Python | torch | Ray | NumPy | system | tests | passed | failed | date |"
    rows = [head, "|" + "---|" * (head.count("|") - 1)]
    for run in runs:
        tests = ", ".join(run["tests"])
        where = [run[name] for name in ("python", "torch", "ray", "numpy", "system")]
        cells = [*where, tests, run["passed"], run["failed"], run["date"]]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def page(text: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table of these runs in place of the one that it has."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(runs)}\n{END}{after}"


def main(record: str | None = None, docs: Path = DOCS) -> None:
    """Enter a record, and write the table."""
    data, shown = docs / "versions.json", docs / "versions.md"
    runs: Sequence[Mapping[str, Any]] = json.loads(data.read_text(encoding="utf-8"))
    if record is not None:
        found = counted(Path(record).read_text(encoding="utf-8").splitlines())
        runs = entered(runs, {**environment(), **found, "date": time.strftime("%Y-%m-%d")})
        data.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    shown.write_text(page(shown.read_text(encoding="utf-8"), runs), encoding="utf-8")


_NAMES = "python", "torch", "ray"


def _which(run: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one run from another: the third number of Python's version does not."""
    return tuple(run["python"].split(".")[:2]), run["torch"], run["ray"]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.partition("+")[0].split(".") if part.isdigit()]


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None)
