"""The executor: starts replicas, runs one call per chunk, and says what it did.

All wrappers of a process share one executor, and through it one replica per device, unless they
were given another. Chunks are logical and replicas physical: what chunk i computes depends on i
only, never on the replica that runs it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from raydp_parallel import cluster
from raydp_parallel.calls.dispatcher import Dispatcher
from raydp_parallel.calls.replica_groups import ReplicaGroups
from raydp_parallel.cluster import registry
from raydp_parallel.cluster.backend import (
    Death,
    DeviceId,
    DevicePlace,
    device_id,
    known_places,
    places,
)
from raydp_parallel.cluster.replica_set import ReplicaSet
from raydp_parallel.cluster.replica_slots import ChunkAnswer, ChunkCall, ReplicaSlot
from raydp_parallel.devices import forks
from raydp_parallel.monitoring.reporter import Reporter
from raydp_parallel.monitoring.stats import ExecutorStats, ReplicaInfo
from raydp_parallel.options import Options
from raydp_parallel.state import code_shipping
from raydp_parallel.state.tracker import ModuleTracker
from raydp_parallel.transport.links import Link
from raydp_parallel.transport.message_bytes import pack, unseal

log = logging.getLogger("raydp_parallel")

_PATIENCE = 60.0
"""Seconds that `Executor.close` waits for replicas which train a model, and may be busy, beside the
time that its weights and the optimizer's state may take to arrive.
"""

_SLOWEST = 2e7
"""Bytes per second that arrive at least."""

_RECENT = 4
"""Modules of the functional interface that stay in the replicas after a call, so that the next call
need not send them again.
"""


class Executor:
    """Replicas for any number of models: one actor per device.

    A wrapper without an executor of its own uses the process's; give it one to choose when actors
    start and end::

        with Executor(["cpu", "cpu"]) as executor:
            model = DataParallel(net, executor=executor)

    Args:
        device_ids: Logical GPUs of the cluster, or ``"cpu"`` entries; None is every GPU of the
            cluster. With ``()`` replicas start when a wrapper first needs them.
        options: Settings that few programs need.

    Attributes:
        replica_set: The replicas by device.
        recorder: The record of where time went, and of what travelled.
        replays: Whether calls are run again when a replica dies, and keep what that takes.
        groups: The groups of replicas that sum gradients and pass weights on.
        synced_groups: Those that chunks exchange tensors in while they run; others, because the two
            have no order.
    """

    def __init__(
        self, device_ids: Sequence[Any] | None = None, *, options: Options | None = None
    ) -> None:
        self.options = options or Options()
        self._every = device_ids is None
        self.device_ids = normalize(device_ids, self.options) if device_ids != () else []
        self.replica_set = ReplicaSet(self.options)
        self.replica_set.before_leaving = weakref.WeakMethod(self._bring_to_safety)
        self.recorder = self.replica_set.recorder
        self.replays = self.replica_set.replays
        self.groups = ReplicaGroups(self.replica_set)
        self.synced_groups = ReplicaGroups(self.replica_set)
        self._reporter: Reporter | None = None
        self._trackers: weakref.WeakValueDictionary[int, ModuleTracker] = (
            weakref.WeakValueDictionary()
        )
        self._recent: deque[ModuleTracker] = deque(maxlen=_RECENT)
        self._behind: set[Any] = set()
        if self.device_ids:
            self.slots(self.device_ids)

    def __reduce__(self) -> Any:
        return shared, (self.options,)  # in another process there are other replicas

    def __deepcopy__(self, memo: Any) -> Executor:
        return self

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.replica_set.closed

    @property
    def link(self) -> Link:
        """What bytes travel by."""
        return self.replica_set.backend.link

    @property
    def exchanges(self) -> bool:
        """Whether replicas may sum gradients and pass weights on among themselves: they are on
        several nodes, or the options say so.
        """
        if self.options.link == "collective" or "nccl" in self.options.gpu_paths:
            return True
        hellos = [slot.hello for slot in [*self.replica_set.slots.values()]]
        return len({hello.node for hello in hellos if hello is not None}) > 1

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """The replicas, one entry per device."""
        self.replica_set.check_own()
        return tuple(slot.info() for slot in self.replica_set.slots.values())

    def stats(self, model: nn.Module | None = None) -> ExecutorStats:
        """What the replicas did so far, for all models or for one."""
        self.replica_set.check_own()
        known = self.known(model) if model is not None else None
        only = None if model is None else known.id if known is not None else 0
        return self.recorder.stats(
            self.replica_set.totals,
            [*self.replica_set.slots.values()],
            self.replica_set.link,
            only,
        )

    def close(self) -> None:
        """End the replicas. Their graphs are lost; what the driver holds is not, and what
        `DataParallel.optimizer` trained is fetched first. That may take a minute for each model,
        and a second for each 20 MB of it: replicas may be busy, with a call of another thread. May
        be called twice.

        In a forked process it ends nothing: the replicas are the parent's.
        """
        if self.replica_set.forked:
            return
        trained = [t.training for t in [*self._trackers.values()] if t.training is not None]
        patience = None
        try:
            for training in trained if not self.closed else ():
                if patience is not None:
                    patience.cancel()
                patience = self._be_patient(_PATIENCE + training.size / _SLOWEST)
                training.end()
                self._behind.discard(training)
        finally:  # also after Ctrl-C: nothing would end the replicas later
            self.replica_set.release()
            with self.replica_set.lock:
                if patience is not None:
                    patience.cancel()
                if not self.replica_set.closed:
                    self.replica_set.closed = True
                    try:
                        self._stop_reports()
                    finally:
                        self.replica_set.close()

    def _be_patient(self, seconds: float) -> threading.Timer:
        """End the replicas after some time in which `close` waits for them, or for a thread that
        does.
        """
        patience = threading.Timer(seconds, lambda: self._wait_no_more(seconds))
        patience.daemon = True
        patience.start()
        return patience

    def _wait_no_more(self, seconds: float) -> None:
        log.warning("close() waited for %g s for replicas that train, and ends them now", seconds)
        self.replica_set.backend.stop([slot.client for slot in self.replica_set.ready()])

    def _bring_to_safety(self, going: Sequence[ReplicaSlot]) -> None:
        """Fetch what some replicas, which are about to end, are the last to have."""
        for tracker in [*self._trackers.values()]:
            if tracker.training is not None:
                tracker.training.bring_to_safety(going)

    def note_behind(self, training: Any, behind: bool) -> None:
        """Keep what trains in the replicas for as long as the master lacks steps, although the
        program has let go of it: `close` fetches them.
        """
        if behind:
            self._behind.add(training)
        else:
            self._behind.discard(training)

    def grow(self, timeout: float | None = None) -> int:
        """Wait for replicas that are missing, between two calls: after a node was added, or before
        a long run.

        Devices of an elastic executor that had no room, those that left a node, and those that died
        join by themselves too, once they are ready; this waits for them. An executor for every GPU
        of the cluster (``device_ids`` left out) gets those that were added since. How many chunks a
        wrapper makes does not change: those made from now on make more.

        Args:
            timeout: Seconds to wait for all; None is ``placement_timeout``. Fewer are no error.

        Returns:
            How many joined.
        """
        with self.replica_set.lock:
            self._refresh()
            seconds = self.options.placement_timeout if timeout is None else timeout
            joined = self.replica_set.grow(seconds)
            more: list[int] = []
            if self._every:
                more = [k for k in cluster.all_gpus(self.options) if k not in self.device_ids]
            if more:
                self._fill(places(more))
                self.device_ids = [*self.device_ids, *more]
            return joined + len(more)

    def slots(self, device_ids: Sequence[DeviceId]) -> list[ReplicaSlot]:
        """The slots for ``device_ids``. Where a replica died, another stands in until its successor
        is there.
        """
        wanted = known_places(tuple(device_ids))
        with self.replica_set.lock:
            self._refresh()
            self._fill(wanted)
            return [self.replica_set.slots[place] for place in wanted]

    def revive(self, slots: Sequence[ReplicaSlot]) -> None:
        """Make sure that each slot has a replica, or one that is starting."""
        for slot in slots:
            if not slot.ready:
                with self.replica_set.lock:
                    self._refresh()
                    self._fill([slot.place for slot in slots])
                return

    def wait_for(self, slots: Sequence[ReplicaSlot]) -> None:
        """Wait until each of these slots has a replica, for as long as placement may take."""
        self.revive(slots)
        if not all(slot.ready for slot in slots):
            with self.replica_set.lock:
                self.replica_set.grow(self.options.placement_timeout)

    def tracker(self, module: nn.Module, keep: bool = False) -> ModuleTracker:
        """The tracker of a module, which all its wrappers share. The caller keeps it alive.

        Call it after `slots`, which notices if the cluster was left.

        Args:
            module: The module.
            keep: Whether the executor keeps it too, for a while: for callers that hold nothing
                between two calls.
        """
        with self.replica_set.lock:
            tracker = self.known(module)
            if tracker is None:
                self._refresh()
                tracker = ModuleTracker(module, self.replica_set.backend.link)
                weakref.finalize(tracker, _drop_model, weakref.ref(self), tracker.id).atexit = False
                self._trackers[id(module)] = tracker
                self.recorder.accounts.meet(tracker.id, module)
            if keep and tracker not in self._recent:
                self._recent.append(tracker)
            return tracker

    def known(self, module: nn.Module) -> ModuleTracker | None:
        """The tracker that a wrapper of a module keeps already, and with it what the replicas
        hold.
        """
        tracker = self._trackers.get(id(module))
        return tracker if tracker is not None and tracker.module is module else None

    def run(
        self,
        jobs: Sequence[ChunkCall],
        first: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[ChunkAnswer]:
        """Run one call per chunk, and wait for all.

        Args:
            jobs: The calls.
            first: As in `Dispatcher.send`.
            meanwhile: As there.

        Raises:
            ReplicaDied: A replica's process ended, and with ``on_fault="replay"`` others that did
                its work, too. All other calls have ended.
        """
        calls = Dispatcher(self.replica_set, jobs)
        calls.send(first, meanwhile)
        return calls.answers()

    def answered(self, groups: Sequence[Sequence[Any]], wait: bool) -> list[bool]:
        """Which of some groups of pending calls have all their answers. None is taken.

        Args:
            groups: The groups.
            wait: Whether to wait for one more answer, for as long as a call may take.
        """
        calls = [call for group in groups for call in group]
        come = {id(calls[at]) for at in self.replica_set.backend.come(calls, wait)}
        return [all(id(call) in come for call in group) for group in groups]

    def send_code(self, answers: Sequence[ChunkAnswer]) -> bool:
        """Send modules that replicas could not import, or found with other source; returns whether
        to run the call again.
        """
        lacking: dict[str, list[Any]] = {}
        for answer in answers:
            name = code_shipping.wanted(answer.reply.failure)
            if name is not None:
                lacking.setdefault(name, []).append(answer.slot.client)
        packages = {
            name: package for name in lacking if (package := code_shipping.pack(name)) is not None
        }
        with self.replica_set.lock:
            sent = [
                self.replica_set.backend.send_code(package, lacking[name])
                for name, package in packages.items()
            ]
            return any(sent)

    def show_work(self, replica: int, text: str) -> None:
        """Let Ray's dashboard say what a replica, by its number, is doing."""
        for slot in [*self.replica_set.slots.values()]:  # another thread may add one
            if slot.index == replica and slot.ready:
                self.replica_set.backend.show(slot.client, text)

    def flush(self) -> list[tuple[int, int]]:
        """Tell the replicas now what the driver released; returns how many models and graphs each
        still holds.
        """
        with self.replica_set.lock:
            self._refresh()
            self.replica_set.pick_up()
            backend = self.replica_set.backend
            calls = [
                backend.submit(s.client, "forget", pack(s.contents.forget()), ())
                for s in self.replica_set.ready()
            ]
            answers = backend.collect(calls)
            return [
                unseal(left, backend.link)[0] for left in answers if not isinstance(left, Death)
            ]

    def _refresh(self) -> None:
        """Drop the trackers if the cluster was left: what its replicas held is gone."""
        if self.replica_set.refresh():
            self._trackers.clear()
            self._recent.clear()
            self._stop_reports()

    def _fill(self, wanted: Sequence[DevicePlace]) -> None:
        self.replica_set.fill(wanted)
        if self._reporter is None:
            self._reporter = registry.watch(self)

    def _stop_reports(self) -> None:
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


def normalize(device_ids: Sequence[Any] | None, options: Options) -> list[DeviceId]:
    """``device_ids`` in their plain form, checked against the cluster."""
    if device_ids is None:
        return list(cluster.all_gpus(options))
    if isinstance(device_ids, (str, int)) or not hasattr(device_ids, "__iter__"):
        raise TypeError(f"device_ids={device_ids!r}: give a list, such as [0, 1] or ['cpu', 'cpu']")
    ids = [device_id(entry) for entry in device_ids]
    if not ids:
        raise ValueError(
            "device_ids=[] names no device: leave it out to use every GPU of the cluster, "
            "or give ids or 'cpu' entries"
        )
    gpus = [entry for entry in ids if isinstance(entry, int)]
    if gpus:
        cluster.check_gpus(gpus, options)
    return ids


def _drop_model(executor: weakref.ref[Executor], model: int) -> None:
    known = executor()
    if known is not None:
        known.recorder.accounts.part(model)
        # This is a finalizer: another thread may be adding a slot.
        for slot in [*known.replica_set.slots.values()]:
            slot.contents.drop_model(model)


_READ_BY_WRAPPERS: dict[str, Any] = {
    "unused_grads": "zeros",
    "scalars": "vector",
    "buffers": "first",
    "passthrough": False,
    "chunk_weights": None,
    "least_rows": 1,
    "rng": "per_chunk",
    "buffer_updates": "every_forward",
    "compile": False,
    "gradient_dtype": None,
}
"""Options that executors do not read, with their defaults: wrappers that differ in them share an
executor.
"""


class _SharedExecutors:
    """The executors that wrappers share, by their options.

    Attributes:
        by_options: These.
        last: The one that was asked for last, mostly by the same wrapper: it takes no hash of all
            options.
        lock: Held while one is added.
    """

    def __init__(self) -> None:
        self.by_options: dict[Options, Executor] = {}
        self.last: tuple[Options, Executor] | None = None
        self.lock = threading.Lock()
        forks.tell_child(self)

    def after_fork(self) -> None:
        """Make the lock anew: the thread that held it is not in the child."""
        self.lock = threading.Lock()


_shared = _SharedExecutors()


def shared(options: Options) -> Executor:
    """The process's executor for these options; it has no replica until one is needed."""
    found, last = _shared.by_options, _shared.last
    executor = last[1] if last is not None and last[0] is options else found.get(options)
    if executor is None or executor.replica_set.closed:
        with _shared.lock:
            plain = replace(options, **_READ_BY_WRAPPERS)
            if plain not in found or found[plain].replica_set.closed:
                found[plain] = Executor((), options=plain)
            executor = found[options] = found[plain]
    _shared.last = options, executor
    return executor


def shutdown() -> None:
    """End the process's replicas, and the Ray cluster if it was started for them. The next use
    starts anew.
    """
    with _shared.lock:
        for executor in _shared.by_options.values():
            executor.close()
        _shared.by_options.clear()
        _shared.last = None
    cluster.disconnect()
