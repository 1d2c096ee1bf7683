"""Interleaved timing: every contender once per round, medians over rounds, ratios to the first."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

RESULTS = Path(__file__).parent / "results"


def interleaved(contenders: dict[str, Callable[[], Any]], rounds: int, warmup: int = 5) -> dict[str, float]:
    """Median milliseconds of each contender, taken in turn so that a noisy machine is noisy for all."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if number >= warmup:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def table(medians: dict[str, float]) -> str:
    """Milliseconds, and the ratio to the first row, which is the floor."""
    floor = next(iter(medians.values()))
    width = max(map(len, medians))
    rows = [f"{name.ljust(width)}  {ms:9.3f} ms  {ms / floor:6.2f} x" for name, ms in medians.items()]
    return "\n".join(rows)


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
    }


def keep(name: str, results: dict[str, Any]) -> None:
    """Write the last results beside the benchmarks."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine(), **results}, indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
