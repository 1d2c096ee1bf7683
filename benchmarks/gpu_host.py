"""How much does the host do for each training step on a GPU?

`python -m benchmarks.gpu_host` needs no GPU: tensors lie on the stand-in of the tests, and what is
counted no machine changes. The tensors and submodules are those of a ResNet-50; all weights change
with each step; the module and the optimizer do not count. Driver and replica share a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Asked, Effort, Report, Table, alone, on_standin
from benchmarks.nets import resnet50

_STANDIN = ("standin.py", "on_gpus.py", "torch/overrides.py")
KINDS = ("Python calls", "launches", "crossings", "waits")
LIMITS = {"Python calls": 6000, "launches": 250, "crossings": 12}
WAITS = {"driver": 2, "replica": 4}


class Counts:
    """Counts what this thread and its GPU do, but for the inside of blocks."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self._inside = 0
        self._before: Counter[str] | None = None

    def begin(self) -> None:
        """Begin, or go on."""
        self._before = self._numbers()
        sys.setprofile(self._called)

    def pause(self) -> None:
        """Count nothing for now."""
        if self._before is not None:
            sys.setprofile(None)
            self.found.update(self._numbers())
            self.found.subtract(self._before)
            self._before = None

    def _numbers(self) -> Counter[str]:
        number = importlib.import_module("standin").number
        return Counter({kind: number(kind) for kind in KINDS[1:]})

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event not in ("call", "return"):
            return
        if frame.f_code.co_filename.endswith(_STANDIN):
            self._inside += 1 if event == "call" else -1
        elif not self._inside and event == "call":
            self.found["Python calls"] += 1
            self.places[f"{Path(frame.f_code.co_filename).name} {frame.f_code.co_qualname}"] += 1


_of_replica = Counts()


class _Leaves(torch.autograd.Function):
    """Takes all parameters, and has gradients for all of them, without computing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.grads = [torch.zeros_like(leaf) for leaf in leaves]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *ctx.grads


class Shaped(nn.Module):
    """A net's modules, parameters and buffers. It writes its buffers as batch norm does, and does
    not compute; returns what its process has done since the last time.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> dict[str, Any]:
        """Give the input."""
        _of_replica.pause()
        found, _of_replica.found = _of_replica.found, Counter()
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                version = buffer._version
                buffer.add_(1)
                if not name.endswith("tracked"):  # kernels of batch norm move no versions
                    torch._C._autograd._unsafe_set_version_counter((buffer,), (version,))
        given = _Leaves.apply(x, *self.net.parameters())
        _of_replica.begin()
        return {"y": given, "found": dict(found)}


def counted(way: str, steps: int = 12) -> dict[str, int]:
    """Count what the last of some steps takes."""
    import raydp_parallel

    options = raydp_parallel.Options(metrics=False, gpu_paths=("host", way))
    net = Shaped(resnet50()).cuda()
    weights = [*net.parameters()]
    with raydp_parallel.Executor([0], options=options) as executor:
        model = raydp_parallel.DataParallel(net, executor=executor)
        x = torch.zeros(64, 4).cuda()
        for _ in range(steps):
            mine = Counts()
            mine.begin()
            model(x)["y"].backward(torch.ones_like(x))
            mine.pause()
            torch.autograd.graph.increment_version(weights)  # the optimizer
            net.zero_grad()
        theirs = {kind: numbers[0] for kind, numbers in model(x)["found"].items()}
    if "--places" in sys.argv:
        print(*(f"{n:6d} {place}" for place, n in mine.places.most_common(70)), sep="\n")
    both = (("driver", mine.found), ("replica", theirs))
    return {f"{side} {kind}": found[kind] for side, found in both for kind in KINDS}


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
        "No GPU took part. Launches are of kernels, and of copies, which across devices are one "
        "for each tensor of a row; crossings are those between devices."
    ]
    data = {"columns": ["", *KINDS], "rows": rows}
    return Report("gpu_host", question, [table], asked, data, notes)


if __name__ == "__main__":
    on_standin("gpu_host")
    main: Any = importlib.import_module("benchmarks.gpu_host")  # classes travel by reference
    if "--places" in sys.argv:  # which functions are called most often
        print(main.counted("ipc"))
    else:
        alone(main.run)
