"""The Grafana dashboard as a file; `test_dashboard.py` asks a real Prometheus its queries."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from looking import report

from raydp_parallel import command
from raydp_parallel.monitoring import grafana
from raydp_parallel.monitoring.metrics import LABELS, MEASURES, readings

DASHBOARD = grafana.dashboard()
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_queries_ask_for_metrics_that_exist(panel: dict) -> None:
    """Under the names that Ray gives them."""
    names = {f"ray_{m.name}" + ("_total" if m.kind.name == "COUNTER" else "") for m in MEASURES}
    for target in panel["targets"]:
        asked = set(re.findall(r"ray_raydp_\w+", target["expr"]))
        assert asked and asked <= names
        assert target["expr"].count("(") == target["expr"].count(")")


def test_every_metric_is_shown() -> None:
    text = json.dumps(DASHBOARD)
    assert all(measure.name in text for measure in MEASURES)


def test_readings_have_the_labels_they_say(tmp_path: Path) -> None:
    """Those of every metric and the metric's own, no more: none names a call."""
    found = [*readings(report(), {"a1b2c3d4e5f6": "10.0.0.1"})]
    assert found
    for measure, labels, _ in found:
        assert set(labels) == {*LABELS, *measure.labels}


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["grafana", "--out", str(tmp_path / "new")]) == 0
    assert json.loads(Path(capsys.readouterr().out.strip()).read_text()) == DASHBOARD
