"""One backward with gradients summed without the driver: among the replicas, so that only the sum
reaches it; or by each replica of this machine for itself, for their optimizers.

[Note: sums of a group]
No gradient is lost: each member keeps its own until the reduction is over. If the sum did not
arrive (its root died, the group broke), the members that took part are asked for their gradients,
and the driver sums them as it does without a group.

[Note: sums in shared memory]
Where the driver would sum gradients only to send the sums back, it says where each chunk's lie, and
each replica adds them up (`replica.replica_training`). It has that memory mapped itself, so a death
loses none, and whatever uses ``.grad`` in the driver gets the sum that the driver makes then.
"""

from __future__ import annotations

import functools
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel.calls import gradients
from raydp_parallel.calls.executor import Executor
from raydp_parallel.calls.gradients import GradientShare, share
from raydp_parallel.calls.remote_gradients import (
    GradientSum,
    RemoteGradient,
    SharedGradients,
    Term,
)
from raydp_parallel.calls.replica_groups import GroupTicket
from raydp_parallel.cluster.replica_slots import ChunkAnswer, RemoteGraph, ReplicaSlot
from raydp_parallel.devices.ranges import TensorSpec
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport import codec, collective
from raydp_parallel.transport.group_messages import Reduce, SumOutcome
from raydp_parallel.transport.links import ForeignMemory, PassedOn, ReadAttachments
from raydp_parallel.transport.messages import Reply, SumRow

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
"""The dtypes that a group's backend sums as torch does."""


class ReductionPart(NamedTuple):
    """One chunk of a call that can be differentiated.

    Attributes:
        slot: The slot that it was for.
        graph: Its graph, wherever that is.
        tracker: The model it came from.
        mark: The versions of the model's tensors then.
        leaves: Which of the call's leaves its graph has, in the replica's order.
        first: Whether it is chunk 0: only its in-place changes reach the master.
        own: How many of the leaves, the first ones, are the model's.
        gradient_dtype: The dtype of their gradients on the way; None leaves it.
        holds: Whether their gradients stay in the replica until they are used.
    """

    slot: ReplicaSlot
    graph: RemoteGraph
    tracker: ModuleTracker
    mark: Any
    leaves: Sequence[int]
    first: bool
    own: int = 0
    gradient_dtype: torch.dtype | None = None
    holds: bool = False


class GroupReduction:
    """One reduction.

    Args:
        executor: The executor of the replicas.
        ticket: Their group.
        parts: The chunks.
        rows: Which of each chunk's leaves are summed.
        stays: The key under which all members keep the sum, for their optimizers; None if the
            driver gets it.
    """

    def __init__(
        self,
        executor: Executor,
        ticket: GroupTicket,
        parts: Sequence[ReductionPart],
        rows: Sequence[int],
        stays: int | None = None,
    ) -> None:
        self.stays = stays
        self._groups = executor.groups
        self._ticket = ticket
        self._parts = parts
        self._rows = rows
        self.kept = [RemoteGraph() for _ in parts]
        slots = [part.slot for part in parts]
        self._root = slots.index(self._groups.near(slots))
        self._told: dict[int, tuple[ReplicaSlot, int]] = {}
        self._fetching = self._broken = self._kept_sum = False

    def fields(self, number: int, slot: ReplicaSlot) -> dict[str, Any]:
        """The fields of the message for a chunk that concern the reduction; none if another replica
        than the group's member runs it.
        """
        if self._fetching:
            if not self._has_kept(number, slot):
                return {}
            return {"kept": self.kept[number].key, "write_back": False}
        if number in self._told or self._broken:
            return {}
        if slot is not self._parts[number].slot or not self._ticket.has(slot):
            self._broken = True
            self._groups.dissolve(self._ticket)  # members that were sent theirs would wait in vain
            return {}
        self._told[number] = slot, slot.incarnation
        groups, order = self._groups, tuple(self._ticket.rank(part.slot) for part in self._parts)
        overlap = self._parts[0].tracker.id not in groups.late
        request = Reduce(
            group=self._ticket.name,
            root=order[self._root],
            order=order,
            leaves=tuple(self._rows),
            kept=self.kept[number].key,
            patience=groups.patience,
            overlap=overlap,
            stays=self.stays,
        )
        return {"reduce": request}

    def fetches(self, number: int, slot: ReplicaSlot) -> bool:
        """Whether a chunk is only asked for what its member keeps."""
        return self._fetching and self._has_kept(number, slot)

    def _has_kept(self, number: int, slot: ReplicaSlot) -> bool:
        return slot.ready and self._told.get(number) == (slot, slot.incarnation)

    def abandon(self) -> None:
        """Dissolve the group: the call failed, and perhaps not all messages were sent."""
        self._groups.dissolve(self._ticket)

    def close(self) -> None:
        """End the reduction: members need not keep anything."""
        for graph in self.kept:
            graph.drop()
        if self.stays is not None and not self._kept_sum:
            for slot in self._slots():
                slot.drop_graph(self.stays, slot.incarnation)

    def take_answer(self, reply: Reply | None) -> None:
        """Take a member's answer, None if it died. If it did not do its part, the group is
        dissolved, because the others wait in vain.
        """
        reduced = reply.reduced if reply is not None else None
        if not self._fetching and (reduced is None or reduced.outcome is SumOutcome.FAILED):
            self._groups.dissolve(self._ticket, reduced.seconds if reduced is not None else 0.0)

    def missing(self, answers: Sequence[ChunkAnswer]) -> list[int]:
        """Look at the answers. Returns the chunks that have to be asked for the gradients that
        their members keep.
        """
        found = [answer.reply.reduced for answer in answers]
        if any(one is not None and one.outcome is SumOutcome.SPOILED for one in found):
            self._groups.late.add(self._parts[0].tracker.id)
        if self._summed(answers):
            return []
        self._fetching = True
        return [
            number
            for number, one in enumerate(found)
            if one is not None and one.outcome is not SumOutcome.FAILED
        ]

    def _summed(self, answers: Sequence[ChunkAnswer]) -> bool:
        if self.stays is not None:
            return all(map(_is_done, answers))
        root = answers[self._root].reply.reduced
        spoiled = any(
            a.reply.reduced is not None and a.reply.reduced.outcome is SumOutcome.SPOILED
            for a in answers
        )
        return root is not None and root.outcome is SumOutcome.DONE and not spoiled

    def shares(self, answers: Sequence[ChunkAnswer]) -> tuple[list[GradientShare], Counter[int]]:
        """What the driver sums: the replicas' sum first, then each chunk's other gradients.

        Returns:
            The shares, and for each of the call's leaves how many chunks' gradients are in the sum.
        """
        if self._fetching:
            pairs = zip(self._parts, answers, strict=True)
            return [share(answer, part.leaves) for part, answer in pairs], Counter()
        counts: Counter[int] = Counter()
        besides = []
        for part, answer in zip(self._parts, answers, strict=True):
            within = self._within(part, answer)
            counts.update(part.leaves[row] for row in within)
            left = [None if row in within else leaf for row, leaf in enumerate(part.leaves)]
            besides.append(share(answer, left))
        if self.stays is not None:
            return besides, counts
        first = answers[self._root]
        assert first.reply.reduced is not None
        own = [self._parts[self._root].leaves[row] for row in self._rows]
        sums = GradientShare(
            first.reply.reduced.sums,
            first.attachments,
            [leaf if counts[leaf] else None for leaf in own],
        )
        return [sums, *besides], counts

    def terms(
        self, counts: Mapping[int, int], fetch: Callable[[GradientSum], Sequence[Tensor]]
    ) -> dict[int, Term]:
        """What stands for the sums that the replicas keep, by the call's leaves.

        Args:
            counts: For each leaf how many chunks' gradients are in its sum.
            fetch: Fetches the sums.
        """
        if self.stays is None or self._fetching:
            return {}
        kept, self._kept_sum = GradientSum(self.stays, self._slots(), fetch), True
        own = [self._parts[0].leaves[row] for row in self._rows]
        return {leaf: Term(kept, at) for at, leaf in enumerate(own) if counts[leaf]}

    def _slots(self) -> list[ReplicaSlot]:
        return [part.slot for part in self._parts]

    def _within(self, part: ReductionPart, answer: ChunkAnswer) -> set[int]:
        """The rows with gradients that are in the sum. For a chunk that ran again after its replica
        died, they are those that the replica had given into it.
        """
        reduced = answer.reply.reduced
        if reduced is not None and reduced.outcome is SumOutcome.DONE:
            marks = zip(self._rows, reduced.marks, strict=True)
            return {row for row, mark in marks if mark == collective.SUMMED}
        parcel = answer.reply.value
        assert parcel is not None
        present = codec.load(parcel, range(len(parcel.specs)))
        return {
            row
            for row in self._rows
            if present[row] is not None and _plain(parcel.specs[present[row]])
        }


def plan(
    executor: Executor,
    parts: Sequence[ReductionPart],
    leaves: Sequence[Tensor],
    needed: Sequence[bool],
) -> GroupReduction | None:
    """Plan the sum of some chunks' gradients among their replicas, which have the graphs; None if
    the driver sums them.

    Args:
        executor: The executor of the replicas.
        parts: The chunks.
        leaves: The call's leaves.
        needed: Which of them are asked for.
    """
    first = parts[0]
    if first.gradient_dtype is not None:
        return None
    slots = [part.slot for part in parts]
    # This returns None for nearly all calls on one machine.
    if not executor.groups.wanted(slots, first.tracker.structure.size, None):
        return None
    if any(part.tracker is not first.tracker or part.own != first.own for part in parts):
        return None
    chosen = {row: leaves[first.leaves[row]] for row in range(first.own)}
    rows = [row for row, leaf in chosen.items() if needed[first.leaves[row]] and _sums(leaf)]
    own = [*first.leaves[: first.own]]
    if not rows or any([*part.leaves[: first.own]] != own for part in parts):
        return None
    size = sum(chosen[row].nbytes for row in rows)
    ticket = executor.groups.find(slots, size, executor.groups.kind(slots))
    if ticket is None:
        return None
    training = first.tracker.training
    stays = None
    if training is not None and training.keeps(slots, [chosen[row] for row in rows]):
        stays = RemoteGraph().key
    return GroupReduction(executor, ticket, parts, rows, stays)


def _is_done(answer: ChunkAnswer) -> bool:
    """Whether a member has given all its gradients into a sum that stays, and has the sum."""
    reduced = answer.reply.reduced
    done = reduced is not None and reduced.outcome is SumOutcome.DONE
    return done and reduced is not None and collective.APART not in reduced.marks


def _sums(leaf: Tensor) -> bool:
    return (
        leaf.layout is torch.strided
        and not leaf.is_nested
        and leaf.dtype in _DTYPES
        and leaf.numel() > 0
    )


def _plain(spec: TensorSpec) -> bool:
    """Whether a member gives such a gradient into the sum."""
    return spec.layout == "strided" and spec.cls is None


class SharedShares(NamedTuple):
    """The gradients of one backward.

    Attributes:
        terms: What stands for the gradients that stay, by the call's leaves.
        shares: What the driver sums.
        counts: For each leaf that stays, how many chunks have a gradient of it.
    """

    terms: dict[int, Term]
    shares: list[GradientShare]
    counts: dict[int, int]


_MOST = 4
"""Backwards of which every chunk's gradients stay in shared memory, where programs accumulate."""


def wants_shared(parts: Sequence[ReductionPart]) -> bool:
    """Whether gradients of a model's leaves are to stay where these chunks' replicas leave them."""
    first = parts[0]
    training = first.tracker.training
    return (
        training is not None
        and not _many(first.tracker.owned.tensors.values())
        and first.gradient_dtype is None
        and all(part.tracker is first.tracker and part.own == first.own for part in parts)
        and training.reads()
    )


def _many(parameters: Iterable[Tensor]) -> bool:
    """Whether the gradients of so many backwards lie in shared memory that the next are added up in
    this process.
    """
    grads = [parameter.grad for parameter in parameters]
    return any(type(g) is RemoteGradient and g.state.count >= _MOST for g in grads)


def keep_shared(
    parts: Sequence[ReductionPart],
    shares: Sequence[GradientShare],
    leaves: Sequence[Tensor],
) -> SharedShares | None:
    """Leave the gradients where they are; None if they do not lie where all replicas can read.

    Args:
        parts: The chunks.
        shares: Each chunk's gradients.
        leaves: The call's leaves.
    """
    training = parts[0].tracker.training
    packets = _passed_on(shares)
    if training is None or packets is None:
        return None
    trained = {id(p) for p in parts[0].tracker.owned.tensors.values()}
    found: dict[int, list[tuple[int, TensorSpec]]] = {}
    twice: set[int] = set()
    for chunk, one in enumerate(shares):
        present = gradients.rows_of(one)
        count = parts[chunk].own
        own = {*parts[chunk].leaves[:count]}
        twice.update(leaf for leaf in parts[chunk].leaves[count:] if leaf in own)
        for leaf, row in present:
            if leaf in own and id(leaves[leaf]) in trained:
                found.setdefault(leaf, []).append((chunk, one.parcel.specs[row]))
    rows: dict[int, SumRow] = {}
    for leaf, places in found.items():
        alike = _row(leaves[leaf], places)
        if alike is not None and leaf not in twice:
            rows[leaf] = alike
    if not rows:
        return None
    kept = [*rows]
    layout = _layout(tuple(rows.values()))
    sums = GradientSum(
        RemoteGraph().key,
        training.readers(),
        functools.partial(_total, shares, kept, leaves[kept[0]].device, len(leaves)),
        SharedGradients(layout, packets),
    )
    left = [
        one._replace(leaves=[None if leaf in rows else leaf for leaf in one.leaves])
        for one in shares
    ]
    counts = {leaf: len(row.places) for leaf, row in rows.items()}
    return SharedShares({leaf: Term(sums, at) for at, leaf in enumerate(kept)}, left, counts)


def _passed_on(shares: Sequence[GradientShare]) -> list[PassedOn] | None:
    """What lets other replicas read each chunk's gradients; None if one lies elsewhere, or its
    owner has just died.
    """
    found = []
    for one in shares:
        packet = one.attachments.find(one.parcel.packet)
        if not isinstance(packet, ForeignMemory) or packet.on_device:
            return None
        try:
            found.append(PassedOn(packet))
        except OSError:
            return None
    return found


def _row(leaf: Tensor, places: Sequence[tuple[int, TensorSpec]]) -> SumRow | None:
    """Where a gradient's summands lie; None if they are not plain, or not alike."""
    first = places[0][1]
    alike = all(
        spec.shape == first.shape
        and spec.stride == first.stride
        and spec.dtype == first.dtype
        and spec.layout == "strided"
        and spec.cls is None
        for _, spec in places
    )
    dtype = codec.DTYPES[first.dtype]
    if not alike or first.shape != tuple(leaf.shape) or dtype != leaf.dtype or not leaf.numel():
        return None
    spots = tuple([(chunk, spec.offset) for chunk, spec in places])
    return SumRow(first.dtype, tuple(first.shape), tuple(first.stride), leaf.numel(), spots)


@functools.lru_cache(maxsize=16)
def _layout(rows: tuple[SumRow, ...]) -> bytes:
    """The rows as bytes, the same object in each step."""
    return pickle.dumps([tuple(row) for row in rows], protocol=pickle.HIGHEST_PROTOCOL)


def _total(
    shares: Sequence[GradientShare],
    kept: Sequence[int],
    device: torch.device,
    count: int,
    _: GradientSum,
) -> list[Tensor]:
    """The sums, made in the driver."""
    read = [
        one._replace(attachments=ReadAttachments(one.attachments.link, one.attachments.beside))
        for one in shares
    ]
    sums = gradients.total(read, device, count)
    return [total for leaf in kept if (total := sums[leaf]) is not None]
