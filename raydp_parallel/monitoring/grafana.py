"""The dashboard for Grafana: `grafana_dashboard.json`, as Grafana itself reads and exports it.

To change it, edit the file, or import it into Grafana, change it there, and export it again. Its
queries name the metrics of `metrics` as Ray exports them: ``ray_`` in front, and ``_total`` behind
a counter.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "grafana_dashboard.json"

FILE = "raydp_parallel_grafana_dashboard.json"
"""The name of the file that `write` makes."""


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana's JSON."""
    found: dict[str, Any] = json.loads(SOURCE.read_text(encoding="utf-8"))
    return found


def write(folder: str) -> Path:
    """Write the dashboard into a folder, such as the one that Ray writes its own to; returns the
    file.
    """
    file = Path(folder) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SOURCE, file)
    return file
