"""Torch's engine, as a replica runs it for its driver."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Another torch may not have it; then the public functions do the work.
_engine_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = (1 << 63) - 1


def seed(device: torch.device, call_seed: int, chunk: int) -> None:
    """Seed all random generators that a forward may use, from the call's seed and the chunk alone
    (row A10).
    """
    value = (call_seed + chunk * _GOLDEN) & _SEED_BITS
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)


def differentiate(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    leaves: Sequence[Tensor],
    needed: Sequence[int],
    partial: bool,
    keep: bool,
    create: bool,
) -> list[Tensor | None]:
    """Compute the gradients of the leaves that are needed, None for the others and for what was not
    reached.

    Args:
        partial: True if the caller's pass leaves out some leaves.
        keep: True if the graph is used again.
        create: True if the gradients are part of a graph themselves.
    """
    wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need]
    if not wanted:
        return [None] * len(leaves)
    found: Iterator[Tensor | None]
    with torch.set_grad_enabled(create):
        if create or partial:
            found = iter(_run(outputs, grads, keep, create, wanted))
        else:
            # Reentrant checkpoints inside the module refuse autograd.grad().
            try:
                _run(outputs, grads, keep, False, ())
                found = iter([leaf.grad for leaf in wanted])
            finally:
                for leaf in leaves:
                    leaf.grad = None
    return [next(found) if need else None for need in needed]


def _run(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    keep: bool,
    create: bool,
    wanted: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Run `torch.autograd.grad` for what is wanted, else `torch.autograd.backward`.

    Both check shapes by means of sympy, whose import takes a third of a second in a new replica.
    Where everything matches there is nothing to check.
    """
    if _engine_run_backward is not None and all(map(_matches, outputs, grads)):
        found: Sequence[Tensor | None] = _engine_run_backward(
            tuple(outputs),
            tuple(grads),
            keep,
            create,
            tuple(wanted),
            allow_unreachable=True,
            accumulate_grad=not wanted,
        )
        return found
    if wanted:
        return torch.autograd.grad(
            outputs, wanted, grads, retain_graph=keep, create_graph=create, allow_unused=True
        )
    torch.autograd.backward(outputs, grads, retain_graph=keep)
    return ()


def _matches(output: Tensor, grad: Tensor) -> bool:
    plain = type(output) is Tensor and type(grad) is Tensor and not output.is_nested
    return plain and output.shape == grad.shape and output.dtype == grad.dtype


def reachable(outputs: Sequence[Tensor]) -> set[int]:
    """Return the ids of the leaves that outputs depend on."""
    found = {id(t) for t in outputs}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        found.add(id(getattr(node, "variable", None)))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return found
