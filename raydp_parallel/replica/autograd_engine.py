"""Torch's engine, as a replica runs it for its driver, and the graphs that the replica keeps.

While the driver gathers, sums or steps, a replica on a machine with a core to spare has nothing to
do. It frees the graphs that nothing can ask for any more, which takes a quarter of a millisecond
for a GPT-2 of six layers, and looks whether the last forward left attributes to restore. Where the
next call comes at once, nothing is lost: it would have begun with the same work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge

from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.transport.messages import BackwardRequest, OutputGraph


def plainly(request: BackwardRequest, partial: bool) -> bool:
    """Whether gradients are added up in their leaves, as torch does in an ordinary backward."""
    return request.derived is None and not request.partial and not partial


def differentiate(
    leaves: Sequence[Tensor],
    partial: bool,
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    request: BackwardRequest,
    earlier: Mapping[int, Tensor],
) -> list[Tensor | None]:
    """The gradients of the leaves that are asked for, None for the others and for what was not
    reached.

    Args:
        leaves: What gradients may be asked for.
        partial: Whether there are leaves besides, which are never asked for.
        outputs: What is differentiated.
        grads: Its gradients.
        request: The driver's.
        earlier: Gradients of leaves, by number, that these are added to; they are written to.
    """
    if request.derived is not None:
        for grad in grads:
            grad.requires_grad_()
    create = request.derived is not None
    if request.inner:
        with torch.inference_mode(False), torch.set_grad_enabled(create):
            return [*_run_backward(outputs, grads, request.keep, create, leaves)]
    wanted = [leaf for leaf, needed in zip(leaves, request.needed, strict=True) if needed]
    if not wanted:
        return [None] * len(leaves)
    with torch.inference_mode(False), torch.set_grad_enabled(create):
        found: Iterator[Tensor | None]
        if not plainly(request, partial):
            found = iter(_run_backward(outputs, grads, request.keep, create, wanted))
            row = [next(found) if needed else None for needed in request.needed]
            return [_sum(earlier.get(at), grad) for at, grad in enumerate(row)]
        # Reentrant checkpoints inside the module work under backward() only, and refuse
        # autograd.grad().
        try:
            for at, grad in earlier.items():
                leaves[at].grad = grad
            _run_backward(outputs, grads, request.keep)
        except BaseException:
            for leaf in leaves:
                leaf.grad = None  # what a pass that failed had added so far
            raise
        found = iter([leaf.grad for leaf in wanted])
        for leaf in wanted:
            leaf.grad = None
    return [next(found) if needed else None for needed in request.needed]


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """What torch makes of a gradient and another one that comes later."""
    if one is None or other is None:
        return other if one is None else one
    return one.add_(other) if one.layout is torch.strided else one + other


def narrowed(found: Sequence[Tensor | None], dtype: torch.dtype, count: int) -> list[Tensor | None]:
    """The gradients, with the first ``count`` in another dtype where theirs is wider; those in
    float64 become float32 only.
    """
    wide = torch.float64 if dtype is torch.float32 else torch.float32
    return [
        grad.to(dtype)
        if grad is not None
        and at < count
        and type(grad) is Tensor
        and grad.layout is torch.strided
        and grad.dtype is wide
        else grad
        for at, grad in enumerate(found)
    ]


def _run_backward(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    keep: bool,
    create: bool = False,
    wanted: Sequence[Tensor] = (),
) -> Sequence[Tensor | None]:
    """`torch.autograd.grad` for what is wanted, else `torch.autograd.backward`.

    Both check shapes by means of sympy: a new replica would spend a third of a second to import its
    480 modules. Where everything matches, which the driver saw to, there is nothing to check.
    """
    if all(map(_matches, outputs, grads)):
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
    """The ids of the leaves that outputs depend on."""
    found = {id(t) for t in outputs}
    nodes = [t.grad_fn for t in outputs if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        found.add(id(getattr(node, "variable", None)))
        fresh = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= fresh
        nodes.extend(fresh)
    return found


def output_graph(outputs: Sequence[Tensor]) -> OutputGraph | None:
    """Which outputs were computed from others of them; None if none was.

    Only the part of the graph that was made after the first of them is looked through, and each
    part of it about once.
    """
    places: dict[tuple[Any, int], int] = {}
    leaves = []
    for k, tensor in enumerate(outputs):
        if tensor.requires_grad:
            edge = get_gradient_edge(tensor)
            places.setdefault((edge.node, edge.output_nr), k)
            if tensor.is_leaf:
                leaves.append(k)
    if len(places) < 2:
        return None
    numbers = {k: -1 if k in leaves else node._sequence_nr() for (node, _), k in places.items()}
    first = min(numbers.values())
    depends: dict[int, tuple[int, ...]] = {}
    for (node, _), k in places.items():
        if found := _nearest(node, places, first):
            depends[k] = tuple(sorted(found))
    if not depends:
        return None
    retained = [k for k, tensor in enumerate(outputs) if tensor.retains_grad]
    return OutputGraph(depends, (*sorted(numbers, key=numbers.__getitem__),), (*retained,))


def _nearest(node: Any, places: Mapping[tuple[Any, int], int], first: int) -> set[int]:
    """The places that a node leads to, but not by way of others.

    Args:
        node: The node.
        places: The numbers of places: nodes, with the numbers of their results.
        first: The sequence number of the first place's node: older ones lead to none.
    """
    found: set[int] = set()
    left, seen = [node], {node}
    while left:
        for following, at in left.pop().next_functions:
            if (following, at) in places:
                found.add(places[following, at])
            elif following is not None and following not in seen:
                seen.add(following)
                if following._sequence_nr() >= first:
                    left.append(following)
    return found


@contextlib.contextmanager
def replacing(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let some outputs, from which others were computed, have these gradients in the block, and not
    the sums with those that come from the others: a hook in the driver changed them.

    Args:
        pairs: The outputs, each with its gradient.
    """
    handles = []
    for output, grad in pairs:
        handles.append(output.register_hook(functools.partial(_replaced, grad)))
        hooks: Any = output._backward_hooks
        # Before hooks of the module. Torch calls them in the order of a plain dict, which
        # `move_to_end` does not change.
        *own, added = hooks.items()
        hooks.clear()
        hooks.update([added, *own])
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replaced(grad: Tensor, _sum: Tensor | None) -> Tensor:
    return grad


@contextlib.contextmanager
def noting(outputs: Sequence[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Note the gradients of some outputs in the block, by their order, as ``retain_grad`` does."""
    noted: dict[int, Tensor] = {}
    handles = [
        output.register_hook(functools.partial(_note, noted, at))
        for at, output in enumerate(outputs)
    ]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


def _note(noted: dict[int, Tensor], at: int, grad: Tensor | None) -> None:
    if grad is not None:
        noted[at] = grad.detach()


T = TypeVar("T")


class KeptGraphs(dict[int, T]):
    """The graphs by key, and the work of the next pause. Without a pause, as where Ray carries the
    calls, it stays undone.

    Attributes:
        spent: The graphs to free in the pause: the driver's nodes of them are gone.
        ahead: The model of which to look in the pause whether it is to be restored; None for none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spent: set[int] = set()
        self.ahead: ReplicaModule | None = None

    def forget(self, keys: Collection[int], models: Collection[int]) -> None:
        """Free some graphs now, and note that some models are gone."""
        for key in keys:
            self.pop(key, None)
        self.spent.difference_update(keys)
        if models:
            self.ahead = None

    def use_pause(self) -> None:
        """Do the work."""
        module, self.ahead = self.ahead, None
        while self.spent:
            self.pop(self.spent.pop(), None)
        if module is not None:
            module.built.look_ahead()
