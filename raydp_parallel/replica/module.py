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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
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

Changes = list[tuple[dict[Any, Any], dict[Any, Any]]]
"""Dicts of a module, each with its contents at some moment."""

_TRAINED = (
    "the module wrote to its parameter of shape {}, which an optimizer in the replicas steps. "
    "Their copies would differ from now on: use an optimizer in your process for this module, or "
    "let the module write to a buffer"
)

_CHANGED = -1
"""The slot of a tensor that the master does not have."""


class Built:
    """A module that was built from a look, and what puts it back after a forward.

    Args:
        module: The module.
        tensors: Its tensors, by slot.
        pristine: The contents of its small tensors.

    Attributes:
        attributes: The slots of tensors that are neither parameters nor registered buffers.
        lies: Where and how each tensor lies.
    """

    def __init__(
        self, module: nn.Module, tensors: dict[int, Tensor], pristine: dict[int, Tensor]
    ) -> None:
        self.module = module
        self.tensors = dict(tensors)
        self.lies = dict(zip(tensors, _lies(tensors.values()), strict=True))
        self.held: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        number = {id(t): slot for slot, t in tensors.items()}
        self.places: list[tuple[dict[str, Tensor | None], str, int]] = []
        seen: set[int] = set()
        registered: set[int] = set()
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            for d in (part.__dict__, part._parameters, part._buffers, part._modules):
                if id(d) not in seen:
                    seen.add(id(d))
                    self.held.append((d, dict(d)))
            for name, t in part._buffers.items():
                registered.add(id(t))
                slot = number.get(id(t), _CHANGED)
                if t is None or slot not in pristine or not _plain(t) or not is_dense(t):
                    continue
                if t.nbytes <= _SMALL:
                    self.places.append((part._buffers, name, slot))
        self.attributes = {
            slot
            for slot, t in tensors.items()
            if not isinstance(t, nn.Parameter) and id(t) not in registered
        }
        self.values = [value for _, before in self.held for value in before.values()]
        slots = dict.fromkeys(slot for _, _, slot in self.places)
        self.buffers = list(slots)
        self.layout = Layout(specs_of([tensors[slot] for slot in self.buffers]))
        self.flat = torch.empty(0, dtype=torch.uint8, device="cpu")

    def gather(self, pristine: dict[int, Tensor], device: torch.device) -> None:
        """Let the contents of buffers lie in one run of memory, which is copied as a whole."""
        self.flat = torch.empty(self.layout.size, dtype=torch.uint8, device=device)
        views = self.layout.views(self.flat)
        copy_row(views, [pristine[slot] for slot in self.buffers])
        pristine.update(zip(self.buffers, views, strict=True))

    def put(self, tensors: dict[int, Tensor]) -> None:
        """Let the module have other buffers."""
        for place, name, slot in self.places:
            place[name] = tensors[slot]

    def put_back(self) -> Changes:
        """Put attributes back that were set; returns what they were."""
        changes: Changes = []
        now = [*chain.from_iterable([d.values() for d, _ in self.held])]
        if len(now) == len(self.values) and all(map(is_, now, self.values)):
            return changes  # at once for the whole module, which is most often as it was
        for d, before in self.held:
            if len(d) != len(before) or not all(map(is_, d.values(), before.values())):
                changes.append((d, dict(d)))
                d.clear()
                d.update(before)
        return changes


def _plain(t: Tensor) -> bool:
    return type(t) is Tensor and t.layout is torch.strided and not t.is_nested


class Moment(NamedTuple):
    """The state of a module's tensors at one moment.

    Attributes:
        versions: How often each had been written to, by slot.
        lies: Where and how each lay.
    """

    versions: dict[int, int]
    lies: dict[int, Any]


class Found:
    """The tensors that one forward found.

    Args:
        tensors: The tensors, by slot.
        built: The module.
        flat: The memory of the buffers that are this forward's own.
        apart: The slots of those that do not lie there.

    Attributes:
        begun: Their state when it began.
        saved: How often each had been written to when it ended, as its graph saved them.
        touched: Addresses of memory that was accessed past versions.
        changes: Attributes that the forward set, for a checkpoint that runs again in backward.
    """

    def __init__(
        self, tensors: dict[int, Tensor], built: Built, flat: Tensor, apart: set[int]
    ) -> None:
        self.tensors = tensors
        self.flat, self.apart = flat, apart
        begun = self.moment(built.buffers)
        self.begun = begun._replace(lies={**built.lies, **begun.lies})
        self.saved = self.begun.versions
        self.touched: raw_access.Touched = {}
        self.changes: Changes = []

    def moment(self, slots: Iterable[int]) -> Moment:
        """Describe the tensors as they are now; of some, where they lie."""
        chosen = [*slots]
        return Moment(self.versions(), dict(zip(chosen, self.lies(chosen), strict=True)))

    def lies(self, slots: Iterable[int]) -> list[Any]:
        """Tell where and how some tensors lie."""
        return _lies([self.tensors[slot] for slot in slots])

    def versions(self) -> dict[int, int]:
        """Count how often each tensor was written to."""
        return dict(zip(self.tensors, versions_of(self.tensors.values()), strict=True))

    def move(self, moved: dict[int, int]) -> None:
        """Move versions as the master's did, so that torch's check sees its edits."""
        row = [self.tensors[slot] for slot in moved]
        then = [self.saved[slot] + by for slot, by in moved.items()]
        set_versions(row, map(max, versions_of(row), then))


def _writes(rows: list[tuple[int, Tensor, int, bool]]) -> Writes:
    slots, values, moved, replaced = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Writes(slots, Row(values, flags=False), moved, replaced)


def _lies(tensors: Iterable[Tensor]) -> list[Any]:
    return [
        (t.data_ptr(), t.dtype, t.shape, t.stride())
        if t.layout is torch.strided and not t.is_nested
        else (t.layout, t.dtype)
        for t in tensors
    ]


def _storage(t: Tensor) -> int:
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_nested else 0


class ReplicaModule:
    """A model in a replica.

    Args:
        device: The replica's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.revision = 0
        self._trained: set[int] = set()
        self._structure = b""
        self._clean_look = b""
        self._codes: dict[int, types.CodeType] = {}
        self._specs: dict[int, SlotSpec] = {}
        self._versions: dict[int, int] = {}
        self._windows: dict[int, tuple[Window, Window]] = {}
        self._tensors: dict[int, Tensor] = {}
        # The run in which contents come: where this process sees it, and its tensors by slot.
        self._window: Window | None = None
        self._run = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shown: dict[int, Tensor] = {}
        self._pristine: dict[int, Tensor] = {}
        self._lost: set[int] = set()
        self._built: Built | None = None
        self._unsettled = False
        self._unlooked: Built | None = None

    @property
    def lacking(self) -> bool:
        """True if contents were lost that only the driver has."""
        return bool(self._lost) or self.revision < 0

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
            # The module sees a private mapping, in which its writes stay; the other one shows the
            # master's contents at any time.
            shared = Window(window.size, window.duplicate())
            self._windows[key] = window, shared
        if news.structure is not None:
            self._structure = news.structure
            self._clean_look = b""
            self._built = None
        if news.run is not None:
            self._lay(news.run, update.window)
        self._bring(news.ranges, update, spread)
        contents = dict(zip(news.slots, update.contents, strict=True))
        for slot in news.versions:
            if slot in self._shown:
                contents.setdefault(slot, self._shown[slot])
        for slot, spec in news.specs.items():
            before = self._specs.get(slot)
            self._specs[slot] = spec
            self._built = None
            if spec.window is not None:
                self._tensors[slot] = self._made(slot, self._in_window(slot, master=False))
            elif slot not in contents and before is not None:  # another flag
                self._tensors[slot] = self._made(slot, self._tensors[slot].detach())
        into: list[Tensor] = []
        values: list[Tensor] = []
        for slot, value in contents.items():
            old, kept = self._tensors.get(slot), self._pristine.get(slot)
            shown = self._shown.get(slot)
            odd = type(value) is not Tensor or value.layout is not torch.strided or value.is_nested
            if slot in news.specs or old is None or odd or old.is_inference():
                self._tensors[slot] = self._made(slot, value.detach().clone())
                self._pristine.pop(slot, None)
                if shown is not None:
                    self._pristine[slot] = shown
                elif value.numel() * value.element_size() <= _SMALL:
                    self._pristine[slot] = value.detach().clone()
                self._built = None
                continue
            # In the place of the last values: graphs that saved these see it by their versions.
            into.append(old)
            values.append(value)
            if kept is not None and kept is not shown:
                into.append(kept)
                values.append(value)
        self._lost -= contents.keys()
        copy_row(into, values)
        # Versions are the master's own numbers: torch's check of saved tensors finds the same here.
        self._versions.update(news.versions)
        set_versions([self._tensors[slot] for slot in news.versions], news.versions.values())
        self.revision = update.revision

    def _lay(self, spec: RunSpec, window: Window | None) -> None:
        """Lay out the run in which contents come from now on: in memory of the driver's, if that is
        mapped and this is its device, else in memory of this replica's.
        """
        layout = Layout(spec.specs, cuts=spec.cuts)
        self._window = None
        if window is not None:
            self._window = Window(window.size, window.duplicate())
        if self._window is not None and self.device.type == "cpu":
            self._run = self._window.memory[: layout.size]
        else:
            self._run = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
        before, self._shown = (
            self._shown,
            dict(zip(spec.slots, layout.views(self._run), strict=True)),
        )
        for slot, view in before.items():
            if self._pristine.get(slot) is view and slot in self._shown:
                self._pristine[slot] = self._shown[slot]

    def _bring(
        self,
        ranges: Sequence[tuple[int, int]],
        update: StateUpdate,
        spread: Callable[[Tensor], None] | None,
    ) -> None:
        """Bring what changed of the run to this replica's memory."""
        if self._window is not None and self.device.type == "cpu":
            return  # it is there
        takes = update.spread is None or update.spread.rank == update.spread.root
        for i, (begin, end) in enumerate(ranges):
            if takes and self._window is not None:
                copy_up(self._window, self._run, begin, end)
            elif takes:
                self._run[begin:end].copy_(update.parts[i])
            if spread is not None:
                spread(self._run[begin:end])

    def _made(self, slot: int, value: Tensor) -> Tensor:
        spec = self._specs[slot]
        if spec.parameter:
            return nn.Parameter(value, spec.grad)
        return value.requires_grad_(spec.grad)

    def _in_window(self, slot: int, master: bool) -> Tensor:
        """Show a tensor of a window, with a storage and a version of its own."""
        spec = self._specs[slot]
        assert spec.window is not None
        there = Spec(spec.dtype, spec.shape, spec.stride, False)
        return self._windows[spec.window][master].alone(there, spec.offset)

    def wanting(self, found: Found) -> list[int]:
        """Return the slots of tensors that require a gradient in the master."""
        return [slot for slot in sorted(found.tensors) if self._specs[slot].grad]

    def tensor(self, slot: int) -> Tensor:
        """Return the tensor of a slot."""
        return self._tensors[slot]

    def has(self, slot: int) -> bool:
        """Tell if the module still has a slot's tensor."""
        return slot in self._tensors

    def stepped(self, slots: Iterable[int]) -> None:
        """Note parameters that optimizers here step: the master's contents are older from now
        on.
        """
        self._trained.update(slots)
        for slot in slots:
            self._pristine.pop(slot, None)

    def contents(self, slot: int) -> Tensor | None:
        """Return the master's contents of a tensor; None if they are not kept here."""
        spec = self._specs[slot]
        if spec.window is not None:
            return self._in_window(slot, master=True)
        return self._pristine.get(slot)

    # One forward.

    def begin(self, overlay: dict[int, Tensor] | None) -> Found:
        """Make the module what the master is, with buffers of this forward's own.

        Args:
            overlay: Contents in place of the master's.
        """
        self.settle()
        if self._built is None:
            self._build()
        built = self._built
        assert built is not None
        apart = set()
        tensors = dict(built.tensors)
        flat = built.flat
        if built.buffers:
            flat = flat.clone()
            # `.data` gives each a version of its own.
            fresh = [*map(raw_access.data, built.layout.views(flat))]
            for slot, t in zip(built.buffers, fresh, strict=True):
                if self._specs[slot].grad:
                    t.requires_grad_()
            set_versions(fresh, [self._versions[slot] for slot in built.buffers])
            tensors.update(zip(built.buffers, fresh, strict=True))
        # A forward that runs again for its graph finds what it found first.
        for slot, value in (overlay or {}).items():
            if slot in built.buffers and value.shape == tensors[slot].shape:
                with torch.no_grad():
                    tensors[slot].copy_(value)
            else:
                tensors[slot] = self._made(slot, value.detach().clone())
                apart.add(slot)
        if apart:
            built = self._rebuilt(tensors, built)
        built.put(tensors)
        self._current = built
        self._found = Found(tensors, built, flat, apart)
        return self._found

    def _build(self) -> None:
        codes = [self._codes[i] for i in range(len(self._codes))]
        try:
            module, used = build(self._structure, self._tensors, codes, self.device)
        except Exception as error:  # code of the user's classes
            raise NotLoaded from error
        # Only now it is known which tensors the new structure still has.
        for slot in self._tensors.keys() - used:
            del self._tensors[slot], self._specs[slot]
            self._pristine.pop(slot, None)
            self._versions.pop(slot, None)
            self._lost.discard(slot)
        used_windows = {spec.window for spec in self._specs.values()}
        for key in self._windows.keys() - used_windows:
            del self._windows[key]
        self._built = Built(module, self._tensors, self._pristine)
        self._built.gather(self._pristine, self.device)

    def _rebuilt(self, tensors: dict[int, Tensor], like: Built) -> Built:
        """Build the module with other tensors, for a forward that runs again."""
        codes = [self._codes[i] for i in range(len(self._codes))]
        module, _ = build(self._structure, tensors, codes, self.device)
        found = Built(module, tensors, self._pristine)
        found.buffers, found.layout, found.flat = like.buffers, like.layout, like.flat
        return found

    def _look(self, built: Built) -> bytes:
        number = {id(t): slot for slot, t in built.tensors.items()}
        return look(built.module, lambda t: number.get(id(t), _CHANGED), Codes(self._codes))

    def _has_flags(self) -> bool:
        """Tell if tensors require gradients as the master's do; let them do so."""
        clean = True
        for slot, t in self._tensors.items():
            if t.requires_grad != self._specs[slot].grad:
                self._tensors[slot] = self._made(slot, t.detach())
                clean = False
        return clean

    def again(self, built: Built, found: Found) -> None:
        """Let the module be what one forward left, for a checkpoint that runs again in backward."""
        self.put_back()
        built.put(found.tensors)
        for d, now in found.changes:
            d.clear()
            d.update(now)
        self._current, self._found, self._unsettled = built, found, True

    @property
    def current(self) -> Built:
        """The module of the forward that began last."""
        return self._current

    @contextmanager
    def noting(self, found: Found) -> Iterator[None]:
        """Note in the block which tensors are accessed past their versions."""
        with raw_access.noting() as found.touched:
            yield

    def end(self, found: Found, report: bool, keeps_data: bool) -> Writes:
        """Find out what the forward wrote to; that it is not found again by the next one.

        Args:
            found: The tensors that it began with.
            report: True if writes are reported.
            keeps_data: True if ``t.data = other`` stays for parameters, as under no_grad.
        """
        self._unsettled = True
        self._unlooked = self._current
        before = self._current.flat if report else None
        return self._ended(found, found.begun, self.contents, before, keeps_data)

    def end_backward(self, found: Found, begun: Moment, before: Tensor | None) -> Writes:
        """Find the tensors that backward wrote to, as a checkpoint does that runs again.

        Args:
            found: The tensors.
            begun: Their state when it began.
            before: The memory of the forward's buffers then; None reports no writes.
        """
        built = self._current
        known: dict[int, Tensor] = {}
        if found.touched and before is not None:
            known.update(zip(built.buffers, built.layout.views(before), strict=True))

        def contents(slot: int) -> Tensor | None:
            if slot in known:
                return known[slot]
            kept = found.touched.get(_storage(found.tensors[slot]))
            return kept if kept is not None and kept.shape == found.tensors[slot].shape else None

        return self._ended(found, begun, contents, before, keeps_data=False)

    def _ended(
        self,
        found: Found,
        begun: Moment,
        contents: Callable[[int], Tensor | None],
        before: Tensor | None,
        keeps_data: bool,
    ) -> Writes:
        writes = self._written(found, begun, contents, before)
        for slot in writes.slots:
            if self._tensors.get(slot) is found.tensors[slot]:  # no buffer: the next one has it
                self._renew(slot)
                self._built = None
        return Writes() if before is None else self._kept(writes, keeps_data)

    def _kept(self, writes: Writes, keeps_data: bool) -> Writes:
        """Leave out what upstream loses where gradients are enabled: ``t.data = other``."""
        if keeps_data or not any(writes.replaced):
            return writes
        rows = []
        for slot, value, moved, replaced in zip(*writes, strict=True):
            spec = self._specs[slot]
            if not (replaced and (spec.parameter or spec.grad)):
                rows.append((slot, value, moved, replaced))
        return _writes(rows)

    def _written(
        self,
        found: Found,
        begun: Moment,
        contents: Callable[[int], Tensor | None],
        before: Tensor | None,
    ) -> Writes:
        """Find the tensors that were written to since a moment.

        Args:
            found: The tensors.
            begun: Their state at that moment.
            contents: Gives the contents of one then, if they are known.
            before: The contents of the buffers of this forward then, in one run; None leaves
                buffers out.
        """
        specs, touched = self._specs, found.touched
        rows: list[tuple[int, Tensor, int, bool]] = []
        looked = []
        now = found.versions()
        for slot, version in begun.versions.items():
            # Nearly all parameters end here: no version moved, and no access to `.data`. Kernels of
            # batch norm move no versions of buffers.
            spec = specs.get(slot)  # None: it was taken out of the module since
            if spec is not None and (touched or not spec.parameter or now[slot] != version):
                looked.append(slot)
        differs = dict.fromkeys({*self._current.buffers} - found.apart, False)
        if before is not None and self._current.layout.size:
            differs = self._differing(found, before)
        for slot, lies in zip(looked, found.lies(looked), strict=True):
            t, moved = found.tensors[slot], now[slot] - begun.versions[slot]
            replaced = lies != begun.lies.get(slot, lies)
            raw = bool(touched) and self._was_touched(found, t)
            if specs[slot].parameter and not (moved or replaced or raw):
                continue
            if slot in self._trained:
                kept = touched.get(_storage(t))
                if moved or (kept is not None and not same(t, kept)):
                    self._lost.add(slot)
                    raise RuntimeError(_TRAINED.format(tuple(t.shape)))
                continue
            if slot in differs and not replaced:
                if differs[slot]:
                    rows.append((slot, t, moved, False))
                continue
            then = contents(slot)
            if then is None and not (moved or replaced or raw):
                continue
            if not replaced and then is not None and same(t, then.to(t.device)):
                spec = specs[slot]
                if spec.parameter:  # written, with what was there
                    set_versions([t], [begun.versions[slot]])
                if spec.window is not None:  # let go of the pages that the write made private
                    pages = self._windows[spec.window][0].map
                    pages.madvise(mmap.MADV_DONTNEED, spec.offset, t.numel() * t.element_size())
                continue
            rows.append((slot, t, moved, replaced))
        return _writes(rows)

    def _differing(self, found: Found, before: Tensor) -> dict[int, bool]:
        """Tell which buffers of a forward have other bytes than before, in one look at all."""
        built = self._current
        with torch.no_grad():
            words = found.flat.view(torch.int64) != before.view(torch.int64)
            lines = words.view(-1, ALIGN // 8).any(1).cpu().numpy()
        starts = np.minimum(np.array(built.layout.offsets) // ALIGN, len(lines) - 1)
        order = np.argsort(starts, kind="stable")
        unlike = np.empty(len(starts), dtype=bool)
        unlike[order] = np.logical_or.reduceat(lines, starts[order])
        pairs = zip(built.buffers, unlike.tolist(), strict=True)
        return {slot: one for slot, one in pairs if slot not in found.apart}

    def _was_touched(self, found: Found, t: Tensor) -> bool:
        return bool(found.touched) and _storage(t) in found.touched

    def _renew(self, slot: int) -> None:
        """Make a tensor anew for the next forward: this one's graph may have saved it."""
        spec, kept = self._specs[slot], self._pristine.get(slot)
        if spec.window is not None:
            shared = self._windows[spec.window][1]
            again = Window(shared.size, shared.duplicate(), private=True)
            self._windows[spec.window] = again, shared
            self._tensors[slot] = self._made(slot, self._in_window(slot, master=False))
        elif kept is not None:
            self._tensors[slot] = self._made(slot, kept.clone())
        else:
            self._lost.add(slot)
            self._tensors[slot] = self._made(slot, torch.empty_like(self._tensors[slot]).detach())
        set_versions([self._tensors[slot]], [self._versions[slot]])

    def put_back(self) -> None:
        """Put attributes back that a forward set."""
        if self._unsettled:
            self._unsettled = False
            self._found.changes = self._current.put_back()

    def settle(self) -> None:
        """Put the module back after a forward; build it again later if a look still differs."""
        self.put_back()
        built, self._unlooked = self._unlooked, None
        if built is None or built is not self._built:
            return
        clean = self._has_flags()
        try:
            clean = self._is_clean(built) and clean
        except Exception:  # a value that cannot be pickled was left
            clean = False
        if not clean:
            self._built = None

    def _is_clean(self, built: Built) -> bool:
        """Compare a look at the module with one at a twin that was just built. Mostly both are the
        master's bytes.
        """
        found = self._look(built)
        if not self._clean_look:
            if found == self._structure:
                self._clean_look = found
            else:
                self._clean_look = self._look(self._rebuilt(built.tensors, built))
        return found == self._clean_look
