"""The HTML report: whole, self-contained, and safe against names with markup."""

from __future__ import annotations

import re
import xml.etree.ElementTree as tree

from looking import posted, report

from raydp_parallel.monitoring import html_report


def test_it_needs_no_network() -> None:
    text = html_report.report([posted()])
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_pictures_are_well_formed_and_show_every_phase() -> None:
    text = html_report.report([posted()])
    pictures = [tree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(pictures) == 3
    kinds = {rect.get("class") for picture in pictures for rect in picture.iter("rect")}
    assert {
        "adopt",
        "copy-in",
        "forward",
        "backward",
        "copy-out",
        "wait",
        "reduce",
        "idle",
    } <= kinds
    for rect in (rect for picture in pictures for rect in picture.iter("rect")):
        assert float(rect.get("x")) + float(rect.get("width")) <= 1060.5  # type: ignore[arg-type]


def test_names_are_text() -> None:
    text = html_report.report([posted()])
    assert "H200 &lt;SXM&gt;" in text
    assert "<SXM>" not in text


def test_the_straggler_stands_out() -> None:
    assert re.search(r"<tr class=bad><td>1</td>", html_report.report([posted()]))
    assert re.search(
        r"<li class=bad>replica 1 on cuda:1 "
        r".*straggler",
        html_report.report([posted()]),
    )


def test_nothing_yet() -> None:
    assert "No executor is running" in html_report.report([])
    fresh = report(history=[], events=[])._replace(calls=[])
    assert "No call yet" in html_report.report([posted(fresh)])


def test_markup_of_a_forged_entry_is_text() -> None:
    """Every text of an entry, also those that a driver takes from its own device numbers; and no
    script may run.
    """
    entry = posted()
    mark = "<script>alert(1)</script>"
    stats = entry["stats"]
    stats["name"] = stats["link"] = stats["models"][0] = entry["host"] = entry["job"] = mark
    entry["calls"][0][2] = mark
    entry["events"].append([entry["posted"], mark])
    for replica in stats["replicas"]:
        replica.update(device_id=mark, state=mark, gpu=mark, node_id=mark)
    for advice in stats["advice"]:
        advice["text"] = mark
    text = html_report.report([entry])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 10
    assert (
        "Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\""
    ) in text
