"""The replica's side of a module's state.

Each forward begins with the master's state. Buffers are new in each, as in upstream's replicas,
because an older graph may have saved the last ones. After it attributes are put back; if a look
still differs, the module is built again from its bytes. A tensor that was written to and is no
buffer is made anew, too. Nothing is undone or recorded.
"""

from __future__ import annotations

import mmap
import pickle
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raydp_parallel.devices.layout import ALIGN, Layout, Spec, is_dense, specs_of
from raydp_parallel.devices.memory import copy_row, copy_up
from raydp_parallel.replica.exceptions import NotLoaded
from raydp_parallel.state import raw_access, sources
from raydp_parallel.state.look import Codes, build, look
from raydp_parallel.state.run import same, set_versions, versions_of
from raydp_parallel.wire.codec import Row
from raydp_parallel.wire.messages import RunSpec, SlotSpec, StateNews, StateUpdate, Writes
from raydp_parallel.wire.windows import Window

_SMALL = 1 << 20
"""Bytes up to which a buffer is new in each forward, and any tensor's contents are kept."""

Attributes = dict[str, Any]
"""A dict of a module: its attributes, parameters, buffers or parts."""

_TRAINED = (
    "the module wrote to its parameter of shape {}, which an optimizer in the replicas steps. "
    "Their copies would differ from now on: use an optimizer in your process for this module, or "
    "let the module write to a buffer"
)

_NOTHING = torch.empty(0, device="cpu")

_CHANGED = -1
"""The slot of a tensor that the master does not have."""


class Built:
    """A module that was built from a look, and what puts it back after a forward.

    Args:
        module: The module.
        tensors: Its tensors, by slot.
        contents: The contents with which a forward begins, by slot, where they are known.
        device: The replica's device.

    Attributes:
        loose: The slots of tensors that are no parameters.
        attributes: Those among them that are no registered buffers.
        buffers: Those that each forward has anew, in one run of memory.
        layout: How they lie there.
        flat: A run like it with the contents of the master, which an update changes.
        views: Its tensors, by slot.
        lies: Where and how each parameter lies.
    """

    def __init__(
        self,
        module: nn.Module,
        tensors: dict[int, Tensor],
        contents: dict[int, Tensor],
        device: torch.device,
    ) -> None:
        self.module = module
        self.tensors = tensors
        number = {id(t): slot for slot, t in tensors.items()}
        self._held: list[tuple[Attributes, Attributes]] = []
        self._places: list[tuple[dict[str, Tensor | None], str, int]] = []
        registered: set[int] = set()
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for d in (vars(part), part._parameters, part._buffers, part._modules):
                self._held.append((d, dict(d)))
            for name, t in part._buffers.items():
                slot = number.get(id(t), _CHANGED)
                registered.add(slot)
                own = t is not None and slot in contents and _is_plain(t) and is_dense(t)
                if own and tensors[slot].nbytes <= _SMALL:
                    self._places.append((part._buffers, name, slot))
        self.loose = [slot for slot, t in tensors.items() if not isinstance(t, nn.Parameter)]
        self.attributes = {*self.loose} - registered
        self.buffers = [*dict.fromkeys([slot for _, _, slot in self._places])]
        self.layout = Layout(specs_of([tensors[slot] for slot in self.buffers]))
        self.flat = torch.empty(self.layout.size, dtype=torch.uint8, device=device)
        self.views = dict(zip(self.buffers, self.layout.views(self.flat), strict=True))
        copy_row([*self.views.values()], [contents[slot] for slot in self.buffers])
        parameters = tensors.keys() - {*self.loose}
        self.lies = _lies({slot: tensors[slot] for slot in parameters})

    def put(self, tensors: dict[int, Tensor]) -> None:
        """Let the module have other buffers."""
        for place, name, slot in self._places:
            place[name] = tensors[slot]

    def put_back(self) -> list[tuple[Attributes, Attributes]]:
        """Put attributes back that were set; returns what they were."""
        changes = []
        for d, before in self._held:
            if len(d) != len(before) or not all(map(is_, d.values(), before.values())):
                changes.append((d, dict(d)))
                d.clear()
                d.update(before)
        return changes


class Found:
    """The module and the tensors that one forward found.

    Args:
        built: The module.
        tensors: The tensors, by slot.
        flat: The memory of the buffers that are this forward's own.

    Attributes:
        saved: How often each tensor had been written to when it ended, as its graph saved them.
        touched: Addresses of memory that was accessed past versions.
        changes: Attributes that the forward set, for a checkpoint that runs again in backward.
    """

    def __init__(self, built: Built, tensors: dict[int, Tensor], flat: Tensor) -> None:
        self.built, self.tensors, self.flat = built, tensors, flat
        self.saved: dict[int, int] = {}
        self.touched: raw_access.Touched = {}
        self.changes: list[tuple[Attributes, Attributes]] = []

    def versions(self) -> dict[int, int]:
        """Count how often each tensor was written to."""
        return dict(zip(self.tensors, versions_of(self.tensors.values()), strict=True))


class Before:
    """A forward's tensors at one moment, compared with what they are later.

    No single sign tells of all writes, so there are four; the contents decide where they are known.

    Args:
        found: The tensors.
        report: True if buffers are compared, whose writes are reported.
        master: Knows the contents with which the tensors began; None if they are not of now.
    """

    def __init__(self, found: Found, report: bool, master: ReplicaModule | None) -> None:
        self.found = found
        self.versions = found.versions()
        self._loose = {slot: found.tensors[slot] for slot in found.built.loose}
        self._lies = found.built.lies | _lies(self._loose)
        self.flat = None
        if report:
            self.flat = found.built.flat if master is not None else found.flat.clone()
        self._master = master

    def moved(self) -> dict[int, int]:
        """Count the writes that torch tells of: by operations in place."""
        now = self.found.versions()
        return {slot: now[slot] - old for slot, old in self.versions.items() if now[slot] != old}

    def touched(self) -> set[int]:
        """Find the tensors that were accessed past versions, as by ``t.data.mul_(2)``: they may
        have been written to, or only read.
        """
        touched = self.found.touched
        if not touched:
            return set()
        return {slot for slot, t in self.found.tensors.items() if _storage(t) in touched}

    def replaced(self, moved: Iterable[int]) -> set[int]:
        """Find the tensors that lie elsewhere, or otherwise, as after ``t.data = other``."""
        found = self.found
        if found.touched:
            suspects = found.tensors
        else:  # nearly all parameters end here
            suspects = self._loose | {slot: found.tensors[slot] for slot in moved}
        return {slot for slot, lies in _lies(suspects).items() if lies != self._lies[slot]}

    def changed(self) -> set[int]:
        """Find the buffers with other bytes, in one look at all: kernels of batch norm move no
        version.
        """
        built = self.found.built
        if self.flat is None or not built.layout.size:
            return set()
        with torch.no_grad():
            words = self.found.flat.view(torch.int64) != self.flat.view(torch.int64)
            lines = words.view(-1, ALIGN // 8).any(1).cpu().numpy()
        until = np.concatenate([[0], np.cumsum(lines)])  # how many lines differ up to each
        begins = np.array(built.layout.offsets)
        ends = begins + [built.tensors[slot].nbytes for slot in built.buffers]
        differ = until[-(-ends // ALIGN)] > until[begins // ALIGN]
        return {slot for slot, one in zip(built.buffers, differ.tolist(), strict=True) if one}

    def contents(self, slot: int) -> Tensor | None:
        """Return what a tensor was, if that is known."""
        kept = None if self._master is None else self._master.contents(slot)
        if kept is None:
            t = self.found.tensors[slot]
            kept = self.found.touched.get(_storage(t))
            kept = None if kept is None or kept.shape != t.shape else kept
        return kept


class Write(NamedTuple):
    """A tensor that was written to."""

    slot: int
    value: Tensor
    moved: int  # by how much its version moved
    replaced: bool  # its memory is another one


@dataclass(slots=True)
class _Tracked:
    """One tensor of the module."""

    spec: SlotSpec
    tensor: Tensor  # the module's own
    version: int = 0  # how often the master's was written to
    sent: Tensor | None = None  # the master's contents, if they came alone and are small
    lost: bool = False  # a forward wrote to it, and only the driver knows what was there
    trained: bool = False  # an optimizer here steps it: the master's contents are older


class _Run(NamedTuple):
    """The run of memory in which the master's contents come."""

    window: Window | None  # the driver's, if that is mapped
    memory: Tensor  # on the module's device
    views: dict[int, Tensor]  # its tensors, by slot


def _is_plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.layout is torch.strided and not t.is_nested


def _lies(tensors: dict[int, Tensor]) -> dict[int, tuple[object, ...]]:
    """Tell where and how tensors lie."""
    return {
        slot: (t.data_ptr(), t.dtype, t.shape, t.stride())
        if t.layout is torch.strided and not t.is_nested
        else (t.layout, t.dtype)
        for slot, t in tensors.items()
    }


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_nested else 0


def _made(spec: SlotSpec, value: Tensor) -> Tensor:
    return nn.Parameter(value, spec.grad) if spec.parameter else value.requires_grad_(spec.grad)


class ReplicaModule:
    """A model in a replica.

    Args:
        device: The replica's device.

    Attributes:
        revision: The master's state that it has; -1 if it needs the whole.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.revision = 0
        self._structure = b""
        self._clean_look = b""  # at a module that was just built
        self._codes: dict[int, types.CodeType] = {}
        self._tracked: dict[int, _Tracked] = {}
        # The module sees a private mapping of each, in which its writes stay; the second one shows
        # the master's contents at any time.
        self._windows: dict[int, tuple[Window, Window]] = {}
        self._run = _Run(None, _NOTHING, {})
        self._built: Built | None = None  # None if it has to be built again
        self._ran: Found | None = None  # what the module was not put back from

    @property
    def lacking(self) -> bool:
        """True if contents were lost that only the driver has."""
        return self.revision < 0 or any([one.lost for one in self._tracked.values()])

    # The master's state.

    def update(self, update: StateUpdate, spread: Callable[[Tensor], None] | None) -> None:
        """Take the master's changes over.

        Args:
            update: The changes.
            spread: Copies a part of the run to all members of the group, or from its root; None
                if each replica gets its own.
        """
        self.revision = -1  # until all is done: an update that failed is asked for again, whole
        news: StateNews = pickle.loads(update.news)
        if news.sources is not None:
            sources.follow(news.sources)
        if news.code is not None:
            self._codes.update(pickle.loads(news.code))
        for key, window in update.windows.items():
            self._windows[key] = window, Window(window.size, window.duplicate())
        if news.structure is not None:
            self._structure = news.structure
            self._clean_look, self._built = b"", None
        if news.run is not None:
            self._run = self._laid(news.run, update.window)
        self._bring(news.ranges, update, spread)
        views = self._run.views
        contents = {slot: views[slot] for slot in news.versions if slot in views}
        contents.update(zip(news.slots, update.contents, strict=True))
        for slot, spec in news.specs.items():
            self._built = None
            one = self._tracked.setdefault(slot, _Tracked(spec, _NOTHING))
            one.spec = spec
            if spec.window is not None:
                one.tensor = _made(spec, self._in_window(spec, master=False))
            elif slot not in contents:  # another flag
                one.tensor = _made(spec, one.tensor.detach())
        into: list[Tensor] = []
        values: list[Tensor] = []
        for slot, value in contents.items():
            one = self._tracked[slot]
            small = slot not in views and value.numel() * value.element_size() <= _SMALL
            one.sent = value.detach().clone() if small else None
            one.lost = False
            other = slot in news.specs or one.tensor.is_inference()
            if other or not (slot in views or one.trained):
                one.tensor = _made(one.spec, value.detach().clone())
                self._built = None
            else:  # in the place of the last values: graphs that saved these see their versions
                into.append(one.tensor)
                values.append(value)
            if self._built is not None and slot in self._built.views:
                into.append(self._built.views[slot])
                values.append(value)
        copy_row(into, values)
        # Versions are the master's own numbers: torch's check of saved tensors finds the same here.
        for slot, version in news.versions.items():
            self._tracked[slot].version = version
        set_versions([self._tracked[slot].tensor for slot in news.versions], news.versions.values())
        self.revision = update.revision

    def _laid(self, spec: RunSpec, theirs: Window | None) -> _Run:
        """Lay out the run in which contents come from now on: in memory of the driver's, if that is
        mapped and this is its device, else in memory of this replica's.
        """
        layout = Layout(spec.specs, cuts=spec.cuts)
        window = None if theirs is None else Window(theirs.size, theirs.duplicate())
        if window is not None and self.device.type == "cpu":
            memory = window.memory[: layout.size]
        else:
            memory = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        return _Run(window, memory, dict(zip(spec.slots, layout.views(memory), strict=True)))

    def _bring(
        self,
        ranges: Sequence[tuple[int, int]],
        update: StateUpdate,
        spread: Callable[[Tensor], None] | None,
    ) -> None:
        """Bring what changed of the run to this replica's memory."""
        window, memory, _ = self._run
        if window is not None and self.device.type == "cpu":
            return  # it is there
        takes = update.spread is None or update.spread.rank == update.spread.root
        for i, (begin, end) in enumerate(ranges):
            if takes and window is not None:
                copy_up(window, memory, begin, end)
            elif takes:
                memory[begin:end].copy_(update.parts[i])
            if spread is not None:
                spread(memory[begin:end])

    def _in_window(self, spec: SlotSpec, master: bool) -> Tensor:
        """Show a tensor of a window, with a storage and a version of its own."""
        assert spec.window is not None
        there = Spec(spec.dtype, spec.shape, spec.stride, False)
        return self._windows[spec.window][master].alone(there, spec.offset)

    def wanting(self, found: Found) -> list[int]:
        """Return the slots of tensors that require a gradient in the master."""
        return [slot for slot in sorted(found.tensors) if self._tracked[slot].spec.grad]

    def tensor(self, slot: int) -> Tensor:
        """Return the tensor of a slot."""
        return self._tracked[slot].tensor

    def has(self, slot: int) -> bool:
        """Tell if the module still has a slot's tensor."""
        return slot in self._tracked

    def stepped(self, slots: Iterable[int]) -> None:
        """Note parameters that optimizers here step: the master's contents are older from now
        on.
        """
        for slot in slots:
            if slot in self._tracked:
                self._tracked[slot].trained = True

    def contents(self, slot: int) -> Tensor | None:
        """Return the master's contents of a tensor; None if they are not kept here."""
        one = self._tracked[slot]
        if one.spec.window is not None:
            return self._in_window(one.spec, master=True)
        return None if one.trained else self._run.views.get(slot, one.sent)

    # One forward.

    def begin(self, overlay: dict[int, Tensor]) -> Found:
        """Make the module what the master is, with buffers of this forward's own.

        Args:
            overlay: Contents in place of the master's: a forward that runs again for its graph
                finds what it found first.
        """
        self.settle()
        if self._built is None:
            self._built = self._build()
        built, other = self._built, {}
        for slot, value in overlay.items():
            if slot not in built.buffers or value.shape != built.tensors[slot].shape:
                other[slot] = _made(self._tracked[slot].spec, value.detach().clone())
        if other:
            tensors = built.tensors | other
            module, _ = build(self._structure, tensors, self._codes, self.device)
            kept = {slot: t for slot, t in built.views.items() if slot not in other}
            built = Built(module, tensors, kept, self.device)
        flat = built.flat.clone()
        views = dict(zip(built.buffers, built.layout.views(flat), strict=True))
        own = overlay.keys() & views.keys()
        copy_row([views[slot] for slot in own], [overlay[slot] for slot in own])
        fresh = [*map(raw_access.data, views.values())]  # gives each a version of its own
        for slot, t in zip(built.buffers, fresh, strict=True):
            if self._tracked[slot].spec.grad:
                t.requires_grad_()
        set_versions(fresh, [self._tracked[slot].version for slot in built.buffers])
        self._ran = Found(built, built.tensors | dict(zip(built.buffers, fresh, strict=True)), flat)
        built.put(self._ran.tensors)
        return self._ran

    def _build(self) -> Built:
        tensors = {slot: one.tensor for slot, one in self._tracked.items()}
        try:
            module, used = build(self._structure, tensors, self._codes, self.device)
        except Exception as error:  # code of the user's classes
            raise NotLoaded from error
        # Only now it is known which tensors the new structure still has.
        for slot in tensors.keys() - used:
            del self._tracked[slot], tensors[slot]
        used_windows = {one.spec.window for one in self._tracked.values()}
        for key in self._windows.keys() - used_windows:
            del self._windows[key]
        contents = {slot: t for slot in tensors if (t := self.contents(slot)) is not None}
        return Built(module, tensors, contents, self.device)

    def again(self, found: Found, moved: dict[int, int]) -> None:
        """Let the module be what one forward left, for a checkpoint that runs again in backward.

        Args:
            found: The tensors of that forward.
            moved: By how much the master's versions moved since: torch's check sees its edits.
        """
        row = [found.tensors[slot] for slot in moved]
        then = [found.saved[slot] + by for slot, by in moved.items()]
        set_versions(row, map(max, versions_of(row), then))
        if self._ran is found:
            return
        if self._ran is not None and self._ran.built is found.built:
            self._put_back()  # a look can wait
        else:
            self.settle()
        found.built.put(found.tensors)
        for d, now in found.changes:
            d.clear()
            d.update(now)
        self._ran = found

    def end(self, before: Before, keeps_data: bool) -> Writes:
        """Find out what was written to, and let the next forward not find it.

        Args:
            before: The tensors as they were.
            keeps_data: True if ``t.data = other`` stays for parameters, as under no_grad.
        """
        found, buffers = before.found, {*before.found.built.buffers}
        moved, touched, changed = before.moved(), before.touched(), before.changed()
        replaced = before.replaced(moved)
        signs = moved.keys() | touched | replaced
        writes = []
        for slot in sorted(signs | changed | ({*found.built.loose} - buffers)):
            t, one = found.tensors[slot], self._tracked.get(slot)
            if one is None:
                continue  # it was taken out of the module since
            then, unlike = None, slot in replaced or slot in changed
            if slot not in buffers and not unlike:
                then = before.contents(slot)
                unlike = slot in signs if then is None else not same(t, then)
            if one.trained:
                if slot in moved or (then is not None and unlike):
                    one.lost = True
                    raise RuntimeError(_TRAINED.format(tuple(t.shape)))
            elif unlike:
                # Without its own constructor, which is a function of Python.
                row = slot, t, moved.get(slot, 0), slot in replaced
                writes.append(tuple.__new__(Write, row))
            elif one.spec.parameter:  # written, with what was there
                set_versions([t], [before.versions[slot]])
                if one.spec.window is not None:  # let go of the pages that the write made private
                    pages = self._windows[one.spec.window][0].map
                    pages.madvise(mmap.MADV_DONTNEED, one.spec.offset, t.nbytes)
        kept = []
        for write in writes:
            one = self._tracked[write.slot]
            if one.tensor is write.value:  # no buffer of the run: the next forward has it, too
                self._renew(write.slot)
            # Upstream loses ``t.data = other`` where gradients are enabled.
            if keeps_data or not (write.replaced and (one.spec.parameter or one.spec.grad)):
                kept.append(write)
        if before.flat is None:
            return Writes()
        slots, values, by, others = zip(*kept, strict=True) if kept else ((), (), (), ())
        return Writes(slots, Row(values, flags=False), by, others)

    def _renew(self, slot: int) -> None:
        """Make a tensor anew for the next forward: this one's graph may have saved it."""
        key, kept = self._tracked[slot].spec.window, self.contents(slot)
        anew = [self._tracked[slot]]
        if key is not None:  # with all others there: it has one mapping, of which pages are let go
            shared = self._windows[key][1]
            self._windows[key] = Window(shared.size, shared.duplicate(), private=True), shared
            anew = [one for one in self._tracked.values() if one.spec.window == key]
        for one in anew:
            if key is not None:
                value = self._in_window(one.spec, master=False)
            else:
                one.lost = kept is None
                value = torch.empty_like(one.tensor).detach() if kept is None else kept.clone()
            one.tensor = _made(one.spec, value)
        set_versions([one.tensor for one in anew], [one.version for one in anew])
        self._built = None

    def _put_back(self) -> None:
        """Put attributes back that a forward set."""
        if self._ran is not None:
            self._ran.changes = self._ran.built.put_back()
            self._ran = None

    def settle(self) -> None:
        """Put the module back after a forward; build it again later if a look still differs."""
        if self._ran is None:
            return
        built = self._ran.built
        self._put_back()
        for one in self._tracked.values():
            if one.tensor.requires_grad != one.spec.grad:
                one.tensor = _made(one.spec, one.tensor.detach())
                self._built = None
        if built is self._built:
            try:
                clean = self._is_clean(built)
            except Exception:  # a value that cannot be pickled was left
                clean = False
            if not clean:
                self._built = None

    def _is_clean(self, built: Built) -> bool:
        """Compare a look at the module with one at a twin that was just built. Mostly both are the
        master's bytes.
        """
        number = {id(t): slot for slot, t in built.tensors.items()}

        def looked(module: nn.Module) -> bytes:
            return look(module, lambda t: number.get(id(t), _CHANGED), Codes(self._codes))

        found = looked(built.module)
        if found == self._structure:
            self._clean_look = found
        elif not self._clean_look:
            twin, _ = build(self._structure, built.tensors, self._codes, self.device)
            self._clean_look = looked(twin)
        return found == self._clean_look
