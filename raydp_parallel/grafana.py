"""The Grafana dashboard: rows of panels, each with the queries behind it. No Ray here, and no Grafana."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from raydp_parallel.measures import (
    BYTES,
    CALLS,
    CHUNK,
    DRIVER,
    FAULTS,
    INFO,
    LOST,
    MEMORY,
    RECENT,
    SAMPLES,
    SECONDS,
    STATE,
    Kind,
    Measure,
)

FILE = "raydp_parallel_grafana_dashboard.json"
"""The name of the file that `write` makes."""

_WIDTH, _HEIGHT = 24, 8


class Panel(NamedTuple):
    """One panel.

    Attributes:
        title: Its title.
        text: What it shows.
        queries: Its queries, each with the legend of its lines.
        unit: Grafana's name for the unit.
        kind: ``"timeseries"`` or ``"stat"``.
        stacked: Whether lines are stacked.
        warn: The value from which it is shown as bad, None if there is none.
        needs_gpu: Whether there is nothing to see on CPUs.
    """

    title: str
    text: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False
    warn: float | None = None
    needs_gpu: bool = False


def series(measure: Measure, *matchers: str, model: bool = True) -> str:
    """The series of a metric that the dashboard's choices let through."""
    name = f"ray_{measure.name}" + ("_total" if measure.kind is Kind.COUNTER else "")
    chosen = ['executor=~"$executor"', *(['model=~"$model"'] if model else []), *matchers]
    return f"{name}{{{', '.join(chosen)}}}"


def rate(measure: Measure, *matchers: str, model: bool = True) -> str:
    """What a counter gains in a second."""
    return f"rate({series(measure, *matchers, model=model)}[$__rate_interval])"


_WHO = "executor, replica, device, node"
_NAME = "{{executor}} {{replica}} on {{device}}"
_WORK = 'phase=~"forward|backward"'
_PACE = f"max by ({_WHO}) ({series(RECENT, model=False)})"
_OTHERS = f"(sum by (executor) ({_PACE}) - on (executor) group_right () {_PACE})"
SLOWNESS = f"{_PACE} * on (executor) group_left () (count by (executor) ({_PACE}) - 1) / {_OTHERS}"
"""How many times the others' time each replica takes for a row."""


def _of_gpu(metric: str) -> str:
    """Ray's metric of a node's GPU, for the replicas that are there now: a respawn leaves the old process's series."""
    there = f"({series(INFO, model=False)} == 1)"
    return f"max by (executor, replica) ({there} * on (ip, GpuIndex) group_left () max by (ip, GpuIndex) ({metric}))"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Throughput",
        (
            Panel("Samples per second", "Rows of batches, all replicas together.",
                  ((f"sum by (executor, model) ({rate(SAMPLES)})", "{{executor}} {{model}}"),)),
            Panel("Samples per second and replica", "Rows of batches that each replica ran.",
                  ((f"sum by ({_WHO}) ({rate(SAMPLES)})", _NAME),)),
            Panel("Samples", "Rows of batches so far.",
                  ((f"sum by (executor, model) ({series(SAMPLES)})", "{{executor}} {{model}}"),), kind="stat"),
            Panel("Calls per second", "Forwards and backwards of each replica.",
                  ((f"sum by (executor, replica, method) ({rate(CALLS)})", "{{executor}} {{replica}} {{method}}"),)),
        ),
    ),
    (
        "Each device: utilisation and imbalance",
        (
            Panel("Straggler", "The slowest replica, and how many times the others' time it takes for a row.",
                  ((f"topk(1, {SLOWNESS})", f"{_NAME}, node {{{{node}}}}"),), kind="stat", warn=1.25),
            Panel("Time for a row, against the others", "1 is as fast as the others; a straggler lies above.",
                  ((SLOWNESS, _NAME),), warn=1.25),
            Panel("At work", "Share of the time in forward and backward.",
                  ((f"sum by ({_WHO}) ({rate(SECONDS, _WORK, model=False)})", _NAME),), unit="percentunit"),
            Panel("GPU utilisation", "As Ray measures it, of the GPUs that replicas run on.",
                  ((_of_gpu("ray_node_gpus_utilization"),
                    "{{executor}} {{replica}}"),), unit="percent", needs_gpu=True),
        ),
    ),
    (
        "Where a step's time goes",
        (
            Panel("Replicas' time by phase", "Shares; they add up to all of it. Wait: a call is under way, but the "
                  "replica is done, or has it not yet. Idle: the driver does something else.",
                  ((f"sum by (phase) ({rate(SECONDS, model=False)}) / "
                    f"scalar(sum({rate(SECONDS, model=False)}))", "{{phase}}"),), unit="percentunit", stacked=True),
            Panel("Each replica's time by phase", "Seconds in a second.",
                  ((f"sum by (executor, replica, phase) ({rate(SECONDS, model=False)})",
                    "{{executor}} {{replica}} {{phase}}"),), unit="s"),
            Panel("Forward and backward of a sample", "Seconds of work for one row.",
                  ((f"sum by (executor, model) ({rate(SECONDS, _WORK)}) / sum by (executor, model) ({rate(SAMPLES)})",
                    "{{executor}} {{model}}"),), unit="s"),
            Panel("The driver's time", "Seconds in a second. Outside: your loop, loss and optimizer, splitting and "
                  "gathering.",
                  ((f"sum by (executor, phase) ({rate(DRIVER, model=False)})", "{{executor}} {{phase}}"),),
                  unit="s", stacked=True),
        ),
    ),
    (
        "Bytes and links",
        (
            Panel("Bytes per second by link", "To the replicas, and from them.",
                  ((f"sum by (link, direction) ({rate(BYTES)})", "{{link}} {{direction}}"),), unit="Bps"),
            Panel("State sent and skipped", "Parameters and buffers: what was sent, and what a copy with every call "
                  "would have sent besides.", ((f"sum by (kind) ({rate(STATE)})", "{{kind}}"),), unit="Bps"),
            Panel("Rows of a chunk", "Of the last call.", ((f"max by ({_WHO}, model) ({series(CHUNK)})", _NAME),)),
        ),
    ),
    (
        "Memory",
        (
            Panel("GPU memory of replicas", "What torch has allocated there, and the most it had. 0 on CPUs.",
                  ((f"max by ({_WHO}, kind) ({series(MEMORY, model=False)})", f"{_NAME} {{{{kind}}}}"),), unit="bytes"),
            Panel("GPU memory of devices", "As Ray measures it, all processes together.",
                  ((_of_gpu("ray_node_gram_used"), "{{executor}} {{replica}}"),),
                  unit="decmbytes", needs_gpu=True),
        ),
    ),
    (
        "Faults",
        (
            Panel("Faults", "Deaths of replicas' processes so far, chunks that ran again, and processes that were "
                  "started in the place of others.",
                  ((f"sum by ({_WHO}, kind) ({series(FAULTS, model=False)})", f"{_NAME} {{{{kind}}}}"),), kind="stat",
                  warn=1),
            Panel("Time lost", "From deaths that a call noticed until it had all its answers, so far.",
                  ((f"sum by (executor) ({series(LOST, model=False)})", "{{executor}}"),), unit="s", kind="stat"),
            Panel("Replicas that are there", "1 each.",
                  ((f"max by ({_WHO}) ({series(INFO, model=False)})", _NAME),)),
        ),
    ),
)  # fmt: skip
"""The dashboard."""


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "id": len(panels) + 1, "gridPos": place, "panels": []})
        width = _WIDTH // len(row)
        for column, panel in enumerate(row):
            place = {"h": _HEIGHT, "w": width, "x": column * width, "y": top + 1}
            panels.append(_panel(panel, len(panels) + 1, place))
        top += 1 + _HEIGHT
    return {
        "title": "raydp_parallel",
        "uid": "raydpParallel",
        "tags": ["ray", "pytorch"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _choice("executor"), _choice("model")]},
        "panels": panels,
    }


def write(folder: str) -> Path:
    """Write the dashboard into a folder, such as the one that Ray writes its own to; returns the file."""
    file = Path(folder) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
    return file


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.warn is not None:
        steps.append({"color": "red", "value": panel.warn})
    custom = {"fillOpacity": 40, "stacking": {"mode": "normal"}} if panel.stacked else {"fillOpacity": 5}
    options = {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]}}
    shown = {"textMode": "value_and_name", "reduceOptions": {"calcs": ["lastNotNull"]}}
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": place,
        "targets": [
            {"expr": query, "legendFormat": legend, "refId": chr(ord("A") + i), "datasource": source}
            for i, (query, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": custom if panel.kind == "timeseries" else {},
            },
            "overrides": [],
        },
        "options": options if panel.kind == "timeseries" else shown,
    }


def _source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2, "refresh": 1}


def _choice(label: str) -> dict[str, Any]:
    query = f"label_values(ray_{SAMPLES.name}_total, {label})"
    return {
        "name": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }
