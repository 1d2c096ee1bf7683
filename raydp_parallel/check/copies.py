"""How bytes travel, and how fast, beside what the device itself can do."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from raydp_parallel.check import nets
from raydp_parallel.check.here import PLAIN, Here, exact
from raydp_parallel.check.table import Found, Row
from raydp_parallel.data_parallel import DataParallel
from raydp_parallel.options import Options

_SIZE = 64 << 20
_GB = 1e9

BY_HOST = Options(threads=PLAIN.threads, metrics=PLAIN.metrics, link="object_store")
"""Without shared memory, of which kind ever."""


class Swallow(nn.Module):
    """Large in, small out."""

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row."""
        return x[:, 0]


class Spit(nn.Module):
    """Small in, large out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Wide rows."""
        return x.new_zeros(len(x), self.width)


def links(here: Here) -> Found:
    """What the executor chose, and who runs on which device."""
    here.ours(nn.Linear(8, 3), here.several)(torch.zeros(4, 8, device=here.device))
    executor = here.executor()
    who = [f"{r.index}: {r.gpu or r.device}{f' {r.gpu_uuid}' if r.gpu_uuid else ''}" for r in executor.replicas()]
    return Found(f"{executor.stats().link}; replica {'; '.join(who)}", {"link": executor.stats().link, "replicas": who})


def own(here: Here) -> dict[str, float]:
    """Bytes per second of the device's own copies."""
    size = _SIZE // 4 if here.quick else _SIZE
    on_host, on_device = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8, device=here.device)
    other = torch.empty_like(on_device)
    found = {"on the device": 2 * size / here.seconds(lambda: other.copy_(on_device), 10)}
    if here.gpus:
        pinned = on_host.pin_memory()
        found["to it"] = size / here.seconds(lambda: on_device.copy_(pinned, non_blocking=True), 10)
        found["from it"] = size / here.seconds(lambda: pinned.copy_(on_device, non_blocking=True), 10)
    return found


def bandwidth(here: Here) -> Found:
    """Inputs, outputs and weights through a replica and, on GPUs, the device's own copies."""
    size = _SIZE // 4 if here.quick else _SIZE
    rows, rounds = 16, here.rounds(10)
    wide = torch.zeros(rows, size // rows // 4, device=here.device)
    narrow = wide[:, :1].clone()
    swallow, spit = here.ours(Swallow(), here.one), here.ours(Spit(wide.shape[1]), here.one)
    changing = nn.Linear(wide.shape[1], rows, bias=False).to(here.device)
    model = here.ours(changing, here.one)
    few = wide[:1]

    def send_weights() -> None:
        changing.weight.add_(1)
        model(few)

    with torch.no_grad():
        empty = here.seconds(lambda: swallow(narrow), rounds)
        found = {
            "inputs": wide.nbytes / max(1e-9, here.seconds(lambda: swallow(wide), rounds) - empty),
            "outputs": wide.nbytes / max(1e-9, here.seconds(lambda: spit(narrow), rounds) - empty),
            "changed weights": changing.weight.nbytes / max(1e-9, here.seconds(send_weights, rounds) - empty),
        }
    plain = {f"device: {name}": rate for name, rate in own(here).items()}
    text = ", ".join(f"{name} {rate / _GB:.1f}" for name, rate in {**found, **plain}.items())
    return Found(f"GB/s: {text}; an empty call {empty * 1e3:.2f} ms", {**found, **plain, "empty_ms": 1e3 * empty})


def _grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def through_the_host(here: Here) -> Found:
    """As with a GPU that is not the driver's: large gradients leave while backward runs, and one grows on its way."""
    torch.manual_seed(0)
    net = nets.Twice(1024).to(here.device)
    plain, x = copy.deepcopy(net), torch.randn(16, 1024, device=here.device)
    model = DataParallel(net, here.one, executor=here.executor(BY_HOST))
    gaps = []
    with exact():
        for _ in range(here.rounds(10)):
            for one in (model, plain):
                one.zero_grad()
                one(x).square().mean().backward()
            pairs = zip(_grads(net), _grads(plain), strict=True)
            gaps += [float((ours - theirs).norm() / theirs.norm()) for ours, theirs in pairs]
    worst = max(gap if gap == gap else float("inf") for gap in gaps)
    text = f"{here.executor(BY_HOST).stats().link}; largest difference {worst:.0e}"
    return Found(text, {"difference": worst}, len(gaps) == 4 * here.rounds(10) and worst < 1e-5)


ROWS = (
    Row("copies", "links in use", links),
    Row("copies", "bandwidth", bandwidth),
    Row("copies", "gradients through the host", through_the_host, gpus=1),
)
