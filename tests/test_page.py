"""The HTML report: whole, self-contained, and safe against names with markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree

from looking import posted, report

from raydp_parallel import page


def test_it_needs_no_network() -> None:
    text = page.report([posted()])
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_pictures_are_well_formed_and_show_every_phase() -> None:
    text = page.report([posted()])
    pictures = [tree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(pictures) == 3
    kinds = {rect.get("class") for picture in pictures for rect in picture.iter("rect")}
    assert {"adopt", "copy-in", "forward", "backward", "copy-out", "wait", "reduce", "idle"} <= kinds
    for rect in (rect for picture in pictures for rect in picture.iter("rect")):
        assert float(rect.get("x")) + float(rect.get("width")) <= 1060.5  # type: ignore[arg-type]


def test_names_are_text() -> None:
    text = page.report([posted()])
    assert "H200 &lt;SXM&gt;" in text
    assert "<SXM>" not in text


def test_the_straggler_stands_out() -> None:
    assert re.search(r"<tr class=bad><td>1</td>", page.report([posted()]))
    assert re.search(r"<li class=bad>replica 1 on cuda:1 .*straggler", page.report([posted()]))


def test_nothing_yet() -> None:
    assert "No executor is running" in page.report([])
    fresh = report(history=[], events=[])._replace(calls=[])
    assert "No call yet" in page.report([posted(fresh)])
