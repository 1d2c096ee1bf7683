"""How a graph is made again after its replica died: by the same forward, on another replica, with
the state of that time.

A recipe keeps what the call was made with: its message, the tensors of its arguments with their
versions, and a mark of the module's state. Made again, the forward writes nothing back, and warns
and counts nothing. If the module or the arguments have changed since, by anything but the
executor's own write-backs, it is refused: a silently different graph would be worse than an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel.cluster.replica_slots import GraphRecipe, RemoteGraph, ReplicaSlot
from raydp_parallel.errors import StateChanged
from raydp_parallel.state.tracker import Mark, ModuleTracker
from raydp_parallel.state.versions import versions
from raydp_parallel.transport import codec
from raydp_parallel.transport.links import INLINE_LIMIT, Attachments
from raydp_parallel.transport.messages import (
    BackwardRequest,
    ForwardRequest,
    Overlay,
    Parcel,
    StateUpdate,
    StoredObject,
)


class KeptForward(NamedTuple):
    """Tensors that a message was made with, to be sent again as they are.

    Attributes:
        parcel: The parcel, without its packet if that takes much memory.
        tensors: Its tensors.
        versions: Their versions then.
        name: What they are, for errors.
        refs: The references to objects of Ray's that the message has.
    """

    parcel: Parcel
    tensors: list[Tensor]
    versions: list[int]
    name: str
    refs: Sequence[Any] = ()

    def again(self, attachments: Attachments) -> Parcel:
        """The parcel for another message."""
        if versions(self.tensors) != self.versions:
            raise _changed(f"{self.name} were written to")
        return codec.encode_again(self.parcel, self.tensors, attachments)

    def copy_before(self, written: Sequence[Tensor]) -> None:
        """Keep copies of what lies in the memory of tensors that the forward itself wrote to, and
        that are written to next.
        """
        memory = {tensor.untyped_storage().data_ptr() for tensor in written}
        for number, tensor in enumerate(self.tensors):
            if tensor.layout is not torch.strided or versions([tensor]) != [self.versions[number]]:
                continue
            if tensor.untyped_storage().data_ptr() in memory:
                self.tensors[number] = tensor.clone()
                self.versions[number] = versions([self.tensors[number]])[0]


def keep(parcel: Parcel, tensors: Sequence[Tensor], name: str, copied: bool = False) -> KeptForward:
    """Keep what a message was made with: the tensors' memory and versions, but not the graphs that
    they belong to; or copies, if it is kept for so long that a program fills the memory anew.
    """
    bare = parcel._replace(packet=None) if _takes_memory(parcel) else parcel
    found = [t.detach().clone() if copied else t.detach() for t in tensors]
    return KeptForward(bare, found, versions(found), name)


def forward(
    request: ForwardRequest,
    inputs: KeptForward,
    tracker: ModuleTracker,
    home: ReplicaSlot,
    marks: tuple[Mark, Mark],
    gathered: Sequence[Tensor] = (),
) -> GraphRecipe:
    """The recipe of a forward's graph.

    Args:
        request: The message.
        inputs: What it carried.
        tracker: The module.
        home: The slot that the call was for.
        marks: The module's state before the call, and after its write-back.
        gathered: What the chunks of the call had gathered, if they exchanged something.
    """
    if request.update is not None or request.overlay is not None or _takes_memory(request.inputs):
        request = request._replace(update=None, overlay=None, inputs=inputs.parcel)

    # Gradients that stay in replicas refer to recipes, and parameters to gradients, which Python's
    # collector does not see.
    found = weakref.ref(tracker)

    def prepare(slot: ReplicaSlot, attachments: Attachments) -> ForwardRequest:
        tracker = found()
        if tracker is None:
            raise _changed("the model's wrapper was deleted")
        with tracker.before_rebinding():
            return again(tracker, slot, attachments)

    def again(
        tracker: ModuleTracker, slot: ReplicaSlot, attachments: Attachments
    ) -> ForwardRequest:
        changed = tracker.changed_since(marks[0])
        if changed is not None:
            raise _changed(f"{changed} was changed")
        parcel = inputs.again(attachments)
        # The replica's state is what its last forward left. Write-backs after this forward's own
        # came from later calls, and are undone.
        undone = bool(marks[1].overwritten())
        then = overlay(marks[0], attachments, undone=undone)
        tracker.sync()
        name = slot.name_of(tracker.id, home)
        training = tracker.training
        news = None if training is None else training.news(slot, name, attachments)
        state = update(tracker, slot, name, attachments)
        played = None
        if request.part is not None:
            played, _ = codec.encode(tuple(gathered), attachments, "state")
        return request._replace(
            model=name,
            update=state,
            training=news,
            inputs=parcel,
            stored=tuple([attachments.place(StoredObject(ref)) for ref in inputs.refs]),
            write_back=False,
            doubtful=(),
            forget=slot.contents.forget(),
            overlay=then,
            graph_only=True,
            relay=None,
            played=played,
        )

    return GraphRecipe("forward", prepare)


def derived(
    request: BackwardRequest,
    grads: KeptForward,
    parents: Sequence[tuple[RemoteGraph, GraphRecipe]],
    home: ReplicaSlot,
    model: int,
) -> GraphRecipe:
    """The recipe of a graph that a backward under ``create_graph`` made.

    Args:
        request: The message.
        grads: What it carried.
        parents: The graphs that were differentiated, with how they were made.
        home: The slot that the call was for.
        model: The model's id.
    """
    plain = request._replace(
        grads=grads.parcel, bumped=(), write_back=False, keep=True, forget=None
    )

    def prepare(slot: ReplicaSlot, attachments: Attachments) -> BackwardRequest:
        name = slot.name_of(model, home)
        return plain._replace(
            model=name, grads=grads.again(attachments), forget=slot.contents.forget()
        )

    return GraphRecipe("backward", prepare, parents)


def update(
    tracker: ModuleTracker,
    slot: ReplicaSlot,
    name: int,
    attachments: Attachments,
    note: Callable[[int], None] | None = None,
) -> StateUpdate | None:
    """What a slot's replica needs to hold the master's state; None if it holds it already.

    Args:
        tracker: The module.
        slot: The slot.
        name: What the model is called there.
        attachments: Where the contents go.
        note: Called with the number of bytes that are sent, if there is an update.
    """
    found = tracker.update_from(slot.contents.held.get(name, 0))
    slot.contents.held[name] = tracker.revision
    if found is None:
        return None
    if note is not None:
        note(found.sent)
    return found.placed(attachments)


def overlay(mark: Mark, attachments: Attachments, undone: bool = False) -> Overlay | None:
    """The state that write-backs have changed since a mark, as it was at the mark."""
    found = sorted(mark.overwritten().items())
    if not found:
        return None
    parcel, _ = codec.encode(tuple(tensor for _, tensor in found), attachments, "state")
    return Overlay(tuple(slot for slot, _ in found), parcel, undone)


def _takes_memory(parcel: Parcel) -> bool:
    """Whether a parcel holds many bytes itself, and not only the number of an attachment."""
    return type(parcel.packet) is not int and len(parcel.packet) > INLINE_LIMIT


def _changed(what: str) -> StateChanged:
    return StateChanged(
        "backward: the replica that held the graph died, and the graph cannot be made "
        f"again, because {what} since the forward; run forward again"
    )
