"""Mistakes that people make: each text says what was seen and what to do, in a few lines.

``pytest -s tests/programs/test_mistakes.py`` prints them for reading.
"""

from __future__ import annotations

import pdb
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Apply
from torch import nn

import raydp_parallel
from raydp_parallel import DataParallel, ParallelError

CPUS = ["cpu", "cpu"]
X = torch.ones(4, 3)


class Net(nn.Linear):
    """Does in forward what it is told."""

    def __init__(self, act: Callable[[Any], object] = id) -> None:
        super().__init__(3, 2)
        self.act = act

    def forward(self, x: Any, y: Any = None) -> Any:
        self.act(self)
        return super().forward(x)


def call(act: Callable[[Any], object], *inputs: Any) -> Any:
    """Call a wrapped net."""
    return DataParallel(Net(act), CPUS)(*inputs or (X,))


class Box:
    """A result of a class that nobody knows."""


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "a device instead of a list": (lambda: DataParallel(Net(), "cuda"), "give a list, such as"),
    "a GPU that is not there": (lambda: DataParallel(Net(), [0, 7]), "not in the cluster.*Use"),
    "CUDA outputs without CUDA": (lambda: DataParallel(Net(), CPUS, "cuda:0"), "Leave it out"),
    "a module on meta": (lambda: DataParallel(Net().to("meta"), CPUS), "to_empty.*before"),
    "a generator in the module": (
        lambda: DataParallel(Apply(id, stream=iter(i for i in range(3))), CPUS)(X),
        r"module.stream is a .*generator.*a tuple, instead of yielding$",
    ),
    "yield in forward": (
        lambda: DataParallel(Apply(lambda net, x: (yield x)), CPUS)(X),
        r"output is.*a tuple, instead of yielding\s*$",
    ),
    "an input without contents": (
        lambda: call(id, X, {"rows": X.to("meta")}),
        r"^TransferError: inputs\[1\]\['rows'\] is a torch.Tensor.*'meta'.*on the CPU or a GPU$",
    ),
    "arguments of two sizes": (lambda: call(id, X, torch.ones(2)), "give all arguments one size"),
    "breakpoint() in forward": (
        lambda: call(lambda net: breakpoint()),
        r"DataParallel\(net, \['cpu'\]\)",
    ),
    "pdb in forward": (
        lambda: call(lambda net: pdb.set_trace()),
        "runs the module in this process",
    ),
    "a chunk of one row under batch norm": (
        lambda: DataParallel(nn.Sequential(nn.BatchNorm1d(3)), CPUS)(X[:2]),
        "This chunk has 1 row, and batch norm needs 2.*drop_last",
    ),
    "a criterion of one's own": (
        lambda: DataParallel(Net(), CPUS).with_loss(lambda out, y: out.sum())(X, X),
        r"needs reduction='mean' \(over the rows\), 'sum' or 'none'",
    ),
    "sys.exit() in forward": (lambda: call(lambda net: sys.exit(1)), "goes on"),
    "a hook that fails in backward": (
        lambda: call(lambda net: net.weight.register_hook(lambda grad: grad[9])).sum().backward(),
        "Caught IndexError in replica 0",
    ),
    "an output of an unknown class": (
        lambda: DataParallel(Apply(lambda net, x: Box()), CPUS)(X),
        "class Box.*a list.*register_batch_type",
    ),
    "an optimizer for its class": (
        lambda: DataParallel(Net(), CPUS).optimizer(torch.optim.SGD(Net().parameters())),  # type: ignore[arg-type]
        r"expected a class.*optimizer\(torch.optim.SGD, lr=0.1\), got a SGD$",
    ),
    "a setting for parameters": (
        lambda: DataParallel(Net(), CPUS).optimizer(torch.optim.SGD, 0.1),  # type: ignore[arg-type]
        "expected parameters, got 0.1; name settings, as model.optimizer",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_says_what_to_do(name: str) -> None:
    """By an error, with few frames of this package, or by a warning."""
    program, words = MISTAKES[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program()
            text = "; ".join(f"warning: {one.message}" for one in caught)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            assert "_call_impl" not in text
            files = [Path(f.filename).parents for f in traceback.extract_tb(error.__traceback__)]
            own = sum(Path(raydp_parallel.__file__).parent in parents for parents in files)
            assert own <= 4 * ("backward" not in name) and not (
                isinstance(error, ParallelError) and error.__cause__
            )
    print(f"\n{name}\n    {text}")
    assert re.search(words, text, re.DOTALL), text
