"""A record of each tensor, and the contents of tensors as they were last sent, in one run.

Changed contents are copied there once, however many replicas there are: those of this machine map
the run, or copy it from there to their GPU. Later contents are compared with it, too.

[Note: who reads a run]
Replicas read it when they take an update over, which is before their answer. So it may be written
to again once all answers are there: see `Executor.update`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel.devices import memory
from raydp_parallel.devices.layout import ALIGN, Layout, is_dense, specs_of
from raydp_parallel.wire.messages import RunSpec
from raydp_parallel.wire.windows import Window

SMALL = 1 << 16
"""Bytes below which tensors are compared by a copy of them all. Larger ones of a CPU module lie in
a window: smaller ones are copied as fast.
"""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Range = tuple[int, int]

Seen = tuple[int, int, tuple[object, ...]]
"""A tensor's version, address and geometry."""


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version of each tensor; 0 for inference tensors, which have none."""
    row = [*tensors]
    try:
        return [t._version for t in row]
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in row]


def set_versions(tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Set how often tensors were written to, as torch's check of saved tensors counts it."""
    pairs = [p for p in zip(tensors, versions, strict=True) if not p[0].is_inference()]
    if pairs:
        torch._C._autograd._unsafe_set_version_counter(*zip(*pairs, strict=True))


def seen(tensors: Iterable[Tensor]) -> list[Seen]:
    """Look at tensors, but for their contents."""
    found: list[Seen] = []
    for t in tensors:  # a function for each would take as long again
        try:
            form = t.dtype, t.shape, t.stride(), t.requires_grad, t.device, t.is_conj()
            found.append((t._version, t.data_ptr(), form))
        except RuntimeError:  # an inference tensor, or a layout without a storage of its own
            strided = t.layout is torch.strided and not t.is_nested
            shape = (t.shape, t.stride()) if strided else t.layout
            address = t.data_ptr() if strided else 0
            odd = t.dtype, shape, None, t.requires_grad, t.device
            found.append((versions_of([t])[0], address, odd))
    return found


def is_plain(t: Tensor) -> bool:
    """Tell if the bytes of a tensor's memory are its contents."""
    kind = type(t)
    plain = (kind is Tensor or kind is nn.Parameter) and t.layout is torch.strided
    return plain and not (t.is_nested or t.is_quantized or t.is_conj() or t.is_neg())


def bits(t: Tensor) -> Tensor:
    """Show a tensor's bytes, of which NaNs equal themselves."""
    t = t.detach()
    if t.layout is not torch.strided or t.is_nested or t.is_quantized or type(t) is not Tensor:
        file = io.BytesIO()
        torch.save(t, file)
        return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    if t.is_conj() or t.is_neg():
        t = t.resolve_conj().resolve_neg()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_BITS[t.element_size()])


def same(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors to the bit."""
    one, other = bits(one), bits(other)
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


class Place(NamedTuple):
    """Where a large tensor lies, for replicas that map it."""

    key: int  # the window's number
    offset: int
    window: Window


@dataclass(slots=True, eq=False)
class Tracked:
    """All that is known of one tensor. It holds the tensor, so that the id stays this one's."""

    slot: int  # its number in the replicas
    tensor: Tensor
    kind: str = ""  # "parameter", "buffer", or "attribute" for others
    seen: Seen | None = None  # at the last look; None if it is new
    spec_at: int = 0  # the revision since which it is as it is, but for contents
    content_at: int = 0  # the revision since which it has its contents
    place: Place | None = None
    stays: bool = False  # where it is: no window may hold it
    plain: bool = False  # a run may hold it
    trained: bool = False  # replicas have one of their own
    shadow: Tensor | None = None  # its contents as they were sent, if no run has them
    written: int = 0  # by how much replicas' writes have moved its version

    @property
    def in_run(self) -> bool:
        """True if a run has its contents."""
        return self.plain and not self.trained

    def keep_copy(self) -> None:
        """Copy the contents, to compare those of the next forward with them."""
        t = self.tensor
        self.shadow = t.detach().clone() if is_plain(t) else bits(t).clone()

    def may_be_mapped(self) -> bool:
        """Tell if it is large, and nobody else looks at its memory."""
        t = self.tensor
        if self.place is not None or self.stays or type(t) is not nn.Parameter:
            return False
        if t.device.type != "cpu" or t.is_inference() or not is_plain(t) or not is_dense(t):
            return False
        if t.nbytes < SMALL or t.is_shared():  # with other processes
            return False
        # Memory that somebody else looks at stays where it is.
        return not memory.is_used(t) and t.untyped_storage().nbytes() == t.nbytes


def touch(records: Iterable[Tracked]) -> None:
    """Let the next look find other contents of some tensors."""
    for one in records:
        if one.seen is not None:
            one.seen = -1, one.seen[1], one.seen[2]


class StateRun:
    """Contents of plain tensors of one device.

    Args:
        key: The revision at which it is laid out.
        records: The tensors.
        before: The run in which replicas have contents already: the program may have changed the
            tensors since, which is still to be found.

    Attributes:
        records: The tensors, in the order of the layout.
        revision: The revision that it has the contents of.
        checked: The revision at which it was last seen to have the right tensors.
        spec: Its layout, as replicas are told.
        memory: Its bytes, on the tensors' device.
        views: The contents, by slot.
    """

    def __init__(self, key: int, records: Sequence[Tracked], before: StateRun | None) -> None:
        small = [one for one in records if one.tensor.nbytes < SMALL]
        self.records = [*small, *[one for one in records if one.tensor.nbytes >= SMALL]]
        self._small = len(small)
        tensors = [one.tensor for one in self.records]
        slots = tuple([one.slot for one in self.records])
        cuts = (0, len(small)), (len(small), len(slots))
        layout = Layout(specs_of(tensors), cuts=cuts)
        self._window: Window | None = None
        if tensors[0].device.type == "cpu":
            self._window = Window(layout.size)
            self.memory = self._window.memory[: layout.size]
        else:
            self.memory = torch.zeros(layout.size, dtype=torch.uint8, device=tensors[0].device)
        self.spec = RunSpec(key, slots, layout.specs, cuts)
        self.views = dict(zip(slots, layout.views(self.memory), strict=True))
        self._lies: dict[int, Range] = {}
        for one, begin in zip(self.records, layout.offsets, strict=True):
            self._lies[one.slot] = begin, begin + -(-one.tensor.nbytes // ALIGN) * ALIGN
        self._row = layout.rows[0][1]  # of the small ones, with which the run begins
        self._copy: tuple[Tensor, list[Tensor]] | None = None  # of these, and what shows them there
        self._late: list[Range] = []  # what the window of a GPU's run lacks
        self.revision = self.checked = key
        contents = {one.slot: one.tensor for one in self.records}
        if before is not None:
            for one in before.records:
                if one.slot in contents and one.content_at <= before.revision:
                    contents[one.slot] = before.views[one.slot]
        memory.copy_row([*self.views.values()], [*contents.values()])

    def fits(self, records: Sequence[Tracked]) -> bool:
        """Tell if tensors lie here in the same layout."""
        if {one.slot for one in records} != self.views.keys():
            return False
        return specs_of([one.tensor for one in self.records]) == [*self.spec.specs]

    def take(self, records: Sequence[Tracked], revision: int) -> None:
        """Take over the contents that changed until a revision."""
        views = [self.views[one.slot] for one in records]
        memory.copy_row(views, [one.tensor for one in records])
        self.revision = revision
        if self._window is not None and self.memory.device.type != "cpu":
            self._late += self.ranges([one.slot for one in records])

    def ranges(self, slots: Iterable[int]) -> list[Range]:
        """Return where the contents of some slots lie, those that adjoin as one."""
        found: list[Range] = []
        for begin, end in sorted([self._lies[n] for n in slots]):
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            if end > begin:
                found.append((begin, end))
        return found

    def window(self) -> Window:
        """Return the run in memory that replicas of this machine share, whose tensors may lie on a
        GPU.
        """
        if self._window is None:
            self._window = Window(self.memory.numel())
            self._late = [(0, self.memory.numel())]
        for begin, end in self._late:
            memory.copy_down(self.memory, self._window, begin, end)
        self._late = []
        return self._window

    def edited(self, since: int) -> list[Tracked]:
        """Return the tensors with other contents than the run has, among those whose contents were
        sent up to a revision.
        """
        found = [one for one in self.records[self._small :] if one.content_at <= since]
        rows = [(bits(one.tensor), bits(self.views[one.slot])) for one in found]
        small = self.records[: self._small]
        if all([one.content_at > since for one in small]):
            small = []
        else:
            if self._copy is None:
                copy = torch.zeros_like(self.memory[: self._row.size])
                self._copy = copy, self._row.views(copy)
            copy, now = self._copy
            memory.copy_row(now, [one.tensor for one in small])
            rows.append((copy.view(torch.int64), self.memory[: self._row.size].view(torch.int64)))
        alike = _alike(rows)
        if small and not alike[-1]:  # at once, as mostly they are
            found += small
            pairs = zip(now, small, strict=True)
            alike[-1:] = _alike([(bits(t), bits(self.views[one.slot])) for t, one in pairs])
        found = [one for one, same in zip(found, alike, strict=False) if not same]
        return [one for one in found if one.content_at <= since]


def _alike(rows: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Compare pairs of tensors of the same shape; the host waits for a GPU once."""
    if not rows or rows[0][0].device.type == "cpu":
        return [torch.equal(*row) for row in rows]
    unlike = torch.stack([(one != other).any() for one, other in rows])
    return [not one for one in unlike.tolist()]
