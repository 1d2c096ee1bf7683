"""How much does the host do for each training step on a GPU?

`python -m benchmarks.gpu_host` needs no GPU: tensors lie on the fake one of the tests, and what is
counted no machine changes. The tensors and submodules are those of a ResNet-50; all weights change
with each step; the module and the optimizer do not count. Driver and replica share a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.measure import Asked, Effort, Report, Table, alone
from benchmarks.nets import resnet50

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

_FAKE = ("fake_gpu.py", "torch/_compile.py", "simple_registry.py", "weakref.py")
KINDS = ("Python calls", "calls", "copies", "crossings", "waits")
LIMITS = {"Python calls": 6000, "calls": 740, "copies": 30, "crossings": 12}
WAITS = {"driver": 0, "replica": 1}
_inside: Any = []
"""The fake GPU."""


class _Leaves(torch.autograd.Function):
    """Takes all parameters, and has gradients for all of them, without computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.leaves = leaves
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with uncounted():
            return grads[0], *[leaf.detach().clone() for leaf in ctx.leaves]


class Shaped(nn.Module):
    """A net's modules, parameters and buffers. It writes its buffers as batch norm does, and does
    not compute.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Give the input."""
        with uncounted(), torch.no_grad():
            for name, buffer in self.net.named_buffers():
                version = buffer._version
                buffer.add_(1)
                if not name.endswith("tracked"):  # kernels of batch norm move no versions
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
            leaves = [*self.net.parameters()]
        found: Tensor = _Leaves.apply(x, *leaves)
        return found


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing in a block."""
    gpus = _inside[0]
    before, found = gpus.counts.copy(), sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        gpus.counts.clear()
        gpus.counts.update(before)
        sys.setprofile(found)


class Calls:
    """Counts calls of Python functions, but for those of the fake."""

    def __init__(self, gpus: Any) -> None:
        self._gpus, self._fake = gpus, 0
        self.counts: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event in ("call", "return"):
            mine = frame.f_code.co_filename.endswith(_FAKE)
            near = mine and frame.f_code.co_qualname.startswith("Near.")
            if mine and not near:
                self._fake += 1 if event == "call" else -1
                return
        if not self._fake and event == "call":
            self.counts[f"{self._gpus.side} Python calls"] += 1
            place = f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"
            self.places[f"{self._gpus.side} {place}"] += 1


def counted(way: str, steps: int = 12) -> dict[str, int]:
    """Count what the last of some steps takes."""
    from fake_gpu import installed, near_replicas

    with pytest.MonkeyPatch.context() as patch, installed(1) as gpus:
        near_replicas(gpus, patch, ipc=way == "ipc")
        return _counted(gpus, steps)


def _counted(gpus: Any, steps: int) -> Counter[str]:
    import raydp_parallel

    options = raydp_parallel.Options(metrics=False, gpu_paths=("host",))
    calls = Calls(gpus)
    _inside[:] = [gpus]
    net = Shaped(resnet50()).cuda()
    weights = [*net.parameters()]
    with raydp_parallel.Executor([0], options=options) as executor:
        model = raydp_parallel.DataParallel(net, executor=executor)
        x = torch.zeros(64, 4).cuda()
        for step in range(steps):
            last = step == steps - 1
            gpus.counts.clear()
            if last:
                sys.setprofile(calls)
            try:
                torch.autograd.backward(model(x), torch.ones_like(x))  # not the fake's own
            finally:
                sys.setprofile(None)
            counts = gpus.counts.copy()
            torch.autograd.graph.increment_version(weights)  # the optimizer
            net.zero_grad()
    gpus.counts.clear()
    net(x).backward(torch.ones_like(x))  # as the module alone does
    counts.subtract({"driver calls": gpus.counts["driver calls"]})
    counts.update(calls.counts)
    if "--places" in sys.argv:
        print(*(f"{n:6d} {place}" for place, n in calls.places.most_common(70)), sep="\n")
    return counts


def run(effort: Effort) -> Report:
    """Count for each way."""
    rows: list[list[Any]] = []
    asked: list[Asked] = []
    for way in ("ipc", "host"):
        found = counted(way)
        for side in ("driver", "replica"):
            rows.append([f"{way}, {side}", *[found.get(f"{side} {kind}", 0) for kind in KINDS]])
        if way == "ipc":
            for kind, limit in LIMITS.items():
                both = sum(found.get(f"{side} {kind}", 0) for side in WAITS)
                asked.append(Asked(f"{kind} of a step, driver and replica", both, limit))
            for side, limit in WAITS.items():
                asked.append(Asked(f"waits of the {side}", found.get(f"{side} waits", 0), limit))
    question = "How much does the host do for each training step on a GPU?"
    table = Table("a step of ResNet-50's tensors, counts", ["", *KINDS], rows)
    notes = [
        "No GPU took part. Copies are `copy_`, `clone` and `_foreach_copy_`, which across devices "
        "is one for each tensor of a row; crossings are those between devices. Calls are of "
        "tensors' operations, views among them, beyond those of the module alone."
    ]
    data = {"columns": ["", *KINDS], "rows": rows}
    return Report("gpu_host", question, [table], asked, data, notes)


if __name__ == "__main__":
    import importlib

    main: Any = importlib.import_module("benchmarks.gpu_host")  # classes travel by reference
    if "--places" in sys.argv:  # which functions are called most often
        print(main.counted("ipc"))
    else:
        alone(main.run)
