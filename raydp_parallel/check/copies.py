"""The links that carry bytes and their speed, compared with the device's own copies."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel import devices
from raydp_parallel.check import nets
from raydp_parallel.check.here import PLAIN, Here, distances, exact
from raydp_parallel.check.table import Row, RowResult
from raydp_parallel.devices.buffers import Arena, SharedBuffer
from raydp_parallel.devices.ranges import MemoryRange, fill
from raydp_parallel.options import GpuPath, Options
from raydp_parallel.transport import cuda_ipc

_SIZE = 64 << 20
_GB = 1e9

BY_HOST = dataclasses.replace(PLAIN, link="object_store", gpu_paths=("courier",))
"""Without shared memory of any kind; gradients leave while backward runs."""


class LargeInput(nn.Module):
    """A large input and a small output."""

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row."""
        return x[:, 0]


class LargeOutput(nn.Module):
    """A small input and a large output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Wide rows."""
        return x.new_zeros(len(x), self.width)


def links(here: Here) -> RowResult:
    """The link that the executor chose, and the device of each replica."""
    here.ours(nn.Linear(8, 3), here.several)(torch.zeros(4, 8, device=here.device))
    executor = here.executor()
    replicas, link = executor.replicas(), executor.stats().link
    shown = [
        f"{r.index}: {r.gpu or r.device}{f' {r.gpu_uuid}' if r.gpu_uuid else ''}" for r in replicas
    ]
    wrong = _misplaced([r.gpu_uuid for r in replicas], len({*here.several})) if here.gpus else ""
    shared = bool(here.gpus) and _uuid(here) in [r.gpu_uuid for r in replicas]
    asked = "ipc" in executor.options.gpu_paths
    # Expandable segments, which the user asked for, rule out CUDA IPC: that is no failure.
    if asked and shared and not wrong and "CUDA IPC" not in link and not cuda_ipc.expandable():
        wrong = "; CUDA IPC IS OFF though a replica is on the driver's GPU: the log says why"
    text = f"{link}; replica {'; '.join(shown)}{wrong}"
    return RowResult(text, {"link": link, "replicas": shown}, not wrong)


def _uuid(here: Here) -> str:
    return str(torch.cuda.get_device_properties(here.device).uuid)


def _misplaced(uuids: Sequence[str], expected: int) -> str:
    """What is wrong with the placement, if anything: a replica on no GPU, or several on one."""
    if not all(uuids):
        return "; A REPLICA IS ON A CPU"
    if len({*uuids}) < expected:
        return f"; {expected} replicas SHARE {len({*uuids})} GPU(s)"
    return ""


def _registered(lent: SharedBuffer) -> bool:
    """Whether CUDA knows some memory."""
    return devices.view(MemoryRange(lent.array.ctypes.data, lent.array.nbytes, lent)).is_pinned()


def registered(here: Here) -> RowResult:
    """Whether CUDA registers shared memory. In either case copies have the right bytes, and the
    next kernel runs.
    """
    arena = Arena(pin=devices.pinner(here.device))
    source = torch.randint(256, (1 << 20,), dtype=torch.uint8, device=here.device)
    lent = arena.take(source.nbytes)
    copied = devices.view(MemoryRange(lent.array.ctypes.data, lent.array.nbytes, lent))
    taken = _registered(lent)
    alive = bool(torch.ones(8, device=here.device).sum() == 8)
    fill(lent.array.ctypes.data, [devices.piece(source)], [0])
    same = torch.equal(copied, source.cpu())
    word = "is registered" if taken else "is REFUSED: copies go through pinned buffers"
    text = f"shared memory {word}"
    if not (same and alive):
        text += f"; bytes are {'right' if same else 'WRONG'}, kernels {'run' if alive else 'FAIL'}"
    return RowResult(text, {"registered": taken}, same and alive)


def evaluation_first(here: Here) -> RowResult:
    """A net that is evaluated under inference mode and trained afterwards keeps its links and gets
    the right gradients.
    """
    torch.manual_seed(0)
    net = nn.Linear(256, 256).to(here.device)
    plain, x = copy.deepcopy(net), torch.randn(256, 256, device=here.device)
    model, executor = here.ours(net, here.one), here.executor()
    with exact():
        with torch.inference_mode():
            model(x)
        before = executor.stats().link
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
    after, gap = executor.stats().link, max(distances(net, plain))
    text = f"{after}{'' if before == after else f', WAS {before}'}; largest difference {gap:.0e}"
    return RowResult(text, {"difference": gap}, before == after and gap < 1e-5)


def two_devices(here: Here) -> RowResult:
    """Inputs of two GPUs in one call, one of which is busy."""
    net = nets.Witness().to(here.device)
    first = torch.arange(1 << 20, device=here.device).float().view(-1, 2)
    other = torch.device(here.device.type, 1 if here.gpus > 1 else 0)
    side = 4096 if here.gpus else 1024
    heavy = torch.ones(side, side, device=other)
    for _ in range(20):
        heavy = heavy @ heavy / side
    second = heavy.flatten()[: len(first)] + 1
    scaled, nested, _ = here.ours(net, here.one)(first, {"y": second})
    same = torch.equal(scaled, first) and bool((nested["twice"].to(other) == 2 * second).all())
    return RowResult("both arrived" if same else "WRONG inputs", {}, same)


def own(here: Here) -> dict[str, float]:
    """Bytes per second of the device's own copies."""
    size = _SIZE // 4 if here.quick else _SIZE
    on_host = torch.zeros(size, dtype=torch.uint8)
    on_device = torch.zeros(size, dtype=torch.uint8, device=here.device)
    other = torch.empty_like(on_device)
    found = {"on the device": 2 * size / here.seconds(lambda: other.copy_(on_device), 10)}
    if here.gpus:
        pinned = on_host.pin_memory()
        found["to it"] = size / here.seconds(lambda: on_device.copy_(pinned, non_blocking=True), 10)
        found["from it"] = size / here.seconds(
            lambda: pinned.copy_(on_device, non_blocking=True), 10
        )
    return found


def bandwidth(here: Here) -> RowResult:
    """Bytes per second of inputs, outputs and weights, beside the device's own copies."""
    size = _SIZE // 4 if here.quick else _SIZE
    rows, rounds = 16, here.rounds(10)
    wide = torch.zeros(rows, size // rows // 4, device=here.device)
    narrow = wide[:, :1].clone()
    taker = here.ours(LargeInput(), here.one)
    giver = here.ours(LargeOutput(wide.shape[1]), here.one)
    changing = nn.Linear(wide.shape[1], rows, bias=False).to(here.device)
    model = here.ours(changing, here.one)
    few = wide[:1]

    def send_weights() -> None:
        changing.weight.add_(1)
        model(few)

    with torch.no_grad():
        empty = here.seconds(lambda: taker(narrow), rounds)
        found = {
            "inputs": wide.nbytes / max(1e-9, here.seconds(lambda: taker(wide), rounds) - empty),
            "outputs": wide.nbytes / max(1e-9, here.seconds(lambda: giver(narrow), rounds) - empty),
            "changed weights": changing.weight.nbytes
            / max(1e-9, here.seconds(send_weights, rounds) - empty),
        }
    plain = {f"device: {name}": rate for name, rate in own(here).items()}
    text = ", ".join(f"{name} {rate / _GB:.1f}" for name, rate in {**found, **plain}.items())
    return RowResult(
        f"GB/s: {text}; an empty call {empty * 1e3:.2f} ms",
        {**found, **plain, "empty_ms": 1e3 * empty},
    )


def _trained(here: Here, ids: Sequence[Any], options: Options) -> float:
    """Train a net on replicas, and plainly; returns the largest difference of a gradient."""
    torch.manual_seed(0)
    net = nets.Twice(1024).to(here.device)
    plain, x = copy.deepcopy(net), torch.randn(32, 1024, device=here.device)
    model, worst = here.wrapped(net, ids, options), 0.0
    with exact():
        for _ in range(here.rounds(10)):
            for one in (model, plain):
                one.zero_grad()
                one(x).square().mean().backward()
            worst = max(worst, *distances(net, plain))
    return worst


def path(name: GpuPath, here: Here) -> RowResult:
    """Training by one of `Options.gpu_paths`: whether it is in use, and gives the plain module's
    gradients.
    """
    options = dataclasses.replace(PLAIN, gpu_paths=(name,))
    executor, worst = here.executor(options), _trained(here, here.several, options)
    used = {
        "ipc": "CUDA IPC" in executor.stats().link or cuda_ipc.expandable(),
        "peer": "peer copies" in executor.stats().link or cuda_ipc.expandable(),
        "registered": not here.gpus or _registered(Arena(pin=devices.pinner(here.device)).take(8)),
        "courier": not here.gpus or devices.courier(here.device) is not None,
        "nccl": not executor.groups.trouble,
    }[name]
    text = f"{'in use' if used else 'NOT IN USE: the log says why'}; largest difference {worst:.0e}"
    return RowResult(text, {"difference": worst, "used": used}, used and worst < 1e-5)


def through_the_host(here: Here) -> RowResult:
    """Gradients as from a GPU that is not the driver's: large ones are sent while backward runs,
    and one grows after it was sent.
    """
    worst = _trained(here, here.one, BY_HOST)
    text = f"{here.executor(BY_HOST).stats().link}; largest difference {worst:.0e}"
    return RowResult(text, {"difference": worst}, worst < 1e-5)


ROWS = (
    Row("copies", "links in use", links),
    Row("copies", "registered memory", registered, gpus=1),
    Row("copies", "path: registered", functools.partial(path, "registered"), gpus=1),
    Row("copies", "path: ipc", functools.partial(path, "ipc"), gpus=1),
    Row("copies", "path: peer", functools.partial(path, "peer"), gpus=2),
    Row("copies", "path: courier", functools.partial(path, "courier"), gpus=1),
    Row("copies", "path: nccl", functools.partial(path, "nccl"), gpus=2),
    Row("copies", "evaluation first", evaluation_first),
    Row("copies", "inputs of two GPUs", two_devices, gpus=2),
    Row("copies", "bandwidth", bandwidth),
    Row("copies", "gradients through the host", through_the_host, gpus=1),
)
