"""The figures of the pages: all of one run, and none beside them."""

from __future__ import annotations

import re

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


def test_words_that_the_kept_run_does_not_need() -> None:
    """From where replicas pay, and that nothing was measured."""
    rows = [
        ["MLP of width 64, plain: ms", "", 1.0],
        ["MLP of width 64, 2 replicas: ms", "", 3.0],
        ["MLP of width 512, plain: ms", "", 40.0],
        ["MLP of width 512, 2 replicas: ms", "", 30.0],
    ]
    run = {"tables": [{"rows": rows}]}
    assert "from a plain step of 40 ms" in figures.block(run, "crossing")
    assert {figures.block({}, name) for name in ("all", "ddp", "crossing")} == {figures._NONE}
    assert figures.plots({}) == {}
