"""A record of each tensor, and the contents of tensors as they were last sent, in one run.

Changed contents are copied there once, however many replicas there are: those of this machine map
the run, or copy it from there to their GPU. Later contents are compared with it, too.

[Note: who reads a run]
Replicas read it when they take an update over, and until their answer. So it may be written to
again once all answers are there: see `Dispatcher.update`. A module that a replica makes meanwhile
gets what is written then with the next update.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydp_parallel.devices import memory
from raydp_parallel.devices.layout import Layout, part, specs_of
from raydp_parallel.wire import pickling
from raydp_parallel.wire.messages import RunSpec
from raydp_parallel.wire.windows import Window

SMALL = 1 << 16
"""Bytes below which tensors are compared by a copy of them all. Larger ones of a CPU module lie in
a window: smaller ones are copied as fast.
"""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Range = tuple[int, int]

Lies = tuple[object, ...]
"""A tensor's address, 0 if it has none, and its geometry."""

Seen = tuple[int, Lies, tuple[object, ...]]
"""A tensor's version, where and how it lies, and what else a replica is told of it."""


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
            lies: Lies = (t.data_ptr(), t.dtype, t.shape, t.stride())
            found.append((t._version, lies, (t.requires_grad, t.device, t.is_conj())))
        except RuntimeError:  # an inference tensor, or a layout without a storage of its own
            strided = t.layout is torch.strided and not t.is_nested
            form = (t.data_ptr(), t.shape, t.stride()) if strided else (0, t.layout)
            found.append((versions_of([t])[0], (*form, t.dtype), (t.requires_grad, t.device)))
    return found


def storage_of(t: Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    with contextlib.suppress(Exception):  # a sparse one, or one that is made of others
        return t.untyped_storage().data_ptr()
    return 0


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
        torch.save(t, file, pickling)
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


MappedHere = tuple[int, int, Window]
"""Where a large tensor lies, for replicas that map it: the window's number, the offset, and it."""


@dataclass(slots=True, eq=False)
class Tracked:
    """All that is known of one tensor. It holds the tensor, so that the id stays this one's."""

    tag: int  # its number in the replicas
    tensor: Tensor
    kind: str = ""  # "parameter" or "buffer" of a module, or "attribute" for others
    seen: Seen = (-1, (0,), ())  # at the last look
    spec_at: int = 0  # the revision since which it is as it is, but for contents
    content_at: int = 0  # the revision since which it has its contents
    mapped: MappedHere | None = None
    in_run: bool = False  # a run has its contents
    # In whose storage it lies, if replicas step that: its own, as they train it, or a parameter's,
    # of which an attribute may be a part, or spectral norm's weight all.
    leader: int | None = None
    shadow: Tensor | None = None  # its contents as they were sent, if no run has them
    late: Tensor | None = None  # its memory, while replicas have later contents
    # By how much writes have moved its version that graphs need not know of; and how often replicas
    # have written to it, which may move none.
    written: tuple[int, int] = 0, 0

    def keep_copy(self) -> None:
        """Copy the contents, to compare those of the next forward with them."""
        self.shadow = bits(self.tensor).clone()

    def may_be_mapped(self) -> bool:
        """Tell if it is large, and nobody else looks at its memory."""
        t = self.tensor
        if not self.in_run or self.mapped is not None or type(t) is not nn.Parameter:
            return False
        if t.device.type != "cpu" or t.nbytes < SMALL or t.is_inference():
            return False
        return not memory.is_used(t) and t.untyped_storage().nbytes() == t.nbytes


def touch(records: Iterable[Tracked]) -> None:
    """Let the next look find other contents of some tensors."""
    for one in records:
        one.seen = -1, one.seen[1], one.seen[2]


def _rank(one: Tracked) -> tuple[object, ...]:
    return one.tensor.nbytes >= SMALL, isinstance(one.tensor, nn.Parameter), str(one.tensor.dtype)


class StateRun:
    """Contents of plain tensors of one device, laid out at a revision, its key."""

    def __init__(self, key: int, records: Iterable[Tracked], device: torch.device) -> None:
        # In the order in which they lie: small ones, of which buffers come first, then large ones.
        self.records = sorted(records, key=_rank)
        tensors = [one.tensor for one in self.records]
        tags = tuple([one.tag for one in self.records])
        self._small = sum([t.nbytes < SMALL for t in tensors])
        layout = Layout(specs_of(tensors))
        self._window: Window | None = None
        if device.type == "cpu":
            self._window = Window(layout.size)
            self.memory = self._window.memory[: layout.size]
        else:
            self.memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.spec = RunSpec(key, tags, layout.specs)  # as replicas are told
        self.views = dict(zip(tags, layout.views(self.memory), strict=True))  # by tag
        self._lies = [*itertools.pairwise([*layout.offsets, layout.size])]
        row = part(layout, 0, self._small)
        flat = self.memory[: row.size].view(torch.int64)  # the small ones
        copy = torch.zeros_like(flat)  # of those of later, to compare
        self._smalls = flat, copy, row.views(copy.view(torch.uint8))
        self.revision = key  # that it has the contents of
        self._shown = 0  # the revision that a window beside a GPU's run has the contents of
        memory.copy_row([*self.views.values()], tensors)

    def fits(self, records: Iterable[Tracked], device: torch.device) -> bool:
        """Tell if tensors lie here in the same layout."""
        if {one.tag for one in records} != self.views.keys() or self.memory.device != device:
            return False
        return specs_of([one.tensor for one in self.records]) == [*self.spec.specs]

    def ranges(self, since: int) -> list[Range]:
        """Return where the contents lie that changed since a revision, those that adjoin as one."""
        found: list[Range] = []
        for one, (begin, end) in zip(self.records, self._lies, strict=True):
            if one.content_at > since and begin < end:
                if found and found[-1][1] == begin:
                    begin = found.pop()[0]
                found.append((begin, end))
        return found

    def window(self) -> Window:
        """Return the run in memory that replicas of this machine share, whose tensors may lie on a
        GPU.
        """
        if self._window is None:
            self._window = Window(self.memory.numel())
        if self.memory.device.type != "cpu" and self._shown < self.revision:
            for begin, end in self.ranges(self._shown):
                memory.copy_down(self.memory, self._window, begin, end)
            self._shown = self.revision
        return self._window

    def edited(self, since: int) -> list[Tracked]:
        """Return the tensors with other contents than the run has, among those whose contents were
        sent up to a revision.
        """
        small = [one for one in self.records[: self._small] if one.content_at <= since]
        found = [one for one in self.records[self._small :] if one.content_at <= since]
        rows = [(bits(one.tensor), bits(self.views[one.tag])) for one in found]
        if small:  # all at once, as mostly they are alike
            flat, copy, now = self._smalls
            memory.copy_row(now, [one.tensor for one in self.records[: self._small]])
            rows.append((flat, copy))
        alike = _alike(rows)
        if small and not alike.pop():
            found += small
            alike += _alike([(bits(one.tensor), bits(self.views[one.tag])) for one in small])
        return [one for one, same in zip(found, alike, strict=True) if not same]


def _alike(rows: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Compare pairs of tensors of the same shape; the host waits for a GPU once."""
    if not rows or rows[0][0].device.type == "cpu":
        return [torch.equal(*row) for row in rows]
    unlike = torch.stack([(one != other).any() for one, other in rows])
    return [not one for one in unlike.tolist()]
