"""Which lines of the package does no test hold?

`python -m benchmarks.mutants` changes one place of a copy of the package at a time (a statement
goes, a condition is turned round, a comparison shifts, an operand is left out) and runs the tests:
first those that are for its file, and if it lives, all others. A mutant that no test notices is
printed: either the line needs a test, or it can go. Places are drawn at random by `--seed`, equally
many in each file: by default one in each of the package's.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FIRST = {
    "batch/": ("test_batch.py", "contract/test_contract_batch.py"),
    "check.py": ("test_check.py",),
    "cluster/": ("features/test_placement.py", "features/test_executor.py"),
    "command.py": ("test_monitoring.py",),
    "devices/": ("features/test_gpu.py", "contract/test_contract_apply.py"),
    "driver/backward.py": (
        "contract/test_contract_autograd.py",
        "contract/test_train_in_replicas.py",
    ),
    "driver/dispatcher.py": ("contract/test_contract_autograd.py", "faults/test_faults.py"),
    "driver/loss.py": ("contract/test_loss_in_replicas.py",),
    "driver/reporter.py": ("test_monitoring.py",),
    "driver/res": ("contract/test_train_in_replicas.py", "faults/test_faults.py"),
    "driver/optimizer": ("contract/test_train_in_replicas.py",),
    "extras/map.py": ("features/test_map.py",),
    "extras/sync_batch_norm.py": ("features/test_sync_batch_norm.py",),
    "hugging_face.py": ("programs/test_hugging_face.py",),
    "monitoring/": ("test_monitoring.py",),
    "options.py": ("test_options.py",),
    "replica/ahead.py": ("features/test_ahead.py",),
    "replica/module.py": ("contract/test_changes.py", "contract/test_data_in_forward.py"),
    "replica/training.py": ("contract/test_train_in_replicas.py",),
    "state/": ("contract/test_changes.py", "contract/test_contract_replicate.py"),
    "wire/": ("faults/test_waits.py", "features/test_nodes.py"),
}
"""The tests that notice most mutants of a file, by the beginning of its path."""
TESTS = ("tests", "--ignore=tests/tools", "--ignore=tests/test_house.py")
SWAPPED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip


class Mutant(NamedTuple):
    """A place of a file, and what stands there instead."""

    file: str
    line: int
    start: int
    end: int
    text: str


def places(file: str, text: str) -> Iterator[Mutant]:
    """All mutants of a file."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def mutant(node: ast.expr | ast.stmt, by: str) -> Mutant:
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return Mutant(file, node.lineno, first, last, by)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete)):
            constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not constant and not isinstance(target, (ast.Name, ast.Tuple)):
                yield mutant(node, "pass")
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield mutant(node.test, f"(not ({ast.unparse(node.test)}))")
        elif isinstance(node, ast.BoolOp):
            for left_out in node.values:
                kept = [f"({ast.unparse(v)})" for v in node.values if v is not left_out]
                word = " and " if isinstance(node.op, ast.And) else " or "
                yield mutant(node, f"({word.join(kept)})")
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield mutant(node, f"({left} {SWAPPED[type(node.ops[0])]} {right})")


def survives(copy: Path, tests: Iterable[str], limit: float) -> bool:
    """Return if tests of a copy pass. One that hangs has been noticed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        [*command, "--timeout", "90", "--no-header"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()


def lives(mutant: Mutant, copies: SimpleQueue[Path], limit: float) -> bool:
    """Try a mutant in one of the copies, and say what became of it."""
    copy = copies.get()
    path = copy / "raydp_parallel" / mutant.file
    text = path.read_text()
    began = time.monotonic()
    try:
        path.write_text(text[: mutant.start] + mutant.text + text[mutant.end :])
        known = [tests for path, tests in FIRST.items() if mutant.file.startswith(path)]
        first = [f"tests/{name}" for tests in known for name in tests]
        alive = (not first or survives(copy, first, limit)) and survives(copy, TESTS, limit)
    finally:
        path.write_text(text)
        copies.put(copy)
    was = " ".join(text[mutant.start : mutant.end].split())
    word, seconds = "LIVES" if alive else "noticed", time.monotonic() - began
    print(f"{word} {seconds:4.0f} s  {mutant.file}:{mutant.line}  {was}  ->  {mutant.text}")
    sys.stdout.flush()
    return alive


def main() -> None:
    """Draw mutants, try each, and print those that live."""
    parser = argparse.ArgumentParser(description=__doc__)
    package = ROOT / "raydp_parallel"
    every = [str(path.relative_to(package)) for path in sorted(package.rglob("*.py"))]
    parser.add_argument("files", nargs="*", default=every)
    parser.add_argument("--each", type=int, default=1, help="mutants of each file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900, help="seconds for the tests of one")
    parser.add_argument("--at-once", type=int, default=2, help="how many are tried at once")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    chosen: list[Mutant] = []
    for file in options.files:
        found = sorted(places(file, (package / file).read_text()))
        print(f"{file}: {len(found)} places")
        chosen += draw.sample(found, min(options.each, len(found)))
    draw.shuffle(chosen)  # who ends it early has tried some of each file
    ignored = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "results")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for n in range(options.at_once):
            copies.put(Path(folder) / f"copy{n}")
            shutil.copytree(ROOT, Path(folder) / f"copy{n}", ignore=ignored)
        lived = [*pool.map(lambda mutant: lives(mutant, copies, options.limit), chosen)]
    print(f"{len(lived) - sum(lived)} of {len(lived)} noticed")


if __name__ == "__main__":
    main()
