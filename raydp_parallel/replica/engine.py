"""Torch's engine, as a replica runs it for its driver."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from raydp_parallel.devices.memory import gpu_of
from raydp_parallel.wire.messages import BackwardRequest


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed all random generators that a forward may use, from the call's seed and the chunk alone
    (row A10).
    """
    # The bits of the golden ratio let neighbours differ in all of theirs.
    value = (call_seed + chunk * 0x9E3779B97F4A7C15) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


class _Head(Function):
    """A scalar whose gradients by the outputs are the given ones.

    Without it `torch.autograd` would check their shapes by means of sympy, whose import takes a new
    replica a second of a core. The engine itself checks them, too.
    """

    @staticmethod
    def forward(ctx: _Given, grads: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.grads = grads
        return torch.zeros((), device=gpu_of([*grads]) or "cpu")

    @staticmethod
    def backward(ctx: _Given, *_: Tensor) -> tuple[Tensor | None, ...]:
        if _OnlyTorch.begun is not None:
            sys.setprofile(_watch)  # on a GPU this is another thread
            _OnlyTorch.begun = True
        return None, *ctx.grads


class _Given(FunctionCtx):
    grads: Sequence[Tensor]


class _OnlyTorch:
    """State of a backward that nobody has asked for yet."""

    begun: bool | None = None  # torch's engine has; None if there is no such backward


def _watch(frame: FrameType, event: str, arg: object) -> None:
    """Raise an exception before any Python function runs inside of the engine: a hook, a function
    or a checkpoint of the module's would run twice if something else is asked for.
    """
    if _OnlyTorch.begun and event == "call":
        raise RuntimeError
    if _OnlyTorch.begun is None or (_OnlyTorch.begun and event != "return"):  # the engine has ended
        _OnlyTorch.begun = None
        sys.setprofile(None)


@contextlib.contextmanager
def only_torch() -> Iterator[None]:
    """Let one backward raise an exception before it runs what is not torch's own code."""
    _OnlyTorch.begun = False
    sys.setprofile(_watch)
    try:
        yield
    finally:
        _OnlyTorch.begun = None


def differentiate(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor],
    request: BackwardRequest,
) -> list[Tensor | None]:
    """Compute the gradients of the leaves that are needed, None for the others and for what was not
    reached. They are part of a graph themselves if the request gives that a number.
    """
    wanted = [leaf for leaf, need in zip(leaves, request.needed, strict=True) if need]
    if not wanted:
        return [None] * len(leaves)
    given: Sequence[Tensor | None] = grads
    if not any([t.is_nested for t in outputs]):  # which no function of Python's takes
        with torch.enable_grad():
            outputs, given = [_Head.apply(grads, *outputs)], [None]
    row: Sequence[Tensor | None]
    if request.derived is not None:
        row = torch.autograd.grad(
            outputs, wanted, given, request.retain, create_graph=True, allow_unused=True
        )
    else:
        for leaf in wanted:
            leaf.grad = None  # a pass through a graph that was made of this one may have left some
        try:
            # Reentrant checkpoints inside the module refuse to be told what is wanted.
            only = wanted if request.partial else None
            torch.autograd.backward(outputs, given, request.retain, inputs=only)
            row = [leaf.grad for leaf in wanted]
        finally:
            for leaf in leaves:
                leaf.grad = None
    found = iter(row)
    return [next(found) if need else None for need in request.needed]


def reachable(outputs: Sequence[Tensor]) -> set[object]:
    """Return the nodes that outputs depend on, and the ids of the leaves."""
    found: set[object] = {id(t) for t in outputs}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        found.add(id(getattr(node, "variable", None)))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found | seen
