"""The picture of all results: one panel per benchmark."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes

OURS = "#d1495b"
GREY = "#8d99ae"
COLOURS = ("#1d3557", OURS, GREY, "#457b9d", "#2a9d8f", "#e9c46a")


def draw(found: dict[str, Any], file: Path) -> None:
    """Write the picture of the results that there are."""
    panels = {
        "training_step": training,
        "step_latency": latency,
        "payload_sweep": payload,
        "weights_sweep": weights,
        "scaling": scaling,
        "memory": memory,
        "scale": scale,
    }
    figure, grid = pyplot.subplots(4, 2, figsize=(15, 22), constrained_layout=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (name, panel) in zip(grid.flat, panels.items(), strict=False):
        if name in found:
            panel(axes, found[name])
            axes.grid(axis="y", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        else:
            axes.set_axis_off()
    newest = max(
        found.values(), key=lambda result: result["date"], default={"machine": {}, "date": ""}
    )
    m = newest["machine"]
    where = (
        f"{m.get('processor', '')}, {m.get('cores', '')} cores, torch "
        f"{m.get('torch', '')}, ray {m.get('ray', '')}"
    )
    figure.suptitle(
        f"raydp_parallel: medians of interleaved runs, 2 CPU replicas\n{where}, {newest['date']}"
    )
    figure.savefig(file, dpi=90)
    pyplot.close(figure)


def training(axes: Axes, result: dict[str, Any]) -> None:
    """Ratios to DDP, by net."""
    cases = result["data"]["median_ms"]
    peers = list(next(iter(cases.values())))
    cases = {case: medians for case, medians in cases.items() if {*peers} <= medians.keys()}
    width = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        ratios = [medians[peer] / medians[peers[0]] for medians in cases.values()]
        at = [k + (i - (len(peers) - 1) / 2) * width for k in range(len(cases))]
        bars = axes.bar(at, ratios, width, label=peer, color=COLOURS[i % len(COLOURS)])
        axes.bar_label(
            bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=7, rotation=90, padding=2
        )
    for k, asked in enumerate(result["asked"]):
        label = "asked of ours" if k == 0 else None
        axes.hlines(asked["limit"], k - 0.45, k + 0.45, colors="black", linestyles=":", label=label)
    names = [
        f"{case.replace(', ', chr(10))}\n{medians[peers[0]]:.0f} ms"
        for case, medians in cases.items()
    ]
    axes.set_xticks(range(len(cases)), names)
    axes.set_ylabel(f"time per step, to {peers[0]}")
    axes.set_title(f"A training step beside its peers (lower is better; ms are {peers[0]}'s)")
    axes.margins(y=0.15)
    axes.legend(fontsize=8, ncols=2)


def latency(axes: Axes, result: dict[str, Any]) -> None:
    """Bars of the tiny step."""
    medians = result["data"]["median_ms"]["step"]
    colours = [OURS if "forward" in name else GREY for name in medians]
    bars = axes.barh([*medians], [*medians.values()], color=colours)
    axes.bar_label(bars, fmt="%.2f ms", padding=3)
    axes.axvline(
        1.2 * next(iter(medians.values())),
        color="black",
        linestyle=":",
        label="asked: 1.2 x two round trips",
    )
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("A tiny step beside empty Ray round trips")
    axes.legend(fontsize=8)


def payload(axes: Axes, result: dict[str, Any]) -> None:
    """Time by size, both axes logarithmic."""
    by_size = {int(size): medians for size, medians in result["data"]["median_ms"].items()}
    sizes = sorted(by_size)
    styles = {
        "with gradients": (OURS, "--o"),
        "no gradients": (OURS, "-o"),
        "naive Ray": (COLOURS[3], "-s"),
        "into new memory": (GREY, "--"),
        "floor": (GREY, "-"),
    }
    labels = {"floor": "one copy each way", "into new memory": "the same, into new memory"}
    for name, (colour, style) in styles.items():
        axes.loglog(
            sizes,
            [by_size[s][name] for s in sizes],
            style,
            color=colour,
            label=labels.get(name, name),
        )
    axes.set_xticks(
        [1 << p for p in range(10, 30, 3)],
        ["1 KB", "8 KB", "64 KB", "512 KB", "4 MB", "32 MB", "256 MB"],
    )
    axes.set_xlabel("bytes in, and as many out")
    axes.set_ylabel("ms")
    axes.set_title("An identity module by payload")
    axes.legend(fontsize=8)


def weights(axes: Axes, result: dict[str, Any]) -> None:
    """Time of a forward by what changed before, for each size."""
    sizes = result["data"]["median_ms"]
    kinds = list(next(iter(sizes.values())))
    width = 0.8 / len(kinds)
    # What changed in red, what that is compared with in grey, each in shades of its own.
    reds, greys = (
        iter(("#f4acb7", "#e5778a", OURS, "#6d1f2c")),
        iter(("#d0d4dc", "#b9c0cc", "#a2abbb", GREY, "#6c7689")),
    )
    compared = ("nothing", "the same")
    colours = [
        "black" if k.startswith("floor") else next(greys if k.startswith(compared) else reds)
        for k in kinds
    ]
    for i, kind in enumerate(kinds):
        times = [medians[kind] for medians in sizes.values()]
        at = [k + (i - (len(kinds) - 1) / 2) * width for k in range(len(sizes))]
        bars = axes.bar(at, times, width, label=kind, color=colours[i])
        axes.bar_label(bars, fmt="%.3g", fontsize=7, rotation=90, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(sizes)), [f"{size} MB" for size in sizes])
    axes.set_ylabel("ms per forward")
    axes.set_title("A forward after its weights changed")
    axes.legend(fontsize=8)


def scaling(axes: Axes, result: dict[str, Any]) -> None:
    """Time by the number of replicas."""
    styles = ((OURS, "-o"), (OURS, "--o"), (GREY, "-s"))
    for (name, points), (colour, style) in zip(
        result["data"]["median_ms"].items(), styles, strict=True
    ):
        axes.plot(
            [int(count) for count in points], [*points.values()], style, color=colour, label=name
        )
    axes.set_xlabel("replicas")
    axes.set_ylabel("ms")
    axes.set_title("A tiny model on more and more replicas")
    axes.legend(fontsize=8)


def memory(axes: Axes, result: dict[str, Any]) -> None:
    """Growth of both processes."""
    (table,) = result["tables"]
    rows = [row for row in table["rows"] if row[3] != ""]
    names = [row[0].replace(", ", "\n") for row in rows]
    private = [row[1] for row in rows]
    pss = [row[3] - row[1] for row in rows]
    axes.bar(names, private, color=OURS, label="private")
    axes.bar(
        names, pss, bottom=private, color=GREY, label="its share of what is shared (Pss - private)"
    )
    size = result["data"]["megabytes"]["megabytes"]
    axes.axhline(size, color="black", linestyle=":", label=f"one copy of the weights, {size} MB")
    axes.set_ylabel("MB grown")
    axes.set_title(f"Memory with {size} MB of weights, beyond what the processes had before")
    axes.legend(fontsize=8)


def scale(axes: Axes, result: dict[str, Any]) -> None:
    """Time of a step by the model, for each way, of the first workload."""
    name, ways = next(iter(result["data"]["step_ms"].items()))
    colours = itertools.cycle(COLOURS)
    for way, times in ways.items():
        colour, style = ("black", ":") if way == "DDP" else (next(colours), "-s")
        axes.loglog(result["data"]["replicas"], times, style, color=colour, label=way)
    axes.set_xticks(
        result["data"]["replicas"], [str(count) for count in result["data"]["replicas"]]
    )
    axes.set_xlabel("replicas")
    axes.set_ylabel("ms per step")
    axes.set_title(f"By the model, 100 Gbit/s: {name}")
    axes.legend(fontsize=8)
