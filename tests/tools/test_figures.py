"""The figures of the pages: all of one run, and none beside them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from benchmarks import figures

ROOT = figures.ROOT
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("benchmarks/*.md"),
    *ROOT.glob("examples/*.py"),
    *ROOT.glob("raydp_parallel/**/*.py"),
]
ALONE = r"\b\d[\d.,]* ?ms\b|\b\d\.\d+ (?:to \d[\d.]+ )?(?:of|times)\b|\b\d+(?:\.\d+)?x faster"
ESTIMATES = ("gpu.md", "CHANGELOG.md")  # which say that nobody measured; what once was


def run_of(rows: dict[str, float]) -> dict[str, Any]:
    """A run with these figures."""
    columns = ["", "before", "now", "now to before", "asked"]
    table = {"columns": columns, "rows": [[name, "", v, "", ""] for name, v in rows.items()]}
    place = {"processor": "a", "cores": 2, "torch": "2", "ray": "2"}
    return {"tables": [table], "machine": place, "date": "now", "notes": ["Medians."]}


@pytest.mark.parametrize("name", figures.PAGES)
def test_a_page_has_the_figures_of_the_kept_run(name: str) -> None:
    """`python -m benchmarks.figures` would change nothing."""
    page = (ROOT / name).read_text()
    assert figures.filled(page, figures.load()) == page


def test_the_plots_are_those_of_the_kept_run() -> None:
    """The same of docs/images."""
    for name, text in figures.plots(figures.load()).items():
        assert (figures.IMAGES / name).read_text() == text


def test_no_other_figure_stands_anywhere() -> None:
    """Beside the blocks that are filled, and the limits of the benchmarks."""
    for path in TEXTS:
        parts = re.split(
            r"<!-- figures.*?<!-- end -->|\| asked \|.*?\n\n", path.read_text(), flags=re.S
        )
        found = [figure for part in parts for figure in re.findall(ALONE, part)]
        assert not found or path.name in ESTIMATES, (path, found)


def test_blocks_and_plots_of_a_run() -> None:
    """Each reads its own rows, and says so where there are none."""
    run = run_of(
        {
            "GPT-2: step to DDP gloo": 1.25,
            "MLP of width 64, plain: ms": 1.0,
            "MLP of width 64, 2 replicas: ms": 3.0,
            "MLP of width 512, plain: ms": 40.0,
            "MLP of width 512, 2 replicas: ms": 30.0,
            "plain step of 2 ms, 2 replicas: speed-up": 0.5,
            "plain step of 50 ms, 2 replicas: speed-up": 1.9,
        }
    )
    assert "| GPT-2 | 1.25 |" in figures.block(run, "ddp")
    assert "from a plain step of 40 ms" in figures.block(run, "crossing")
    assert "| GPT-2: step to DDP gloo |  | 1.25 |  |  |" in figures.block(run, "all")
    assert all("polyline" in text for text in figures.plots(run).values())
    assert {figures.block({}, name) for name in ("all", "ddp", "crossing")} == {figures._NONE}
    assert figures.plots({}) == {}
