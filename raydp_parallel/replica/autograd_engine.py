"""Torch's engine, as a replica runs it for its driver, and the graphs that the replica keeps.

While the driver gathers, sums or steps, a replica on a machine with a core to spare has nothing to
do. It frees the graphs that nothing can ask for any more, which takes a quarter of a millisecond
for a GPT-2 of six layers, and looks whether the last forward left attributes to restore. Where the
next call comes at once, nothing is lost: it would have begun with the same work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

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
    if request.inner:
        create = request.derived is not None
        with torch.inference_mode(False), torch.set_grad_enabled(create):
            with catching(leaves) as caught:
                _run_backward(outputs, grads, request.keep, create, leaves)
            return [*map(caught.get, range(len(leaves)))]
    wanted = [leaf for leaf, needed in zip(leaves, request.needed, strict=True) if needed]
    if not wanted:
        return [None] * len(leaves)
    create = request.derived is not None
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
    """Which outputs were computed from others of them; None if none was, and none keeps its
    gradient.

    Only the part of the graph that was made after the first of them is looked through.
    """
    places: dict[tuple[Any, int], int] = {}
    for k, tensor in enumerate(outputs):
        if tensor.grad_fn is not None:
            places.setdefault((tensor.grad_fn, tensor.output_nr), k)
    retained = tuple([k for k, tensor in enumerate(outputs) if tensor.retains_grad])
    depends: dict[int, tuple[int, ...]] = {}
    if len(places) > 1:
        order = sorted(places, key=lambda place: place[0]._sequence_nr())
        first = order[0][0]._sequence_nr()
        below: dict[Any, set[int]] = {}
        for node, at in order:
            if node not in below:
                below[node] = _places_below(node, places, below, first)
            if found := below[node]:
                depends[places[node, at]] = tuple(sorted(found))
    return OutputGraph(depends, retained) if depends or retained else None


def _places_below(
    node: Any, places: Mapping[tuple[Any, int], int], below: Mapping[Any, set[int]], first: int
) -> set[int]:
    """The places that a node leads to, by way of nodes that are not older than the first place's.

    Args:
        node: The node.
        places: The numbers of places: nodes, with the numbers of their results.
        below: What older nodes lead to.
        first: The sequence number of the first place's node.
    """
    found: set[int] = set()
    left, seen = [node], {node}
    while left:
        for following, at in left.pop().next_functions:
            if (following, at) in places:
                found.add(places[following, at])
            if following is None or following in seen:
                continue
            seen.add(following)
            if following in below:
                found |= below[following]
            elif following._sequence_nr() >= first:
                left.append(following)
    return found


@contextlib.contextmanager
def replacing(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Let some outputs, from which others were computed, have these gradients in the block, and not
    the sums with those that come from the others.

    Args:
        pairs: The outputs, each with its gradient.
    """
    with contextlib.ExitStack() as stack:
        for output, grad in pairs:
            stack.enter_context(_before_hooks(output, functools.partial(_replaced, grad)))
        yield


def _replaced(grad: Tensor, _sum: Tensor) -> Tensor:
    return grad


@contextlib.contextmanager
def catching(outputs: Sequence[Tensor]) -> Iterator[dict[int, Tensor]]:
    """Catch the gradients that come to some outputs in the block, by number, so that nothing goes
    on from there, also to another one of them. Their own hooks are not called.
    """
    caught: dict[int, Tensor] = {}
    with contextlib.ExitStack() as stack:
        for number, output in enumerate(outputs):
            hook = functools.partial(_caught, caught, number)
            stack.enter_context(_before_hooks(output, hook, alone=True))
        yield caught


def _caught(caught: dict[int, Tensor], number: int, grad: Tensor) -> Tensor:
    caught[number] = grad
    return torch.zeros_like(grad)


@contextlib.contextmanager
def _before_hooks(
    output: Tensor, hook: Callable[[Tensor], Tensor], alone: bool = False
) -> Iterator[None]:
    """Give a tensor a hook, in the block, before its own ones, or in their place."""
    output.register_hook(hook)
    hooks: Any = output._backward_hooks
    *own, added = hooks.items()
    # Torch calls them in the order of a plain dict, which `move_to_end` does not change.
    hooks.clear()
    hooks.update([added] if alone else [added, *own])
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(own)


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
