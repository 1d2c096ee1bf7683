"""The floor of a loop in the driver: processes that do what replicas must, and nothing else.

Weights lie in memory that all share, so that they never travel, and gradients in one run of memory
of each process. Inputs and outputs go through pipes. A net is known, is never edited, and no
process dies.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.measure import replicas_threads
from benchmarks.nets import CASES
from benchmarks.peers.base import Peer
from benchmarks.peers.here import Here


def by_hand(workers: int) -> Peer:
    """Processes that share the weights, the loop here."""
    context = mp.get_context("spawn")
    lines, processes = [], []
    for _ in range(workers):
        ours, theirs = context.Pipe()
        threads = replicas_threads(workers)
        process = context.Process(target=_serve, args=(theirs, threads), daemon=True)
        process.start()
        lines.append(ours)
        processes.append(process)

    def end() -> None:
        for line in lines:
            line.send(None)
        for process in processes:
            process.join()

    return _ByHand(lines, end)


class _ByHand(Here):
    """The loop of one net after the other."""

    def __init__(self, lines: list[Connection], end: Any) -> None:
        super().__init__(lambda net: _Net(self._case, net, lines), end)

    def begin(self, case: str) -> None:
        self._case = case
        super().begin(case)


class _Net(nn.Module):
    """Stands for a net of which the processes have copies."""

    def __init__(self, case: str, net: nn.Module, lines: list[Connection]) -> None:
        super().__init__()
        self.net = net
        self.lines = lines
        weights = _in_one_run(net)
        self.grads = [torch.zeros_like(weights).share_memory_() for _ in lines]
        for line, grads in zip(lines, self.grads, strict=True):
            line.send((case, weights, grads))

    def forward(self, *inputs: Tensor) -> Tensor:
        """The outputs of all chunks, one after the other."""
        found: Tensor = _Trip.apply(self, inputs, *self.net.parameters())
        return found


class _Trip(Function):
    @staticmethod
    def forward(ctx: Any, net: _Net, inputs: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        chunks = zip(*[part.chunk(len(net.lines)) for part in inputs], strict=True)
        for line, chunk in zip(net.lines, chunks, strict=True):
            line.send([part.numpy() for part in chunk])
        outputs = [torch.from_numpy(line.recv()) for line in net.lines]
        ctx.net, ctx.rows = net, [len(part) for part in outputs]
        ctx.shapes = [p.shape for p in parameters]
        return torch.cat(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        net = ctx.net
        for line, chunk in zip(net.lines, grad.split(ctx.rows), strict=True):
            line.send(chunk.numpy())
        for line in net.lines:
            line.recv()
        total = net.grads[0].clone()
        for further in net.grads[1:]:
            total += further
        parts = total.split([shape.numel() for shape in ctx.shapes])
        return None, None, *map(Tensor.view, parts, ctx.shapes)


def _in_one_run(net: nn.Module) -> Tensor:
    """Move a net's weights into one run of shared memory."""
    whole = torch.cat([p.detach().flatten() for p in net.parameters()]).share_memory_()
    _show(net, whole)
    return whole


def _show(net: nn.Module, whole: Tensor) -> None:
    """Let a net's weights be those in a run of memory."""
    sizes = [p.numel() for p in net.parameters()]
    for p, part in zip(net.parameters(), whole.split(sizes), strict=True):
        p.data = part.view(p.shape)


def _serve(line: Connection, threads: int) -> None:
    """Compute chunks until None comes: a case with its memory, then inputs and gradients of outputs
    by turns.
    """
    torch.set_num_threads(threads)
    found: Any = line.recv()
    while found is not None:
        case, weights, grads = found
        net = CASES[case].make()
        _show(net, weights)
        parameters = [*net.parameters()]
        parts = grads.split([p.numel() for p in parameters])
        into = [part.view(p.shape) for p, part in zip(parameters, parts, strict=True)]
        while isinstance(found := line.recv(), list):
            output = net(*[torch.from_numpy(part) for part in found])
            line.send(output.detach().numpy())
            grad = torch.from_numpy(line.recv())
            torch._foreach_copy_(into, [*torch.autograd.grad(output, parameters, grad)])
            line.send(True)
