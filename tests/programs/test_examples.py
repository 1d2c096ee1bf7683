"""Each example runs as its reader would run it, and does what it says."""

from __future__ import annotations

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pytest
import ray
from harness import ROOT, printed

pytestmark = pytest.mark.ray


def run(*arguments: str, **environment: str) -> str:
    """What a Python process prints that joins the suite's cluster."""
    cluster = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    return printed(*arguments, **cluster | environment)


def example(name: str, devices: str) -> str:
    """An example's output; with no devices it sees no GPU, of the machine or of a cluster."""
    alone = {"RAY_ADDRESS": "", "CUDA_VISIBLE_DEVICES": ""} if devices == "all" else {}
    return run(f"examples/{name}.py", "--devices", devices, **alone)


def run_cell(name: str, devices: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", "--devices", devices])
        patch.syspath_prepend(str(ROOT / "examples"))
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")


def rows(line: str, text: str) -> Counter[int]:
    """How often each number of rows occurs in the tutorial's lines of one kind."""
    size = r"torch\.Size\(\[(\d+), %d\]\)"
    sizes = re.findall(f"{line}: input size {size % 5} output.size {size % 2}", text)
    assert all(went_in == came_out for went_in, came_out in sizes)
    return Counter(int(size) for size, _ in sizes)


@pytest.mark.long
def test_tutorial_splits_each_batch_among_1_2_and_3_replicas() -> None:
    printed = example("tutorial", "cpu,cpu,cpu")
    one = Counter({30: 3, 10: 1})
    two = Counter({15: 6, 5: 2})
    three = Counter({10: 9, 4: 2, 2: 1})
    missing = one + two + three
    missing.subtract(rows("In Model", printed))
    # Ray may bring the last one after the program's end.
    assert min(missing.values()) == 0 and missing.total() <= 1
    assert rows("Outside", printed) == Counter({30: 9, 10: 3})


def described(name: str) -> list[str]:
    """The output that an example's header shows, line by line."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    (shown,) = re.findall(r"\nOutput::\n\n((?:    .*\n)+)", text)
    return [line.strip().replace("... ms", "0 ms") for line in shown.splitlines()]


NUMBER = re.compile(r"\d+(?:\.\d+)?")


def numbers(lines: list[str]) -> list[float]:
    """All but times."""
    return [float(n) for n in NUMBER.findall(re.sub(r"[\d.]+ ms", "", " ".join(lines)))]


SHORT = ("block_in_model", "contrastive", "cpu_and_gpu", "ema", "gan", "packed_sequences")
OTHERS = {path.stem for path in (ROOT / "examples").glob("*.py")} - {*SHORT, "command_line"}
LONG = [pytest.param(name, marks=pytest.mark.long) for name in sorted(OTHERS)]


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_the_header_shows_the_output(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The last lines that an example prints are those in its header."""
    run_cell(name, "cpu,cpu")
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]
    # Ray prints lines of its own: of its processes, and on a loaded machine of itself.
    printed = [line for line in printed if line and "pid=" not in line and "(raylet)" not in line]
    shown = described(name)
    printed = printed[-len(shown) :]
    assert [NUMBER.sub("#", line) for line in printed] == [NUMBER.sub("#", line) for line in shown]
    # To two digits: other processors compute other last ones.
    assert numbers(printed) == pytest.approx(numbers(shown), rel=0.05)


def test_primitives_compose_to_the_plain_module_in_place() -> None:
    found = example("primitives", "all")
    assert "output (10, 4), 4 gradients; equal to the plain module: True" in found


def blocks(page: Path) -> list[str]:
    """The Python blocks of a page."""
    text = page.read_text(encoding="utf-8")
    found: list[str] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count("```python") > 0
    return found


@pytest.mark.long
def test_readme_examples_run_on_two_cpu_replicas() -> None:
    """The README's first block of Python."""
    loop, *_ = blocks(ROOT / "README.md")
    wrap = "DataParallel(net)"
    assert loop.count(wrap) == 1
    loop = loop.replace(wrap, 'DataParallel(net, ["cpu", "cpu"])')
    asked = "print([replica.rows for replica in model.executor.stats().replicas])"
    assert "[300, 300]" in run("-c", f"{loop}\n{asked}")


def test_the_readme_s_first_screen_says_what_it_is() -> None:
    """In so many lines, with the headings that are searched for."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = text.partition("\n## Install")[0]
    assert len(screen.splitlines()) <= 60 and len(text.splitlines()) <= 180
    for part in ("overview.svg", "scripts/quickstart", "DataParallel(net)", "| DDP |", "real GPU"):
        assert part in screen
    assert "## When not to use it" in screen
    assert {"Monitoring", "Fault tolerance", "Self-check"} <= set(re.findall("## (.*)", text))


GIVEN = """
import torch
from raydp_parallel import DataParallel
model = DataParallel(torch.nn.Linear(4, 2), ["cpu", "cpu"])
x = torch.randn(8, 4)
model(x)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "given", "printed"),
    [
        ("beyond-data-parallel", "", ""),
        ("checkpoints", "", ""),
        ("mixed-precision", "", ""),
        ("index", "", "torch.Size([32, 3])\ntorch.Size([32, 3])"),
        ("faults", GIVEN, "deaths"),
    ],
)
def test_the_code_of_a_page_runs(page: str, given: str, printed: str, tmp_path: Path) -> None:
    """Its Python blocks, one after the other."""
    there = f"import os; os.chdir({str(tmp_path)!r})"
    assert printed in run("-c", "\n".join([there, given, *blocks(ROOT / "docs" / f"{page}.md")]))
