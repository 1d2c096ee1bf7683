"""Gradients that stay in the replicas, as the driver knows them.

A parameter's gradient is the sum, in the order of chunks, of what each chunk has kept since the
program has cleared it. All that one chunk keeps lies in one replica. See [Note: deaths] in
`driver.resident`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.driver.dispatcher import Call, Dispatcher, Flight, RemoteGraph
from raydp_parallel.driver.remote_grad import Fetch, RemoteGrad, Stand
from raydp_parallel.errors import GraphLost, StateChanged
from raydp_parallel.state.lagging import PLAINLY
from raydp_parallel.state.mirror import Leaf, Master
from raydp_parallel.wire.messages import GradientsRequest


@dataclass(eq=False)
class Sum:
    """A parameter's gradient."""

    parameter: Tensor
    tag: int  # its number in the replicas
    chunks: set[int] = field(default_factory=set)  # that have kept some of it
    last: Callable[[], Stand | None] = lambda: None  # gives what was last put in ``.grad`` for it
    scale: Tensor | None = None  # its factor where it is used, after a clipping
    missed: bool = False  # some of it went with a replica, and cannot be made again

    @property
    def stand(self) -> Stand | None:
        """Contents of ``.grad`` for it; None if there is something else."""
        grad, last = self.parameter.grad, self.last()
        return last if isinstance(grad, RemoteGrad) and grad.stand is last else None


class Kept(RemoteGraph):
    """Gradients that a chunk has kept. As a graph, they are made again where it goes on: by the
    backwards that did it, unless a step has changed the weights. It may be a part of the sums.
    """

    def __init__(self, chunk: int, sums: Mapping[int, Sum]) -> None:
        super().__init__(chunk)
        self.recipe, self._sums, self._coming = [], sums, 0

    def remade_by(self, slot: ReplicaSlot, phase: str) -> list[Call]:
        """Return these backwards."""
        if self.recipe is None:  # it is missed where it is used, and not where it is cleared
            for one in self._sums.values():
                one.missed = one.missed or self.key in one.chunks
                one.chunks.discard(self.key)
            self.recipe = []
        return self.recipe

    def move(self, slot: ReplicaSlot | None) -> None:
        """Note where a backward adds to it: nothing, if it fails, until all chunks' are noted."""
        self.life, self._coming = -1, 0 if slot is None else slot.life

    def note(self, trip: Call, sums: Iterable[Sum]) -> None:
        """Note to which sums a chunk's backward has added, and in which life of the slot; it makes
        that again.
        """
        if self.recipe is not None:
            self.recipe.append(trip)
        for one in sums:
            one.chunks.add(self.key)
        self.life = self._coming


class Gradients:
    """The gradients of one model's parameters that replicas train. ``bring`` fetches what stands in
    ``.grad``.
    """

    def __init__(self, dispatcher: Dispatcher, master: Master, bring: Fetch) -> None:
        self._dispatcher, self._master, self._bring = dispatcher, master, bring
        # By the parameter's id: one that leaves takes its own along.
        self.sums: dict[int, Sum] = {}
        self._kept: dict[int, Kept] = {}  # by chunk
        self.begun = 0  # backwards, each of which may change what chunks have kept

    # In a backward.

    def begin_backward(self, leaves: Mapping[int, Leaf]) -> dict[int, Sum]:
        """Begin a backward, and return which of some leaves' gradients it leaves in the replicas.
        Those that the program has cleared begin anew.
        """
        self.begun += 1
        anew = []
        for tag, p in self._master.trained.items():
            one = self.sums[id(p)] = self.sums.get(id(p)) or Sum(p, tag)
            if (stand := one.stand) is None or stand.zeroed:
                anew.append(one)
        # The program, or an exception's traceback, may still have what stood for the last ones.
        with contextlib.suppress(GraphLost, StateChanged):
            self.fetch(anew)
        for one in anew:
            one.chunks, one.scale, one.missed = set(), None, False
        used = set[int]().union(*[one.chunks for one in self.sums.values()])
        self._kept = {chunk: kept for chunk, kept in self._kept.items() if chunk in used}
        return {
            at: self.sums[id(leaf)]
            for at, (leaf, kind) in leaves.items()
            if kind == "parameter" and PLAINLY(self._keeps, (), (leaf,))
        }

    def _keeps(self, parameter: Tensor) -> bool:
        """Tell if a parameter's gradient may stay in the replicas: nothing here looks at it."""
        one = self.sums.get(id(parameter))
        if one is None or not parameter.requires_grad or parameter.dtype.is_complex:  # as in gloo
            return False
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return False
        stand = one.stand
        if stand is None:
            return parameter.grad is None
        return stand.zeroed or (not stand.touched and one.scale is None)

    def of(self, chunk: int) -> Kept:
        """Return what a chunk has kept so far, which its next backward adds to."""
        return self._kept.setdefault(chunk, Kept(chunk, self.sums))

    def stand_in(self, one: Sum) -> None:
        """Let ``.grad`` stand for what is kept."""
        grad = one.parameter.grad
        if isinstance(grad, RemoteGrad):
            stand = grad.stand  # from now on for what the replicas keep
            stand.known, stand.touched, stand.zeroed = None, False, False
        else:
            one.parameter.grad = made = RemoteGrad(one.parameter, self._bring)
            one.last = weakref.ref(made.stand)

    # Where they are used.

    def fetch(self, sums: Collection[Sum]) -> None:
        """Bring gradients to the driver for which something stands."""
        wanted: dict[int, Stand] = {}
        for one in sums:
            stand = one.last()
            if stand is not None and stand.known is None and not stand.zeroed:
                wanted[one.tag] = stand
        for tag, value in self.total([one for one in sums if one.tag in wanted]).items():
            wanted[tag].known = value

    def total(self, sums: Sequence[Sum]) -> dict[int, Tensor]:
        """Return gradients, by tag, each summed in the order of chunks."""
        self.refuse_missed(sums)
        found: dict[int, Tensor] = {}
        dispatcher = self._dispatcher
        for chunk in sorted(set[int]().union(*[one.chunks for one in sums])):
            wanted = [one for one in sums if chunk in one.chunks]
            kept, tags = self._kept[chunk], tuple([one.tag for one in wanted])
            assert kept.slot is not None
            request = GradientsRequest(self._master.number, tags, chunk)
            call = Call(kept.slot, "step", request, self._master, [kept])
            flight = dispatcher.start(Flight([call]))
            answers = dispatcher.finish(flight)
            self.refuse_missed(sums)  # the replica that had them may just have died
            dispatcher.effects(flight, answers)
            for one, grad in zip(wanted, answers[0].rows[0], strict=True):
                total = found.get(one.tag)
                found[one.tag] = grad.clone() if total is None else total.add_(grad)
        for one in sums:
            if one.tag not in found:
                p = one.parameter
                found[one.tag] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            if one.scale is not None:
                found[one.tag].mul_(one.scale)
        return found

    def refuse_missed(self, sums: Sequence[Sum]) -> None:
        """Raise an error for gradients that cannot be made again."""
        if any([one.missed for one in sums]):
            raise GraphLost(
                "gradients of before the last step went with their replica, or with a backward "
                "that failed: call zero_grad() after each step, or use them before the next"
            )

    def chunks(self, sums: Sequence[Sum], members: Sequence[ReplicaSlot]) -> list[int]:
        """Return the chunks that have kept gradients, if members can sum these among themselves."""
        self.refuse_missed(sums)
        having = {(frozenset(one.chunks), one.scale) for one in sums}
        if len(having) != 1:  # or some were clipped, and others were not
            return []
        chunks = sorted(sums[0].chunks)
        for chunk in chunks:
            at = chunk if len(members) > 1 else 0
            if at >= len(members) or not self._kept[chunk].on(members[at]):
                return []
        return chunks

    def forget_recipes(self) -> None:
        """Note that weights have changed, with which nothing can be made again."""
        for kept in self._kept.values():
            kept.recipe = None

    def fetch_departing(self, tags: Collection[int]) -> None:
        """Bring what only replicas have of parameters that leave."""
        left = [one for one in self.sums.values() if one.tag in tags]
        # One that is lost is missed where it is used.
        with contextlib.suppress(GraphLost, StateChanged):
            self.fetch([one for one in left if not one.missed])
        for one in left:
            del self.sums[id(one.parameter)]

    def clear(self) -> None:
        """Forget all: the replicas that had it are gone."""
        for one in self.sums.values():
            if isinstance(one.parameter.grad, RemoteGrad):
                one.parameter.grad = None
        self.sums.clear()
