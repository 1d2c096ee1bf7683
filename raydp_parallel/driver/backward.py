"""A call's backward: one trip to all of its chunks that have gradients. Each class is one fate of
the parameters' gradients; those of other leaves always come to the driver.

  `Backward`          the driver sums them
  `SummedBackward`    the replicas sum them, by NCCL, and one sends the sums
  `KeptBackward`      they stay in the replicas, for the optimizer there
  `DerivedBackward`   they can be differentiated again: ``create_graph``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver import groups
from raydp_parallel.driver.autograd import CallNode, EnginePass, GraphHandle, Part, attach
from raydp_parallel.driver.dispatcher import Call, Dispatcher, Flight, RemoteGraph, copied
from raydp_parallel.driver.gradients import Sums
from raydp_parallel.driver.resident_gradients import Gradients, Kept, Sum
from raydp_parallel.state.lagging import PLAINLY
from raydp_parallel.state.mirror import Leaf
from raydp_parallel.state.run import versions_of
from raydp_parallel.wire.messages import (
    ADDED,
    KEPT,
    LEFT_OUT,
    SENT,
    SUMMED,
    Answer,
    BackwardRequest,
    Seat,
)

Outputs = list[tuple[RemoteGraph, list[tuple[int, Tensor]]]]
"""One chunk's graphs that have gradients, with these by the number of their output."""


def differentiate(
    call: CallNode, ending: EnginePass, needed: Set[int], captured: bool
) -> Sequence[Tensor | None]:
    """Return the gradients of a call's leaves.

    Args:
        call: The call.
        ending: The pass of torch's engine, with the gradients of outputs.
        needed: The leaves that get gradients.
        captured: True if the program gets some of these, and not ``.grad``.
    """
    higher, slots = torch.is_grad_enabled(), [part.slot for part in call.parts.values()]
    dispatcher = call.executor.dispatcher
    fates: dict[int | None, int] = dict.fromkeys(needed, SENT)
    with dispatcher.replica_set.lock:  # nobody else's call may come between
        with dispatcher.replica_set.calling():
            master, *more = {part.master for part in call.parts.values()}
            resident = None if higher or more or captured or not needed else master.resident
            kept: dict[int, Sum] = {}
            if resident is not None:
                resident.collect()
                kept = resident.gradients.begin_backward({at: call.leaves[at] for at in needed})
                fates.update(dict.fromkeys(kept, KEPT))
            layers = groups.of_layers(dispatcher, slots) if call.together else []
            if resident is not None and kept:
                return KeptBackward(call, ending, fates, layers, resident.gradients, kept).run()
            plain = Backward(call, ending, fates, layers)
            row = [at for at in needed if call.leaves[at].kind == "parameter"]
            seats = [] if higher else plain.seats_for_sums(row)
            if seats:
                fates.update(dict.fromkeys(row, SUMMED))
                return SummedBackward(call, ending, fates, layers or seats).run()
            if not higher:
                return plain.run()
        return DerivedBackward(call, ending, fates, layers).run()


@dataclass(eq=False)
class Backward:
    """The backward of a call's chunks that have gradients. The driver sums those of leaves."""

    call: CallNode
    ending: EnginePass
    fates: dict[int | None, int]  # what becomes of the gradients of leaves; others are left out
    seats: Sequence[Seat]  # of the chunks, if replicas exchange tensors meanwhile

    def __post_init__(self) -> None:
        call, stash = self.call, self.ending.grads
        self._master = next(iter(call.parts.values())).master
        # For each chunk its graphs that have gradients, with these by the number of their output.
        # Where layers exchange tensors, all take part, or none: replicas add zeros.
        self._outputs: dict[int, Outputs] = {}
        for i in call.parts:
            rows = [(c, row.get(i, {})) for c, row in stash.items() if call.together or i in row]
            if rows:
                self._outputs[i] = [(c.parts[i].graph, sorted(row.items())) for c, row in rows]

    def run(self) -> list[Tensor | None]:
        """Make the trip, and return the leaves' gradients."""
        call = self.call
        order = sorted(call.parts, key=lambda i: i not in self._outputs)
        adding = Sums(self._master, call.leaves, [call.parts[i].leaves for i in order])
        pairs = self._trip(adding)
        sums = adding.finish(call.unused)
        filled = {call.leaves[at].kind for at in sums}
        if any([any(answer.reached) for _, answer in pairs]):  # those stay in the replicas
            filled.add("parameter")
        return self._fill(sums, filled)

    def _fill(self, sums: Mapping[int, Tensor], filled: Set[str]) -> list[Tensor | None]:
        """Give unused parameters what upstream gives them (row B3).

        Args:
            sums: The gradients, by leaf.
            filled: The kinds of which some tensor has a gradient: a parameter gets zeros if another
                parameter has one, and a buffer if another buffer has one.
        """
        filled = filled & {"parameter", "buffer"} if self.call.unused == "zeros" else set()
        found = []
        for at, (leaf, kind) in enumerate(self.call.leaves):
            grad = sums.get(at)
            if grad is None and self.fates.get(at) in (SENT, SUMMED) and kind in filled:
                grad = PLAINLY(torch.zeros_like, (), (leaf,))  # fetches nothing
            found.append(grad)
        return found

    def _trip(self, taking: Sums | None = None) -> list[tuple[BackwardCall, Answer]]:
        """Make the trip. Gradients are taken as they come, if there is a place for them."""
        dispatcher, chunks = self.call.executor.dispatcher, self._chunks()
        flight = Flight(chunks, bool(self.seats), self.call.together, taking)
        answers = self._answers(dispatcher, flight)
        dispatcher.totals.backwards += 1
        dispatcher.effects(flight, answers)
        return [*zip(chunks, answers, strict=True)]

    def _answers(self, dispatcher: Dispatcher, flight: Flight) -> list[Answer]:
        """Send the chunks, and wait for their answers."""
        return dispatcher.finish(dispatcher.start(flight))  # [11] one trip

    def _chunks(self) -> list[BackwardCall]:
        """Make the chunks' calls."""
        call, context, create = self.call, ambient.capture(), torch.is_grad_enabled()
        threads, fates = call.executor.replica_set.threads(len(call.parts)), self.fates
        left_out = [leaf for at, (leaf, _) in enumerate(call.leaves) if at not in fates]
        # The graph of a derived call leads to more leaves than its own.
        partial = bool(call.parents) or any([leaf.requires_grad for leaf in left_out])
        retain = create or torch._C._autograd._get_current_graph_task_keep_graph()
        # The chunks of a model have the same mark.
        marks = {part.master: part.mark for part in call.parts.values()}
        moved = {master: master.moved_since(mark) for master, mark in marks.items()}
        chunks = []
        for i, given in self._outputs.items():
            part, seat = call.parts[i], self.seats[i] if self.seats else None
            try:
                # One object may stand here twice: both summands of ``a + b`` get the same gradient.
                row = [grad for _, found in given for _, grad in found]
                grads = [g.detach().requires_grad_(create and g.requires_grad) for g in row]
            except RuntimeError as error:
                ambient.refuse_batches(error)
                raise
            outputs = [(graph.key, tuple([k for k, _ in found])) for graph, found in given]
            request = BackwardRequest(
                # Without the forward's seed: replicas see if it is like the last one.
                part.terms._replace(context=context, threads=threads, group=seat, seed=0),
                graph=part.graph.key,
                outputs=tuple(outputs),
                grads=grads,
                needed=bytes([fates.get(at, LEFT_OUT) for at in part.leaves]),
                partial=partial,
                retain=retain or any([one.shared for one in self.ending.grads]),
                derived=None,
                moved=moved[part.master],
            )
            chunks.append(self._chunk(i, part, request))
        return chunks

    def _chunk(self, i: int, part: Part, request: BackwardRequest) -> BackwardCall:
        """Make a chunk's call."""
        return BackwardCall(part, self._outputs[i], request)

    def seats_for_sums(self, leaves: Sequence[int]) -> list[Seat]:
        """Return the seats by which replicas can sum gradients of parameters, if all of them do."""
        call, master, parts = self.call, self._master, [*self.call.parts.values()]
        everyone = 1 < len(parts) == len(self._outputs) and master.alike
        if not everyone or not all([p.graph.on(p.slot) and p.master is master for p in parts]):
            return []
        row, slots = [call.leaves[at].tensor for at in leaves], [part.slot for part in parts]
        return groups.direct(call.executor.dispatcher, slots, lambda: sum([t.nbytes for t in row]))


class SummedBackward(Backward):
    """A backward in which replicas sum the gradients of parameters, by NCCL."""

    def _answers(self, dispatcher: Dispatcher, flight: Flight) -> list[Answer]:
        """See to it that the root has the sums of all, or that each has its own gradients."""
        sums, flight.taking = flight.taking, None
        answers = super()._answers(dispatcher, flight)
        summed = [any(answer.reached) for answer in answers]
        if not any([answer.failure is not None for answer in answers]) and not all(summed):
            if not summed[self.seats[0].root] and dispatcher.groups:
                # Nobody died: chunks have gradients of different parameters.
                self._master.alike = False
            if any(summed):  # what some gave is lost, or made once more: all again, without a group
                for graph in [graph for chunk in flight.calls for graph in chunk.needs]:
                    graph.life = -1  # its replica may have freed it
                answers = super()._answers(dispatcher, Flight(flight.calls, attempt=1))
        assert sums is not None
        for at, answer in enumerate(answers):
            sums.take(at, answer)
        return answers


@dataclass(eq=False)
class KeptBackward(Backward):
    """A backward in which gradients of parameters stay in the replicas, for the optimizer there."""

    gradients: Gradients
    kept: dict[int, Sum]  # those that stay, by leaf

    def _chunk(self, i: int, part: Part, request: BackwardRequest) -> BackwardCall:
        more = {at for at, one in self.kept.items() if i in one.chunks}
        fates = zip(part.leaves, request.needed, strict=True)
        needed = bytes([ADDED if at in more else fate for at, fate in fates])
        chunk = super()._chunk(i, part, request._replace(needed=needed))
        if KEPT in request.needed:
            chunk.recipes = {graph: graph.recipe for graph in chunk.needs}
            chunk.makes = kept = self.gradients.of(i)  # it adds to that
            chunk.needs = [kept, *chunk.needs]
        return chunk

    def _trip(self, taking: Sums | None = None) -> list[tuple[BackwardCall, Answer]]:
        pairs = super()._trip(taking)
        for chunk, answer in pairs:
            if isinstance(chunk.makes, Kept):
                reached = zip(chunk.part.leaves, answer.reached, strict=True)
                added = [self.kept[at] for at, there in reached if there and at is not None]
                chunk.makes.note(chunk, added)
        return pairs

    def _fill(self, sums: Mapping[int, Tensor], filled: Set[str]) -> list[Tensor | None]:
        zeros = self.call.unused == "zeros" and "parameter" in filled
        for at, one in self.kept.items():
            # Of sparse ones the sum comes, and is added to what is kept.
            if one.chunks or (zeros and at not in sums):
                PLAINLY(self.gradients.stand_in, (), (one,))
        return super()._fill(sums, filled)


class DerivedBackward(Backward):
    """A backward whose gradients can be differentiated again: a call with graphs of its own."""

    def run(self) -> list[Tensor | None]:
        """Make the trip, and return outputs of the derived call."""
        call, parents = self.call, [*self.ending.grads]
        for one in parents:
            one.shared = True
        leaves: list[Leaf] = []
        derived = replace(call, leaves=leaves, parts={}, parents=parents, shared=True)
        self._graphs = {i: RemoteGraph(next(call.executor.keys)) for i in self._outputs}
        handle = GraphHandle([*self._graphs.values()], [*dict.fromkeys(self.ending.pinned)])
        rows: dict[int, list[Tensor]] = {}
        places: list[tuple[int, int, int]] = []
        with call.executor.replica_set.calling():  # and not what follows: outputs are the caller's
            for (i, given), (_, answer) in zip(self._outputs.items(), self._trip(), strict=True):
                part, row, begin = call.parts[i], rows.setdefault(i, []), len(leaves)
                leaves += [Leaf(grad, "input") for _, found in given for _, grad in found]
                own = range(begin, len(leaves))
                derived.parts[i] = part._replace(graph=self._graphs[i], leaves=own)
                found = [grad for grads in answer.rows for grad in grads]
                for leaf, grad in zip(part.leaves, found, strict=True):
                    if grad is not None and leaf is not None:
                        places.append((leaf, i, len(row)))
                        row.append(copied(grad.to(call.leaves[leaf].tensor.device)))
        attach(derived, handle, rows)
        sums: dict[int, Tensor] = {}
        for leaf, i, k in places:
            sums[leaf] = sums[leaf] + rows[i][k] if leaf in sums else rows[i][k]
        return self._fill(sums, {call.leaves[at].kind for at in sums})

    def _chunk(self, i: int, part: Part, request: BackwardRequest) -> BackwardCall:
        graph = self._graphs[i]
        chunk = super()._chunk(i, part, request._replace(derived=graph.key))
        chunk.makes = graph
        if not self.call.together:
            graph.recipe = [chunk]
        return chunk


class BackwardCall(Call):
    """One chunk's backward, from the outputs of these graphs that have gradients."""

    def __init__(self, part: Part, given: Outputs, request: BackwardRequest) -> None:
        super().__init__(part.slot, "backward", master=part.master, mark=part.mark)
        self.needs = [part.graph, *[graph for graph, _ in given if graph is not part.graph]]
        self.part, self._request = part, request
        self._versions = versions_of(request.grads)

    def request(self, slot: ReplicaSlot, attempt: int) -> BackwardRequest:
        """Return the request; after the first attempt the driver sums."""
        request = self._request
        if attempt and SUMMED in request.needed:
            terms, needed = request.terms, request.needed.replace(bytes([SUMMED]), bytes([SENT]))
            if terms.group is not None and not terms.group.layers:
                terms = terms._replace(group=None)
            request = request._replace(terms=terms, needed=needed)
        return request

    def changed(self) -> str | None:
        """Refuse to run again with other gradients."""
        same = versions_of(self._request.grads) == self._versions
        return None if same else "a gradient that it was given was changed"
