"""The replica's side of a module's state.

Each forward has a module of its own, which is unpickled from the bytes that the driver's look made,
while the driver is busy with the answer before. Parameters and large buffers have their memory in
common, small buffers are new. So what a forward does to attributes ends with it, and a
checkpoint that runs again in backward finds what its forward left. A tensor that is shared and
was written to is made anew for the next one.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
from dataclasses import dataclass, field
from itertools import compress, takewhile
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from raydp_parallel.devices.layout import ALIGN, Layout, Row, part, specs_of
from raydp_parallel.devices.memory import copy_row, copy_up
from raydp_parallel.replica.exceptions import NotLoaded
from raydp_parallel.state import raw_access, sources
from raydp_parallel.state.look import Common, build
from raydp_parallel.state.run import SMALL, Seen, same, seen, set_versions, storage_of, versions_of
from raydp_parallel.wire.group import Exchange
from raydp_parallel.wire.messages import (
    BackwardRequest,
    ForwardRequest,
    Mapped,
    StateNews,
    StateUpdate,
    TensorSpec,
    Writes,
)
from raydp_parallel.wire.windows import Window

_TRAINED = (
    "the module wrote to its parameter of shape {}, which an optimizer in the replicas steps. "
    "Their copies would differ from now on: use an optimizer in your process for this module, or "
    "let the module write to a buffer"
)

_NOTHING = torch.empty(0, device="cpu")


@dataclass(slots=True, eq=False)
class ForwardState:
    """A module and its tensors, for one forward."""

    module: nn.Module
    tensors: dict[int, Tensor]  # by tag
    form: _Form
    seen: dict[int, Seen]  # where and how each lay before
    wanting: list[int]  # those that require a gradient in the master
    # How often each had been written to when it ended, as its graph saved them; empty until then.
    saved: dict[int, int] = field(default_factory=dict)
    touched: raw_access.Touched = field(default_factory=dict)  # past versions
    versions: list[int] = field(default_factory=list)  # how often each had been written to before
    was: Tensor | None = None  # the fresh ones' bytes before; None if writes are not reported
    keeps_data: bool = False  # ``t.data = other`` stays for parameters, as under no_grad


@dataclass(slots=True)
class _Tracked:
    """One tensor of the module."""

    spec: TensorSpec
    tensor: Tensor  # whose memory, and version, those of all modules have
    version: int = 0  # how often the master's was written to
    copy: Tensor | None = None  # the master's contents, if they came alone and are small
    lost: bool = False  # a forward wrote to it, and only the driver knows what was there
    trained: bool = False  # an optimizer here steps it: the master's contents are older


class _Run(NamedTuple):
    """The run of memory in which the master's contents come."""

    window: Window | None  # the driver's, if contents are copied from there
    memory: Tensor  # on the module's device
    layout: Layout
    views: dict[int, Tensor]  # its tensors, by tag


class _Form:
    """The tensors that modules of one structure have, but for what is in them."""

    def __init__(self, run: _Run, tracked: dict[int, _Tracked]) -> None:
        self.loose = {tag for tag, one in tracked.items() if not one.spec.parameter}
        # Small buffers come first in the run: each forward has its own.
        small = [tag for tag, view in run.views.items() if view.nbytes < SMALL]
        self.fresh = {tag: run.views[tag] for tag in takewhile(self.loose.__contains__, small)}
        self._layout = part(run.layout, 0, len(self.fresh))
        self.bytes = run.memory[: self._layout.size]  # the master's
        self._now = torch.zeros_like(self.bytes)
        self._there = self._layout.views(self._now)
        lines = np.diff([*self._layout.offsets, self._layout.size]) // ALIGN
        self._owners = np.repeat([*self.fresh], lines)  # of each line

    def laid(self, tensors: dict[int, Tensor]) -> Tensor:
        """Lay fresh ones out as the master's, but for those of another form by now. It is valid
        until the next time.
        """
        row = [tensors[tag] for tag in self.fresh]
        alike = [*map(eq, specs_of(row), self._layout.specs)]
        copy_row([*compress(self._there, alike)], [*compress(row, alike)])
        return self._now

    def changed(self, tensors: dict[int, Tensor], was: Tensor) -> set[int]:
        """Find those with other bytes, in one look at all: batch norm moves no version."""
        words = self.laid(tensors).view(torch.int64) != was.view(torch.int64)
        lines = words.view(len(self._owners), ALIGN // 8).any(1)
        return {*self._owners[lines.cpu().numpy()].tolist()}


def _made(spec: TensorSpec, t: Tensor) -> Tensor:
    return nn.Parameter(t, spec.grad) if spec.parameter else t.detach().requires_grad_(spec.grad)


class ReplicaModule:
    """A model in a replica."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.revision = 0  # the master's state that it has; -1 if it needs the whole
        self._structure = b""
        self._common: Common = {}  # of the modules that were made from it
        self.tracked: dict[int, _Tracked] = {}  # its tensors, by tag
        # The module sees a private mapping of each, in which its writes stay; the second one shows
        # the master's contents at any time.
        self._windows: dict[int, tuple[Window, Window]] = {}
        self._run = _Run(None, _NOTHING, Layout(()), {})
        self._form: _Form | None = None
        self._next: ForwardState | None = None  # for the next forward, if it was made already

    @property
    def lacking(self) -> bool:
        """True if contents were lost that only the driver has."""
        return self.revision < 0 or any([one.lost for one in self.tracked.values()])

    # The master's state.

    def update(self, update: StateUpdate, exchange: Exchange | None) -> None:
        """Take the master's changes over. Of a group, the root gets the changed parts of the run,
        and spreads them.
        """
        news: StateNews = pickle.loads(update.news)
        if news.sources is not None:
            sources.follow(news.sources)
        for key, window in update.windows.items():
            self._windows[key] = window.private(), window
        if news.structure is not None:
            self._structure, self._common = news.structure, {}
        if news.structure is not None or news.run is not None or news.specs:
            self._form = self._next = None
            self._common.pop(None, None)  # nothing may hold the memory of before
        self._bring(news, update, exchange)
        views = self._run.views
        contents = {tag: views[tag] for tag in news.versions if tag in views}
        contents.update(zip(news.tags, update.contents, strict=True))
        for tag, spec in news.specs.items():
            one = self.tracked.setdefault(tag, _Tracked(spec, _NOTHING))
            one.spec = spec
            if spec.mapped is not None:
                one.tensor = self._in_window(spec.mapped, 0)
        into: list[Tensor] = []
        values: list[Tensor] = []
        for tag, value in contents.items():
            one = self.tracked[tag]
            small = tag not in views and value.numel() * value.element_size() <= raw_access.COPIED
            one.copy = value.detach().clone() if small else None
            one.lost = False
            other = tag in news.specs or one.tensor.is_inference()
            if other or not (tag in views or one.trained):
                one.tensor = value.detach().clone()
                self._next = None
            else:  # in the place of the last values: graphs that saved these see their versions
                into.append(one.tensor)
                values.append(value)
            if self._next is not None and tag in self._next.form.fresh:
                into.append(self._next.tensors[tag])
                values.append(value)
        copy_row(into, values)
        # Versions are the master's own numbers: torch's check of saved tensors finds the same here.
        for tag, version in news.versions.items():
            self.tracked[tag].version = version
        set_versions([self.tracked[tag].tensor for tag in news.versions], news.versions.values())
        self.revision = update.revision

    def _bring(self, news: StateNews, update: StateUpdate, exchange: Exchange | None) -> None:
        """Bring what changed of the run to this replica's memory. In memory of the driver's that
        this replica computes in, it is there.
        """
        if news.run is not None:
            layout, window = Layout(news.run.specs), update.window
            if window is not None and self.device.type == "cpu":
                memory, window = window.memory[: layout.size], None
            else:
                memory = torch.empty(layout.size, dtype=torch.uint8, device=self.device)
            views = dict(zip(news.run.tags, layout.views(memory), strict=True))
            self._run = _Run(window, memory, layout, views)
        window, memory, *_ = self._run
        takes = exchange is None or exchange.rank == exchange.root
        for i, (begin, end) in enumerate(news.ranges):
            if takes and window is not None:
                copy_up(window, memory, begin, end)
            elif update.parts:
                memory[begin:end].copy_(update.parts[i])
            if exchange is not None:
                exchange.spread(memory[begin:end])

    def _in_window(self, mapped: Mapped, which: int) -> Tensor:
        """Show a tensor in one of its two windows, with a storage and a version of its own."""
        key, offset, spec = mapped
        return self._windows[key][which].tensor(spec, offset)

    def contents(self, tag: int) -> Tensor | None:
        """Return the master's contents of a tensor; None if they are not kept here."""
        one = self.tracked[tag]
        if one.spec.mapped is not None:
            return self._in_window(one.spec.mapped, 1)
        return None if one.trained else self._run.views.get(tag, one.copy)

    # One forward.

    def prepare(self) -> None:
        """Make the module of the next forward."""
        if self._next is None:
            with contextlib.suppress(Exception):  # it comes again, in that forward
                self._next = self._make({})

    def begin(self, request: ForwardRequest) -> ForwardState:
        """Return a module that is what the master is; or, for a forward that runs again for its
        graph, what that found first.
        """
        overlay, context = request.overlay or {}, request.terms.context
        state = (None if overlay else self._next) or self._make(overlay)
        self._next = None
        fresh = {tag: state.tensors[tag] for tag in state.form.fresh}
        set_versions(fresh.values(), [self.tracked[tag].version for tag in fresh])
        state.versions = versions_of(state.tensors.values())
        state.keeps_data = not context.grad
        # One that runs again has reported its writes before.
        reports = request.terms.reports and request.overlay is None
        state.was = state.form.bytes if reports else None
        return state

    def _make(self, overlay: dict[int, Tensor]) -> ForwardState:
        if self._form is None:
            used_windows = {one.spec.mapped[0] for one in self.tracked.values() if one.spec.mapped}
            self._windows = {key: self._windows[key] for key in used_windows}
            self._form = _Form(self._run, self.tracked)
        form = self._form
        # Objects of their own: hooks, gradients and flags that a forward leaves are not the next's.
        values = {tag: one.tensor for tag, one in self.tracked.items()}
        # Each with a storage of its own: `resize_` finds no room in one that others share.
        fresh = {tag: torch.empty_like(there) for tag, there in form.fresh.items()}
        copy_row([*fresh.values()], [*form.fresh.values()])
        values.update(fresh)
        values.update((tag, value.detach().clone()) for tag, value in overlay.items())
        tensors = {tag: _made(self.tracked[tag].spec, value) for tag, value in values.items()}
        try:
            module, used = build(self._structure, tensors, self._common, self.device)
        except Exception as error:  # code of the user's classes
            raise NotLoaded from error
        unused = tensors.keys() - used
        if not unused:
            wanting = [tag for tag in sorted(tensors) if self.tracked[tag].spec.grad]
            looks = dict(zip(tensors, seen(tensors.values()), strict=True))
            return ForwardState(module, tensors, form, looks, wanting)
        # Only now it is known which tensors a new structure still has.
        for tag in unused:
            del self.tracked[tag]
        self._form = None
        return self._make(overlay)

    def reenter(self, state: ForwardState, request: BackwardRequest) -> None:
        """Let a module run again in backward, for a checkpoint: it is as its forward left it, but
        for versions, in which torch's check sees the master's edits since then.
        """
        row = [state.tensors[tag] for tag in request.moved]
        then = [state.saved[tag] + by for tag, by in request.moved.items()]
        set_versions(row, map(max, versions_of(row), then))
        state.versions = versions_of(state.tensors.values())
        state.was = state.form.laid(state.tensors).clone() if request.terms.reports else None
        state.keeps_data = False

    def end(self, state: ForwardState) -> Writes:
        """Find out what was written to, and let the next forward not find it. No single sign tells
        of all writes; the contents decide where they are known.
        """
        touched, form, writes = state.touched, state.form, []
        changed = set() if state.was is None else form.changed(state.tensors, state.was)
        now = versions_of(state.tensors.values())
        first = not state.saved  # later on the master may have other contents
        state.saved = state.saved or dict(zip(state.tensors, now, strict=True))
        pairs = zip(state.tensors, state.versions, now, strict=True)
        moves = {tag: new - old for tag, old, new in pairs}
        suspects = state.tensors
        if not touched:  # nearly no parameters
            suspects = {n: t for n, t in suspects.items() if moves[n] or n in form.loose}
        for (tag, t), look in zip(suspects.items(), seen(suspects.values()), strict=True):
            one, moved = self.tracked.get(tag), moves[tag]
            if one is None:
                continue  # it was taken out of the module since
            replaced = look[1] != state.seen[tag][1]  # as after ``t.data = other``
            state.seen[tag] = look
            # ``t.data.mul_(2)``, or only read.
            accessed = bool(touched) and storage_of(t) in touched
            unlike = replaced or tag in changed
            suspect = moved or accessed or tag in form.loose
            if suspect and not unlike and tag not in form.fresh:
                kept = self.contents(tag) if first else None
                if kept is None and accessed and not moved:
                    kept = touched[storage_of(t)]
                if kept is not None and kept.shape == t.shape:
                    unlike = not same(t, kept)
                else:
                    unlike = moved > 0 or (accessed and not one.trained)
            if one.trained and (moved or unlike):
                one.lost = True
                raise RuntimeError(_TRAINED.format(tuple(t.shape)))
            if tag not in form.fresh and (unlike or moved):  # the next forward has its memory, too
                self._renew(tag)
            elif accessed and one.spec.mapped is not None:
                # Let go of pages that a write made private.
                key, offset, _ = one.spec.mapped
                self._windows[key][0].map.madvise(mmap.MADV_DONTNEED, offset, t.nbytes)
            # Upstream loses ``t.data = other`` where gradients are enabled.
            lost = replaced and not state.keeps_data and (one.spec.parameter or one.spec.grad)
            if unlike and state.was is not None and not lost:
                writes.append((tag, t, moved, replaced))
        if not writes:
            return Writes()
        tags, values, by, others = zip(*writes, strict=True)
        plain = Row([t.detach() if t.requires_grad else t for t in values])
        return Writes(tags, plain, by, others)

    def _renew(self, tag: int) -> None:
        """Make a tensor anew for the next forward: this one's graph may have saved it."""
        mapped, kept = self.tracked[tag].spec.mapped, self.contents(tag)
        anew = [self.tracked[tag]]
        if mapped is not None:  # with all others there: it has one mapping
            key, shared = mapped[0], self._windows[mapped[0]][1]
            self._windows[key] = shared.private(), shared
            anew = [o for o in self.tracked.values() if o.spec.mapped and o.spec.mapped[0] == key]
        for one in anew:
            if one.spec.mapped is not None:
                value = self._in_window(one.spec.mapped, 0)
            else:
                one.lost = kept is None
                value = torch.empty_like(one.tensor) if kept is None else kept.clone()
            one.tensor = value
        set_versions([one.tensor for one in anew], [one.version for one in anew])
        self._next = None
