"""The driver's side of a module's state: what changed since the state that a replica has.

Before each forward the module is looked at. Its structure is compared as bytes, its tensors by
version, address and geometry. An edit through ``.data`` moves none of these, so the contents of
what was not sent are compared while the replicas run; the forward then runs again.

Large tensors of a CPU module lie in windows that replicas on this machine map: of those nothing is
sent but their versions.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from raydp_parallel.devices import ambient
from raydp_parallel.devices.memory import copy_row
from raydp_parallel.state import sources
from raydp_parallel.state.lagging import PLAINLY, Lagging, plainly
from raydp_parallel.state.look import Codes, check_devices, look
from raydp_parallel.state.run import SMALL, StateRun
from raydp_parallel.state.run import bits as plain_bits
from raydp_parallel.wire import pickling
from raydp_parallel.wire.codec import Row
from raydp_parallel.wire.messages import SlotSpec, StateNews, StateUpdate, Writes
from raydp_parallel.wire.windows import PAGE, Layout, Spec, Window, is_dense, specs_of

MAPPED = SMALL
"""Bytes from which on a tensor lies in a window: smaller ones are copied as fast."""

_MOST_WINDOWS = 16

_CPU = torch.device("cpu")


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the version of each tensor; 0 for inference tensors, which have none."""
    return [0 if t.is_inference() else t._version for t in tensors]


def set_versions(tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
    """Set how often tensors were written to, as torch's check of saved tensors counts it."""
    pairs = [p for p in zip(tensors, versions, strict=True) if not p[0].is_inference()]
    if pairs:
        torch._C._autograd._unsafe_set_version_counter(*zip(*pairs, strict=True))


def _geometry(t: Tensor) -> Any:
    return t.dtype, t.layout, t.requires_grad, t.device


def _geometries(row: Sequence[Tensor]) -> list[Any]:
    return [
        (t.dtype, t.shape, t.stride(), t.requires_grad, t.device, t.is_conj())
        if t.layout is torch.strided and not t.is_nested
        else _geometry(t)
        for t in row
    ]


def _address(t: Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # a layout without a storage of its own
        return 0


def _addresses(row: Sequence[Tensor]) -> list[int]:
    try:
        return [t.data_ptr() for t in row]
    except RuntimeError:
        return [*map(_address, row)]


def _is_plain(t: Tensor) -> bool:
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
    return plain_bits(t)


def _shadow(t: Tensor) -> Tensor:
    return t.detach().clone() if _is_plain(t) else bits(t).clone()


def same(one: Tensor, other: Tensor) -> bool:
    """Compare two tensors to the bit."""
    return _alike(bits(one), bits(other))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors; plain ones into one run of memory."""
    for t in tensors:  # no function for each
        odd = (type(t) is not Tensor and type(t) is not nn.Parameter) or t.is_nested
        odd = odd or t.layout is not torch.strided or t.is_quantized or t.is_conj() or t.is_neg()
        if odd or not (t.is_contiguous() or is_dense(t)):
            return [t.detach().clone() for t in tensors]
    layout = Layout(specs_of(tensors))
    device = tensors[0].device if tensors else _CPU
    found = layout.views(torch.empty(layout.size, dtype=torch.uint8, device=device))
    copy_row(found, [*tensors])
    return found


class Mark(NamedTuple):
    """The tensors of a module at one moment, and how often they had been written to.

    Attributes:
        revision: The number of the state.
        structure: When the structure had changed last.
        tensors: The tensors, by slot.
        versions: Their versions, in that order.
        written: By how much replicas' writes have moved each.
    """

    revision: int
    structure: int
    tensors: dict[int, Tensor]
    versions: list[int]
    written: dict[int, int]


class _Seen(NamedTuple):
    """Versions, addresses and geometry of all tensors at the last look."""

    versions: list[int]
    addresses: list[int]
    geometry: list[Any]


def _seen(row: Sequence[Tensor]) -> _Seen:
    return _Seen(versions_of(row), _addresses(row), _geometries(row))


class Master:
    """A module in the driver.

    Args:
        module: The module.
        number: Its number in the replicas.

    Attributes:
        revision: The number of its states so far.
        tensors: Its tensors, by slot.
        kinds: The kind of each: ``"parameter"``, ``"buffer"``, or ``"attribute"`` for others.
        resident: Trains it in the replicas; None if nothing does.
        trained: The slots of parameters that are trained there.
        lagging: Those of which the values are there; writes to their memory here do not count.
        edited: True if the program has changed one of them.
        alike: False if chunks had gradients of different parameters, which replicas do not add.
    """

    def __init__(self, module: nn.Module, number: int) -> None:
        self.number = number
        self._module = weakref.ref(module)
        self.revision = 0
        self.tensors: dict[int, Tensor] = {}
        self.resident: Any = None
        self.trained: set[int] = set()
        self.lagging: set[int] = set()
        self.edited = False
        self.alike = True
        self._slots: dict[int, int] = {}
        self._next = 0
        self._structure = b""
        self.structure_at = 0
        self._codes, self._code_at = Codes(), list[int]()
        self._sources = sources.Sent()
        self._seen = _Seen([], [], [])
        self._spec_at: dict[int, int] = {}
        self._content_at: dict[int, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._windows: dict[int, Window] = {}
        self._moved_out: set[int] = set()
        self._plain: set[int] = set()  # those that a run may hold
        # Contents as they were last sent: by whether replicas map the large ones, and by slot for
        # those that lie in no run.
        self._runs: dict[bool, StateRun] = {}
        self._shadows: dict[int, Tensor] = {}
        self._laid_at = 0  # since when a run may have to hold other tensors
        self._checked: dict[bool, int] = {}
        self._updates: dict[tuple[int, bool, bool], StateUpdate] = {}
        self._last_copies: dict[int, Tensor] = {}
        self._last_like: list[Any] = []
        self._dirty: set[int] = set()
        self._fresh: set[int] = set()  # with contents that the last `sync` found changed
        self.written: dict[int, int] = {}
        self.kinds: dict[int, str] = {}
        self._leaves: list[tuple[Tensor, str]] | None = None
        _masters.add(self)

    @property
    def module(self) -> nn.Module:
        """The module."""
        found = self._module()
        assert found is not None
        return found

    @property
    def home(self) -> torch.device:
        """The device of the module."""
        return next((t.device for t in self.tensors.values()), _CPU)

    # Look.

    def sync(self, code: bool = False) -> None:
        """Find out what changed since the last look, and number the state if something did.

        Args:
            code: True if a function is sent besides, whose module may be new.
        """
        found: dict[int, Tensor] = {}

        def slot(tensor: Tensor) -> int:
            # Ids come again when a tensor dies, so the slot's own tensor is compared.
            number = self._slots.get(id(tensor), 0)
            if self.tensors.get(number, found.get(number)) is not tensor:
                self._next += 1
                number = self._slots[id(tensor)] = self._next
            found[number] = tensor
            return number

        structure = look(self.module, slot, self._codes)
        if structure != self._structure or found.keys() != self.tensors.keys():
            self._restructure(found)
            self.revision += 1
            self.structure_at = self.revision
            self._sources.look(self.revision)
            self._code_at += [self.revision] * (len(self._codes.kept) - len(self._code_at))
            self._structure = structure  # last: Ctrl-C before makes the next look begin again
        elif code and self._sources.look(self.revision + 1):
            self.revision += 1
        row = list(self.tensors.values())
        for kind in {*map(type, row)}:  # what other models' replicas train is fetched
            if issubclass(kind, Lagging) and kind.source is not self.resident:
                kind.source.pull()
        # Lists are compared whole, in C: mostly nothing changed, or all did, by an optimizer.
        now = PLAINLY(_seen, (), (row,))
        self._fresh = set()
        if now != self._seen or self._dirty or len(self._content_at) != len(row):
            self._compare(now)

    def _restructure(self, found: dict[int, Tensor]) -> None:
        gone = self.tensors.keys() - found.keys()
        if self.trained & gone:
            self.resident.leave(self.trained & gone)  # while replicas still have them
        self._leaves = None
        for number in gone:
            for known in (self._spec_at, self._content_at, self._places, self._shadows):
                known.pop(number, None)
            del self._slots[id(self.tensors[number])]
        before = dict(zip(self.tensors, zip(*self._seen, strict=True), strict=False))
        kept = [before.get(number, (-1, -1, None)) for number in found]
        self._seen = _Seen(*map(list, zip(*kept, strict=True))) if kept else _Seen([], [], [])
        registered = {id(t) for t in self.module.buffers()}
        self.kinds = {}
        for number, tensor in found.items():
            plain = "buffer" if id(tensor) in registered else "attribute"
            self.kinds[number] = "parameter" if isinstance(tensor, nn.Parameter) else plain
        self.tensors = found  # another dict: marks keep the one before
        self.written = {n: by for n, by in self.written.items() if n in found}
        self._laid_at = self.revision + 1
        used = {key for key, _ in self._places.values()}
        self._windows = {key: window for key, window in self._windows.items() if key in used}

    def _compare(self, now: _Seen) -> None:
        """Number the changes of tensors."""
        if len({t.device for t in self.tensors.values()}) > 1:
            check_devices(self.module)
        self.revision += 1
        then, grown = self._seen, []
        for i, (number, tensor) in enumerate(self.tensors.items()):
            new = number not in self._content_at
            # Another geometry makes a new tensor in the replica; a flag alone sends no contents.
            if new or now.geometry[i] != then.geometry[i]:
                self._spec_at[number] = self.revision
                self._leaves = None
                contents = new or now.geometry[i][:3] != then.geometry[i][:3]
            else:
                contents = False
            if not new and now.addresses[i] != then.addresses[i]:
                # Older graphs keep the memory that it had.
                self._spec_at[number] = self.revision
                if self._places.pop(number, None) is not None:
                    self._moved_out.add(number)  # it may move again: from now on it is sent
                    self._laid_at = self.revision
            if (
                number not in self._places
                and (new or contents)
                and self._can_be_mapped(number, tensor)
            ):
                grown.append(number)
            written = now.versions[i] != then.versions[i] or now.addresses[i] != then.addresses[i]
            if (contents or written or number in self._dirty) and number not in self.lagging:
                self._content_at[number] = self.revision
                self._fresh.add(number)
                self.edited = self.edited or number in self.trained
        if grown:
            if len(self._windows) >= _MOST_WINDOWS:  # a new replica gets all in one message
                grown += self._places
                for number in self._places:
                    self._spec_at[number] = self._content_at[number] = self.revision
                self._windows.clear()
            self._map(grown)
            # The addresses that `_map` gave are no edits of the program's.
            now = now._replace(addresses=_addresses([*self.tensors.values()]))
        if now.geometry != then.geometry or not self._plain:
            self._plain = set()
            for number, tensor in self.tensors.items():
                if _is_plain(tensor) and is_dense(tensor) and tensor.device == self.home:
                    self._plain.add(number)
                    if number not in self.trained:
                        self._shadows.pop(number, None)
            self._laid_at = self.revision
        self._keep_copies(self._fresh - self._in_runs())
        self._dirty.clear()
        self._seen = now

    def _keep_copies(self, numbers: Iterable[int]) -> None:
        """Copy contents that lie in no run, to compare those of the next forward with them."""
        for number in numbers:
            t, shadow = self.tensors[number], self._shadows.get(number)
            if (
                shadow is not None
                and shadow.dtype == t.dtype
                and shadow.shape == t.shape
                and number in self._plain
            ):
                shadow.copy_(t.detach())
            else:
                self._shadows[number] = _shadow(t)

    def leaves(self) -> list[tuple[Tensor, str]]:
        """List the tensors that require a gradient, by slot, with their kinds."""
        if self._leaves is None:
            self._leaves = []
            for number in sorted(self.tensors):
                if self.tensors[number].requires_grad:
                    self._leaves.append((self.tensors[number], self.kinds[number]))
        return self._leaves

    # Windows.

    def _can_be_mapped(self, number: int, t: Tensor) -> bool:
        if t.device != _CPU or type(t) is not nn.Parameter or t.is_inference():
            return False
        if not _is_plain(t) or not is_dense(t):
            return False
        size = t.numel() * t.element_size()
        if size < MAPPED or number in self._moved_out or t.is_shared():  # with other processes
            return False
        storage = t.untyped_storage()
        # Memory that somebody else looks at stays where it is.
        alone = torch._C._storage_Use_Count(storage._cdata) <= 2  # the tensor, and `storage`
        return alone and storage.nbytes() == size

    def _map(self, numbers: list[int]) -> None:
        """Move large tensors into a window of their own pages."""
        specs = []
        for number in numbers:
            t = self.tensors[number]
            specs.append(Spec(t.dtype, t.shape, t.stride(), False))
        layout = Layout(specs, PAGE)
        window = Window(layout.size)
        key = self.revision
        self._windows[key] = window
        for number, spec, offset in zip(numbers, specs, layout.offsets, strict=True):
            tensor, there = self.tensors[number], window.alone(spec, offset)
            there.copy_(tensor.detach())
            tensor.data = there
            self._places[number] = key, offset

    # What replicas train.

    def slot(self, tensor: Tensor) -> int | None:
        """Return the slot of a tensor; None if the module does not have it."""
        found = self._slots.get(id(tensor))
        return found if found is not None and self.tensors.get(found) is tensor else None

    def train(self, slots: set[int]) -> None:
        """Let replicas have parameters of their own, which no window holds."""
        self.trained = slots
        for number in slots:
            self._moved_out.add(number)
            self._places.pop(number, None)
        self.revision += 1
        self._laid_at = self.revision
        self._spec_at.update(dict.fromkeys(slots, self.revision))
        self._dirty |= slots  # which makes copies to compare with

    def lag(self) -> None:
        """Let the weights that replicas train be older here. Nobody compares them with copies."""
        if self.lagging is not self.trained:
            self.lagging = self.trained
            for number in self.trained:
                self._shadows.pop(number, None)

    def catch_up(self) -> None:
        """Note that all weights are of now."""
        self._keep_copies((self.trained & self.tensors.keys()) - self._shadows.keys())
        self.lagging = set()

    @plainly
    def take(self, weights: dict[int, Tensor]) -> None:
        """Take over what replicas have trained."""
        written = dict(self.written)  # marks keep the one before
        for i, (number, tensor) in enumerate(self.tensors.items()):
            if number in weights:
                with torch.no_grad():
                    tensor.copy_(weights[number])
                written[number] = written.get(number, 0) + 1
                self._seen.versions[i] = tensor._version
        self._keep_copies(weights.keys() & self.tensors.keys())
        self._dirty -= weights.keys()
        self.written = written
        self._updates = {}  # which tell versions

    # What replicas need.

    def _in_runs(self) -> set[int]:
        return self._plain - self.trained

    def run(self, maps: bool) -> StateRun | None:
        """Return the run with the contents of now; None without plain tensors.

        Args:
            maps: True for replicas that map large tensors.
        """
        run = self._runs.get(maps)
        if run is None or self._checked[maps] < self._laid_at:
            found = {}
            mine = self._in_runs()
            for number, tensor in self.tensors.items():
                if number in mine and not (maps and number in self._places):
                    found[number] = tensor
            if not found:
                self._runs.pop(maps, None)
                return None
            if run is None or not run.fits(found):
                sent = {}  # as edits that are still to be found must not slip in
                if run is not None:
                    for number, view in run.views.items():
                        if self._content_at.get(number, 0) <= run.revision:
                            sent[number] = view
                run = self._runs[maps] = StateRun(self.revision, found, sent)
            self._checked[maps] = self._laid_at
        if run.revision < self.revision:
            late = [n for n in run.spec.slots if self._content_at[n] > run.revision]
            run.take(late, self.tensors, self.revision)
        return run

    def behind(self, maps: bool) -> bool:
        """Tell if a run is to be written to before replicas get the contents of now."""
        run = self._runs.get(maps)
        return run is not None and run.revision < self.revision

    def lacking(self, slots: Sequence[Any]) -> int:
        """Count the bytes that all replicas lack, if these lie in a run."""
        known = {slot.revisions.get(self.number, 0) for slot in slots}
        if len(known) > 1 or self.resident is not None:
            return 0
        found = [n for n in self.tensors if self._content_at[n] > max(known)]
        if not self._in_runs().issuperset(found):
            return 0
        return sum([self.tensors[n].nbytes for n in found])

    @plainly
    def update_from(
        self,
        revision: int,
        maps: bool,
        shared: bool,
        weights: dict[int, Tensor] | None = None,
    ) -> StateUpdate | None:
        """Collect the changes since a state: once for all replicas that have it.

        Args:
            revision: The state that a replica has; 0 for none.
            maps: True if it maps large tensors.
            shared: True if it reads the run from memory that both processes have.
            weights: Contents that it gets in the place of the master's.
        """
        if revision == self.revision and weights is None:
            return None
        found = self._updates.get((revision, maps, shared))
        if found is None or found.revision != self.revision or weights is not None:
            found = self._collect(revision, maps, shared, weights or {})
            if weights is None:
                kept = {k: u for k, u in self._updates.items() if u.revision == self.revision}
                self._updates = {**kept, (revision, maps, shared): found}
        return found

    def _collect(
        self, revision: int, maps: bool, shared: bool, weights: dict[int, Tensor]
    ) -> StateUpdate:
        specs, versions, changed = {}, {}, []
        contents: dict[int, Tensor] = {}
        windows: dict[int, Window] = {}
        run = self.run(maps)
        views = {} if run is None else run.views
        for number, tensor in self.tensors.items():
            place = self._places.get(number) if maps else None
            if self._spec_at[number] > revision:
                specs[number] = self._spec(tensor, place)
                if place is not None and place[0] > revision:
                    windows[place[0]] = self._windows[place[0]]
            if self._content_at[number] > revision:
                versions[number] = 0 if tensor.is_inference() else tensor._version
                if number in views:
                    changed.append(number)
                elif place is None:
                    contents[number] = tensor.detach()  # which never becomes one that lags
        contents.update(weights)
        structure = self._structure if self.structure_at > revision else None
        code = None
        if structure is not None:
            new = [i for i, at in enumerate(self._code_at) if at > revision]
            if new:
                code = pickling.dumps([(i, self._codes.kept[i]) for i in new])
        laid = run is not None and run.spec.key > revision
        ranges = [] if run is None else run.ranges(run.spec.slots if laid else changed)
        news = StateNews(
            structure=structure,
            code=code,
            sources=self._sources.latest if self._sources.at > revision else None,
            specs=specs,
            run=run.spec if run is not None and laid else None,
            ranges=tuple(ranges),
            slots=tuple(contents),
            versions=versions,
        )
        sent = [*[self.tensors[n] for n in changed], *contents.values()]
        size = sum([t.numel() * t.element_size() for t in sent])
        row = Row(contents.values(), flags=False)
        update = StateUpdate(self.revision, pickle.dumps(news), size, row, windows)
        if run is None:
            return update
        if not shared:
            return update._replace(parts=tuple([run.memory[a:b] for a, b in ranges]))
        window = run.window()
        return update._replace(window=window if laid else None)

    def _spec(self, t: Tensor, place: tuple[int, int] | None) -> SlotSpec:
        parameter = isinstance(t, nn.Parameter)
        if place is None:
            return SlotSpec(parameter, t.requires_grad)
        key, offset = place
        return SlotSpec(
            parameter, t.requires_grad, key, offset, tuple(t.shape), t.stride(), t.dtype
        )

    def verify(self) -> bool:
        """Compare contents with those that were last sent; returns whether something was edited
        behind its version.
        """
        edited: set[int] = set()
        for maps, run in self._runs.items():
            if self._checked[maps] >= self._laid_at:  # else it is looked at when it is laid out
                sent = {n for n in run.spec.slots if self._content_at[n] > run.revision}
                sent |= self._fresh  # just now, and most often that is all
                if not sent.issuperset(run.spec.slots):
                    edited.update(set(run.edited(self.tensors)) - sent)
        for number, shadow in self._shadows.items():
            if number not in self.lagging and not _alike(bits(self.tensors[number]), bits(shadow)):
                edited.add(number)
        self._dirty |= edited
        return bool(edited)

    def stepped(self, parameters: Iterable[Tensor]) -> None:
        """Note what an optimizer has written to."""
        for p in parameters:
            number = self._slots.get(id(p))
            if number is not None and number not in self.trained and p.grad is not None:
                self._dirty.add(number)

    # Writes of replicas.

    def write_back(self, writes: Writes, keep: bool) -> dict[int, Tensor]:
        """Write what the first chunk wrote; returns what was there before, if that is kept."""
        before: dict[int, Tensor] = {}
        self.written = dict(self.written)  # marks keep the one before
        found = [
            (self.tensors[n], *rest) for n, *rest in zip(*writes, strict=True) if n in self.tensors
        ]
        slots = [n for n in writes.slots if n in self.tensors]
        if keep:
            before = self._copied(dict(zip(slots, [t for t, *_ in found], strict=True)))
        versions = versions_of([t for t, *_ in found])
        into, values = [], []
        for tensor, value, _, replaced in found:
            if replaced:
                tensor.data = value.to(tensor.device, copy=True)
            elif tensor.is_inference():
                with torch.inference_mode():
                    tensor.copy_(value)
            else:
                into.append(tensor)
                values.append(value)
        copy_row(into, values)
        moved = [by for _, _, by, _ in found]
        after = [a + b for a, b in zip(versions, moved, strict=True)]
        set_versions([t for t, *_ in found], after)
        self._dirty.update(slots)
        for number, by in zip(slots, moved, strict=True):
            self.written[number] = self.written.get(number, 0) + by
        return before

    def _copied(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        """Copy tensors by slot, into the last copies if no graph has them any more."""
        last, row = self._last_copies, [*tensors.values()]
        like = _geometries(row)
        unused = sys.getrefcount(last) <= 3 and last.keys() == tensors.keys() and row
        if unused and self._last_like == like:
            copy_row([*last.values()], row)
        else:
            last = self._last_copies = dict(zip(tensors, copies(row), strict=True))
            self._last_like = like
        return last

    def mark(self) -> Mark:
        """Note how often each tensor was written to so far."""
        versions = PLAINLY(versions_of, (), (self.tensors.values(),))
        return Mark(self.revision, self.structure_at, self.tensors, versions, self.written)

    def moved_since(self, mark: Mark) -> dict[int, int]:
        """Count the writes since a mark, by slot. Each forward has buffers of its own: later writes
        of replicas do not count.
        """
        now = PLAINLY(versions_of, (), (mark.tensors.values(),))
        if now == mark.versions:
            return {}
        moved = {}
        for (number, tensor), a, b in zip(mark.tensors.items(), mark.versions, now, strict=True):
            if a != b:
                if number in self.trained or not isinstance(tensor, nn.Parameter):
                    b -= self.written.get(number, 0) - mark.written.get(number, 0)
                if b != a:
                    moved[number] = b - a
        return moved

    def changed_since(self, mark: Mark, known: Iterable[int]) -> str | None:
        """Name a change since a mark that is not a replica's write to one of ``known``; None if
        there is none.
        """
        self.sync()
        if self.verify():
            self.sync()
        if self.structure_at != mark.structure:
            return "an attribute or a part of the module"
        for number, tensor in self.tensors.items():
            if self._content_at[number] > mark.revision and number not in known:
                return self._name(tensor)
        now = PLAINLY(versions_of, (), (mark.tensors.values(),))
        for (number, tensor), a, b in zip(mark.tensors.items(), mark.versions, now, strict=True):
            moved = b - a - self.written.get(number, 0) + mark.written.get(number, 0)
            if moved:
                return self._name(tensor)
        return None

    def _name(self, tensor: Tensor) -> str:
        named = *self.module.named_parameters(), *self.module.named_buffers()
        name = next((name for name, one in named if one is tensor), "")
        return f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}"


_masters: weakref.WeakSet[Master] = weakref.WeakSet()


@ambient.uncompiled
def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note a step of any optimizer. Torch's fused ones, and others with kernels of their own, move
    no version: `verify` would find each of their steps, and each forward would run twice. To
    compare contents first would read all weights twice while nobody computes.
    """
    for master in [*_masters]:
        for group in optimizer.param_groups:
            master.stepped(group["params"])


register_optimizer_step_post_hook(_note_step)
