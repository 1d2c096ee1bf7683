"""Every figure of the pages, from one run: `python -m benchmarks.house` measures, and then fills
the pages as `python -m benchmarks.figures` does it again.

A page has `<!-- figures: NAME -->` and `<!-- end -->`, and what stands between them comes from
`results/house.json`. The plots of docs/images come from there, too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, shown

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
PAGES = ("README.md", "benchmarks/README.md", "docs/will-it-help-me.md", "docs/tuning.md")
PLOTS = {
    "speed_up": ("speed-up.svg", "How many times as fast a step is, over the plain step's length"),
    "step_time": ("step-time.svg", "Milliseconds of a step over the width of an MLP"),
}
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_NONE = "*Not measured yet for this version: `python -m benchmarks.house` fills in the figures.*"

Lines = Mapping[str, list[tuple[float, float]]]
"""Points by the name of a line."""


def load(folder: Path = RESULTS) -> dict[str, Any]:
    """Read the kept run, empty if there is none."""
    file = folder / "house.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def now(run: dict[str, Any], pattern: str) -> Iterator[tuple[re.Match[str], float]]:
    """Find the rows whose names match, each with its figure of now."""
    for name, _, value, *_ in run["tables"][0]["rows"] if run else []:
        if (found := re.fullmatch(pattern, name)) and isinstance(value, float):
            yield found, value


def block(run: dict[str, Any], name: str) -> str:
    """Write what stands between two markers."""
    if name == "all" and run:
        table = run["tables"][0]
        return "\n\n".join([_place(run), _table(table["columns"], table["rows"])])
    if name == "ddp":
        rows = [[found[1], value] for found, value in now(run, r"(.*): step to DDP gloo")]
        return _table(["net", "to DDP"], rows) if rows else _NONE
    if name in PLOTS and plots(run):
        file, about = PLOTS[name]
        return f"![{about}](images/{file})"
    if name == "crossing" and (lines := step_lines(run)):
        both = zip(lines["plain"], lines["2 replicas"], strict=True)
        pays = [plain for (_, plain), (_, ours) in both if ours < plain]
        return (
            f"Two CPU replicas on one machine were faster from a plain step of {shown(pays[0])} ms."
            if pays
            else "Two CPU replicas on one machine were not faster: they share its cores."
        )
    return _NONE


def step_lines(run: dict[str, Any]) -> Lines:
    """Milliseconds of a step over the net's width."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for found, ms in now(run, r"MLP of width (\d+), (.*): ms"):
        lines.setdefault(found[2], []).append((int(found[1]), ms))
    return lines


def speed_lines(run: dict[str, Any]) -> Lines:
    """Speed-up over the milliseconds of a plain step."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for found, times in now(run, r"plain step of (\d+) ms, (.*): speed-up"):
        lines.setdefault(found[2], []).append((int(found[1]), times))
    return lines


def plot(lines: Lines, across: str, up: str, log: bool) -> str:
    """Draw lines as SVG, over a logarithmic axis; the other one is so, too, or begins at 0."""
    points = [point for line in lines.values() for point in line]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = (min(y for _, y in points) if log else 0.0), max(y for _, y in points)

    def at(x: float, y: float) -> tuple[float, float]:
        part = math.log(y / low) / math.log(high / low) if log else y / high
        return 60 + 440 * math.log(x / left) / math.log(right / left), 260 - 230 * part

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 620 310" font-family="sans-serif" '
        'font-size="12"><rect width="620" height="310" fill="white"/>',
        '<path d="M60 20V260H510" fill="none" stroke="#888"/>',
        f'<text x="285" y="300" text-anchor="middle">{across}</text><text x="8" y="14">{up}</text>',
    ]
    for x in sorted({x for x, _ in points}):
        parts.append(f'<text x="{at(x, high)[0]:.0f}" y="278" text-anchor="middle">{x:g}</text>')
    for y in (low * (high / low) ** (n / 4) if log else high * n / 4 for n in range(5)):
        parts.append(f'<text x="54" y="{at(right, y)[1] + 4:.0f}" text-anchor="end">{y:.2g}</text>')
    for color, (name, line) in zip(("#888", "#2a6", "#36c"), lines.items(), strict=False):
        way = " ".join(f"{x:.0f},{y:.0f}" for x, y in (at(*point) for point in line))
        end = at(*line[-1])[1] + 4
        parts.append(f'<polyline points="{way}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="506" y="{end:.0f}" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def plots(run: dict[str, Any]) -> dict[str, str]:
    """Draw the plots of a run, by their files; none without figures."""
    found = {}
    if lines := step_lines(run):
        found[PLOTS["step_time"][0]] = plot(lines, "width of the MLP", "ms per step", True)
    if lines := speed_lines(run):
        across = "milliseconds of a plain step"
        found[PLOTS["speed_up"][0]] = plot(lines, across, "times as fast", False)
    return found


def filled(text: str, run: dict[str, Any]) -> str:
    """Fill the blocks of a page."""
    return _BLOCK.sub(lambda found: f"{found[1]}{block(run, found[2])}\n{found[3]}", text)


def main() -> None:
    """Fill all pages, and draw the plots."""
    run = load()
    for name in PAGES:
        page = ROOT / name
        page.write_text(filled(page.read_text(encoding="utf-8"), run), encoding="utf-8")
    for name, text in plots(run).items():
        (IMAGES / name).write_text(text, encoding="utf-8")


def _place(run: dict[str, Any]) -> str:
    place = run["machine"]
    about = f"{place['processor']}, {place['cores']} cores, torch {place['torch']}"
    return f"{run['date']}, {about}, Ray {place['ray']}. {run['notes'][0]}"


def _table(columns: list[str], rows: list[list[Any]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(shown(cell) for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    main()
