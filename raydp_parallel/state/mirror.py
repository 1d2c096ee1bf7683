"""The driver's side of a module's state: what changed since the state that a replica has.

Before each forward the module is looked at. Its structure is compared as bytes, its tensors by
version, address and geometry. An edit through ``.data`` moves none of these, so the contents of
what was not sent are compared while the replicas run; the forward then runs again.

Large tensors of a CPU module lie in windows that replicas on this machine map: of those nothing is
sent but their versions.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from raydp_parallel.devices import ambient
from raydp_parallel.devices.layout import Layout, Row, is_dense, specs_of
from raydp_parallel.devices.memory import copy_row, is_used
from raydp_parallel.state import sources
from raydp_parallel.state.lagging import PLAINLY, Lagging, Owner
from raydp_parallel.state.look import Structure, check_devices, look
from raydp_parallel.state.run import (
    Seen,
    StateRun,
    Tracked,
    is_plain,
    same,
    seen,
    set_versions,
    storage_of,
    touch,
    versions_of,
)
from raydp_parallel.wire.messages import StateNews, StateUpdate, TensorSpec, Writes
from raydp_parallel.wire.windows import PAGE, Window

_MOST_WINDOWS = 16


class Leaf(NamedTuple):
    """A tensor that gradients may be asked for."""

    tensor: Tensor
    kind: str  # "parameter", "buffer", "attribute" or "input"


Way = Literal["mapped", "shared", "sent"]
"""How a replica gets contents: it maps large tensors, and reads the rest from memory that both
processes have; it reads all there; or all comes in messages.
"""

Mark = dict[Tracked, tuple[int, int, int]]
"""How often tensors had been written to at one moment, how often of these by replicas to buffers,
and how often replicas had written at all: batch norm moves no version.
"""


Contents = dict[int, Tensor]
"""Contents of tensors, by tag."""


class Overlay(Contents):
    """Contents that a forward found, of what replicas have written to since then: with these it may
    run again.
    """


class Master:
    """A module in the driver."""

    def __init__(self, module: nn.Module, number: int) -> None:
        self.number = number  # in the replicas
        self.revision = 0  # the number of its states so far
        self.structure = Structure(module)  # the module but for its tensors
        self.records: dict[int, Tracked] = {}  # its tensors, by their ids
        self.leaves: list[Leaf] = []  # those that require a gradient, in the order of tags
        self.resident: Owner | None = None  # trains it in the replicas; None if nothing does
        self.trained_was_edited = False  # the program has changed a parameter that is trained there
        self.alike = True  # replicas may add gradients: chunks had them of the same parameters
        self._overlays = weakref.WeakValueDictionary[int, Overlay]()  # of forwards so far
        self._looked = 0  # the revision before the last look
        self._runs: dict[bool, StateRun] = {}  # of those that map large tensors, and of others
        self._updates: dict[tuple[int, Way], StateUpdate] = {}  # to the state of now
        _masters.add(self)

    @property
    def module(self) -> nn.Module:
        """The module."""
        found = self.structure.module()
        assert found is not None
        return found

    @property
    def device(self) -> torch.device:
        """The device of the module."""
        return next((one.tensor.device for one in self.records.values()), torch.device("cpu"))

    def tag(self, tensor: Tensor) -> int | None:
        """Return the tag of a tensor; None if the module does not have it."""
        found = self.records.get(id(tensor))
        return None if found is None else found.tag

    # Look.

    def look(self) -> None:
        """Find out what changed since the last look, and number the state if something did."""
        self._looked, self._updates = self.revision, {}
        last, texts = self.structure, sources.current()
        if texts != last.sources:
            self.revision += 1
            last.sources, last.sources_at = texts, self.revision
        structure, found = look(self.module, self.records)
        if structure != last.bytes:
            self._restructure(found)
            last.at = self.revision
            last.bytes = structure  # last: Ctrl-C before makes the next look begin again
            last.tell_if_large()
        self.look_at_tensors()

    def look_at_tensors(self) -> None:
        """Find out what changed of tensors, and number the state if something did."""
        row = [one.tensor for one in self.records.values()]
        for kind in {*map(type, row)}:  # what other models' replicas train is fetched
            if issubclass(kind, Lagging) and kind.owner is not self.resident:
                kind.owner.pull()
        now: list[Seen] = PLAINLY(seen, (), (row,))
        pairs = zip(self.records.values(), now, strict=True)
        changed = [(one, then) for one, then in pairs if one.seen != then]
        if changed:
            self._compare(changed)

    def _restructure(self, found: dict[int, Tracked]) -> None:
        gone = {tag for tag, t in self.trained.items() if id(t) not in found}
        if gone and self.resident is not None:
            self.resident.fetch_departing(gone)  # while replicas still have them
        self.revision += 1
        kinds = dict.fromkeys(map(id, self.module.buffers()), "buffer")
        kinds.update(dict.fromkeys(map(id, self.module.parameters()), "parameter"))
        for key, one in found.items():
            one.kind = kinds.get(key, "attribute")
        self.records = found
        self._arrange()

    def _compare(self, changed: list[tuple[Tracked, Seen]]) -> None:
        """Number the changes of tensors."""
        self.revision += 1
        self._updates = {}
        shaped = list[Tracked]()
        for one, (version, lies, flags) in changed:
            then_version, then_lies, then_flags = one.seen
            moved = lies[0] != then_lies[0]
            if moved:
                one.mapped = None  # it may move again: from now on it is sent
            # Another geometry makes a new tensor in the replica, and older graphs keep the memory
            # that it had. A flag alone sends no contents.
            contents = lies[1:] != then_lies[1:]
            if contents:
                shaped.append(one)
            if (lies, flags) != (then_lies, then_flags):
                one.spec_at = self.revision
            own = one.leader == one.tag
            lags = own and issubclass(type(one.tensor), Lagging)
            if (contents or moved or version != then_version) and not lags:
                one.content_at = self.revision
                self.trained_was_edited |= own
        if any([one.spec_at == self.revision for one, _ in changed]):
            self._arrange()
        for one, now in changed:
            if one.content_at == self.revision and not one.in_run:
                one.keep_copy()
            one.seen = now
        large = [one for one in shaped if one.may_be_mapped()]
        if large:
            self._map(large)

    def _arrange(self) -> None:
        """Look again at which tensors require gradients, and which a run may hold."""
        device = self.device
        check_devices(self.module)
        found = [one for one in self.records.values() if one.tensor.requires_grad]
        self.leaves = [Leaf(o.tensor, o.kind) for o in sorted(found, key=lambda o: o.tag)]
        own = [one for one in self.records.values() if one.leader == one.tag]
        places = {PLAINLY(storage_of, (), (one.tensor,)): one.tag for one in own} | {0: None}
        for one in self.records.values():
            t = one.tensor
            if one.leader != one.tag:
                one.leader = places.get(storage_of(t))
            one.in_run = one.leader is None and is_plain(t) and is_dense(t) and t.device == device
            if one.in_run:
                one.shadow = None
        for mapped, run in [*self._runs.items()]:
            if not run.fits(self._in_run(mapped), device):
                for one in run.records:  # the last look at them
                    here = one.tensor.device == run.memory.device  # else it is sent anyway
                    sent = here and one.content_at <= run.revision
                    if sent and not same(one.tensor, run.views[one.tag]):
                        one.content_at = self.revision
                self._runs[mapped] = StateRun(self.revision, self._in_run(mapped), device)

    def _in_run(self, mapped: bool) -> list[Tracked]:
        return [o for o in self.records.values() if o.in_run and (o.mapped is None or not mapped)]

    def _map(self, large: list[Tracked]) -> None:
        """Move large tensors into a window of their own pages."""
        mapped = {o: o.mapped[0] for o in self.records.values() if o.mapped is not None}
        if len({*mapped.values()}) >= _MOST_WINDOWS:
            # A new replica gets all in one message.
            large += [one for one in mapped if not is_used(one.tensor)]
        specs = specs_of([one.tensor for one in large])
        layout = Layout(specs, PAGE)
        window = Window(layout.size)
        for one, spec, offset in zip(large, specs, layout.offsets, strict=True):
            there = window.tensor(spec, offset)
            there.copy_(one.tensor.detach())
            one.tensor.data = there
            one.mapped = self.revision, offset, window
            one.spec_at = one.content_at = self.revision
            lies = there.data_ptr(), *one.seen[1][1:]
            one.seen = one.seen[0], lies, one.seen[2]  # no edit of the program's
        self._arrange()

    def verify(self) -> bool:
        """Compare contents with those that were last sent; returns whether something was edited
        behind its version.
        """
        edited: list[Tracked] = []
        for run in self._runs.values():
            # What the last look found was sent just now, and most often that is all.
            edited += run.edited(min(run.revision, self._looked))
        for one in self.records.values():
            if one.shadow is not None and not same(one.tensor, one.shadow):
                edited.append(one)
        touch(edited)
        return bool(edited)

    # What replicas train.

    @property
    def trained(self) -> dict[int, Tensor]:
        """The parameters that replicas train, by tag."""
        return {o.tag: o.tensor for o in self.records.values() if o.leader == o.tag}

    def train(self, tags: set[int]) -> None:
        """Let replicas have these parameters of their own, which no window holds, and no others."""
        self.revision += 1
        records = self.records.values()
        for one in records:
            one.leader = one.tag if one.tag in tags else None
        self._arrange()
        for one in records:
            if one.leader is not None:
                one.mapped, one.spec_at = None, self.revision
                touch([one])  # which makes a copy to compare with

    def lag(self, kind: type[nn.Parameter]) -> bool:
        """Let the weights that replicas train be older here, of a class that fetches them; returns
        whether all can be, and nothing else lies in their memory. Nobody compares them with copies.
        """
        led = [one for one in self.records.values() if one.leader is not None]
        found = [one for one in led if one.leader == one.tag]
        lagging = [one.tensor for one in found if type(one.tensor) in (nn.Parameter, kind)]
        for p in lagging:
            p.__class__ = kind
        for one in found:
            if one.late is None:  # of no class that would fetch them
                one.late, one.shadow = PLAINLY(one.tensor.detach, (), ()), None
        return len(lagging) == len(led)

    def catch_up(self) -> None:
        """Note that all weights are of now: parameters are ordinary ones."""
        for one in self.records.values():
            kind, own = type(one.tensor), one.leader == one.tag
            if own and issubclass(kind, Lagging) and kind.owner is self.resident:
                one.tensor.__class__ = nn.Parameter
            if own and one.late is not None:
                one.late = None
                one.keep_copy()

    def take(self, weights: Contents) -> None:
        """Take over what replicas have trained, in the memory that it was trained for: the program
        may have put other tensors in its place.
        """
        records = self.records.values()
        touch([one for one in records if one.leader not in (None, one.tag)])
        for one in records:
            if one.tag in weights and one.late is not None:
                with torch.no_grad():
                    one.late.copy_(weights[one.tag])
                one.written = one.written[0] + 1, one.written[1]
                one.seen = one.tensor._version, one.seen[1], one.seen[2]
        self._updates = {}  # which tell versions

    # What replicas need.

    def _run(self, way: Way) -> StateRun:
        """Return the run with the contents of now."""
        mapped = way == "mapped"
        run = self._runs.get(mapped)
        if run is None:
            run = self._runs[mapped] = StateRun(self.revision, self._in_run(mapped), self.device)
        late = [one for one in run.records if one.content_at > run.revision]
        copy_row([run.views[one.tag] for one in late], [one.tensor for one in late])
        run.revision = self.revision
        return run

    def is_stale(self, way: Way) -> bool:
        """Tell if a run is to be written to before replicas get the contents of now."""
        run = self._runs.get(way == "mapped")
        return run is not None and run.revision < self.revision

    def bytes_to_send(self, known: Iterable[Mapping[int, int]]) -> int:
        """Count the bytes that all replicas lack, which have these revisions of models; 0 if some
        lie in no run.
        """
        revisions = {one.get(self.number, 0) for one in known}
        if len(revisions) > 1 or self.resident is not None:
            return 0
        found = [one for one in self.records.values() if one.content_at > max(revisions)]
        return sum([one.tensor.nbytes for one in found]) if all([o.in_run for o in found]) else 0

    def update_from(
        self, revision: int, way: Way, weights: dict[int, Tensor] | None = None
    ) -> StateUpdate | None:
        """Collect the changes since a state: once for all replicas that have it.

        Args:
            revision: The state that a replica has; 0 for none.
            way: How it gets them.
            weights: Contents that it gets in the place of the master's.
        """
        key = revision, way
        if weights is not None:
            return PLAINLY(self._collect, (), (*key, weights))  # type: ignore[no-any-return]
        if key not in self._updates and revision != self.revision:
            self._updates[key] = PLAINLY(self._collect, (), (*key, {}))
        return self._updates.get(key)

    def _collect(self, revision: int, way: Way, weights: dict[int, Tensor]) -> StateUpdate:
        specs: dict[int, TensorSpec] = {}
        windows: dict[int, Window] = {}
        for one in self.records.values():
            if one.spec_at > revision:
                t, mapped = one.tensor, None
                if way == "mapped" and one.mapped is not None:
                    key, offset, window = one.mapped
                    mapped = key, offset, specs_of([t])[0]
                    if key > revision:
                        windows[key] = window
                specs[one.tag] = TensorSpec(isinstance(t, nn.Parameter), t.requires_grad, mapped)
        run = self._run(way)
        laid = run.spec.key > revision
        ranges = run.ranges(0 if laid else revision)
        changed = [one for one in self.records.values() if one.content_at > revision]
        versions = versions_of([one.tensor for one in changed])
        sent = {o.tag: o.tensor for o in changed if o.mapped is None or way != "mapped"} | weights
        # Detached, which never become ones that lag.
        contents = {tag: t.detach() for tag, t in sent.items() if tag not in run.views}
        last = self.structure
        news = StateNews(
            structure=last.bytes if last.at > revision else None,
            sources=last.sources if last.sources_at > revision else None,
            specs=specs,
            run=run.spec if laid else None,
            ranges=tuple(ranges),
            tags=tuple(contents),
            versions=dict(zip([one.tag for one in changed], versions, strict=True)),
        )
        shown = None if way == "sent" else run.window()
        return StateUpdate(
            revision,
            self.revision,
            pickle.dumps(news),
            size=sum([t.numel() * t.element_size() for t in sent.values()]),
            contents=Row(contents.values()),
            windows=windows,
            parts=tuple([run.memory[a:b] for a, b in ranges]) if way == "sent" else (),
            window=shown if laid else None,
        )

    # Writes of replicas.

    def write_back(self, writes: Writes, since: Mark | None = None) -> None:
        """Write what the first chunk wrote. In a backward a checkpoint wrote it, to the buffers of
        its own forward, which ended with a mark: it replaces nothing that was written ``since``.
        """
        known = {one.tag: one for one in self.records.values()}
        rows = [(known[n], *row) for n, *row in zip(*writes, strict=True) if n in known]
        if since is not None:
            now = self.mark([one for one, *_ in rows])
            rows = [row for row in rows if since.get(row[0]) == now[row[0]]]
        records = [one for one, *_ in rows]
        tensors = [one.tensor for one in records]
        overlays = [*self._overlays.values()]
        before = self._copied(records) if overlays else {}
        for overlay in overlays:
            overlay.update(before | overlay)
        touch(records)
        versions = versions_of(tensors)
        into, values = [], []
        for one, value, by, replaced in rows:
            # Each forward has buffers of its own.
            unseen = 0 if isinstance(one.tensor, nn.Parameter) else by
            one.written = one.written[0] + unseen, one.written[1] + 1
            if replaced or one.mapped is not None:  # other replicas map its memory, for graphs
                one.tensor.data = value.to(one.tensor.device, copy=True)
            elif one.tensor.is_inference():
                # Not for all: sparse ones would get parts of that mode.
                with torch.inference_mode():
                    one.tensor.copy_(value)
            else:
                into.append(one.tensor)
                values.append(value)
        copy_row(into, values)
        set_versions(tensors, [a + by for a, (_, _, by, _) in zip(versions, rows, strict=True)])
        if since is not None:  # the graph may be used again
            since.update(self.mark(records))

    def overlay(self) -> Overlay:
        """Make one, to which writes from now on add what they replace."""
        made = Overlay()
        self._overlays[id(made)] = made
        return made

    def _copied(self, records: list[Tracked]) -> Contents:
        """Copy tensors, plain ones at once: on a GPU each clone is a launch."""
        plain = [one for one in records if one.in_run]
        before = {one.tag: torch.empty_like(one.tensor) for one in plain}
        copy_row([*before.values()], [one.tensor for one in plain])
        before.update((o.tag, o.tensor.detach().clone()) for o in records if not o.in_run)
        return before

    def mark(self, records: Collection[Tracked] | None = None) -> Mark:
        """Note how often tensors were written to so far: all, or some."""
        chosen = self.records.values() if records is None else records
        versions = PLAINLY(versions_of, (), ([one.tensor for one in chosen],))
        return {one: (n, *one.written) for one, n in zip(chosen, versions, strict=True)}

    def moved_since(self, mark: Mark) -> dict[int, int]:
        """Count the writes since a mark, by tag, but for those of replicas to buffers."""
        now = self.mark(mark.keys())
        found = {o.tag: now[o][0] - v - (now[o][1] - w) for o, (v, w, _) in mark.items()}
        return {tag: by for tag, by in found.items() if by}

    def changed_since(self, revision: int, structure: bytes, known: Collection[int]) -> str | None:
        """Name a change between a state, of this structure, and the last look, but for the contents
        of ``known``; None if there is none: a mode or an attribute may be again what it was.
        """
        if self.verify():
            self.look_at_tensors()
        if self.structure.bytes != structure:
            return "an attribute or a part of the module"
        for one in self.records.values():
            if one.content_at > revision and one.tag not in known:
                named = *self.module.named_parameters(), *self.module.named_buffers()
                name = next((name for name, t in named if t is one.tensor), "")
                return f"{'parameter' if one.kind == 'parameter' else 'buffer'} {name!r}"
        return None


_masters: weakref.WeakSet[Master] = weakref.WeakSet()


@ambient.uncompiled
def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Note a step of any optimizer. Torch's fused ones, and others with kernels of their own, move
    no version: `verify` would find each of their steps, and each forward would run twice. To
    compare contents first would read all weights twice while nobody computes.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for master in [*_masters]:
        found = [master.records[id(p)] for p in params if id(p) in master.records]
        touch([one for one in found if one.leader != one.tag and one.tensor.grad is not None])


register_optimizer_step_post_hook(_note_step)
