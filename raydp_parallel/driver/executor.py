"""`Executor`: the replicas that run any number of models, and what the driver knows of each."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.clients import end_all
from raydp_parallel.cluster.placement import DeviceId, all_gpus, normalize
from raydp_parallel.cluster.replica_set import ReplicaSet, ReplicaSlot
from raydp_parallel.driver.dispatcher import Call, Dispatcher
from raydp_parallel.driver.reporter import Reporter
from raydp_parallel.driver.resident import Trainable
from raydp_parallel.errors import forked, log
from raydp_parallel.monitoring.stats import ExecutorStats, ReplicaInfo
from raydp_parallel.options import Options, WrapperOptions
from raydp_parallel.replica import exceptions
from raydp_parallel.state import sources
from raydp_parallel.wire.messages import Forget, Sources


class Executor(contextlib.AbstractContextManager["Executor"]):
    """Replicas for any number of models: one actor per device.

    A wrapper without an executor of its own uses the process's; give it one to choose when actors
    start and end::

        with Executor(["cpu", "cpu"]) as executor:
            model = DataParallel(net, executor=executor)

    Args:
        device_ids: Logical GPUs of the cluster, or ``"cpu"`` entries; None is every GPU of the
            cluster. With ``()`` replicas start when a wrapper first needs them.
        options: Settings that few programs need.
    """

    def __init__(
        self, device_ids: Sequence[object] | None = None, *, options: Options | None = None
    ) -> None:
        self.options = options or Options()
        self._every = device_ids is None
        self.device_ids = [] if device_ids == () else normalize(device_ids, self.options)
        self.replica_set = ReplicaSet(self.options, self.options.name or ray_api.program())
        self.dispatcher = Dispatcher(self.replica_set)
        self.keys = itertools.count(1)  # numbers for models and graphs
        self._masters: dict[int, Trainable] = {}
        # The lives of slots and the sources, as models that are trained were last saved.
        self._saved: tuple[list[int], Sources] | None = None
        self._reporter: Reporter | None = None
        if self.device_ids:
            self.slots(self.device_ids)

    def __reduce__(self) -> tuple[object, ...]:
        return shared, (self.options,)  # in another process there are other replicas

    def __deepcopy__(self, memo: object) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self.replica_set.closed

    def slots(self, device_ids: Sequence[DeviceId]) -> list[ReplicaSlot]:
        """Return the slots for devices. Where a replica died, another stands in until its successor
        is there.
        """
        with exceptions.ShortTraceback(), self.replica_set.calling():  # a trial of windows, perhaps
            found = self.replica_set.slots_for(device_ids)
            # One died, or all may have to be replaced by such as load the sources of now.
            now = [slot.life for slot in self.replica_set.slots.values()], sources.current()
            if now != self._saved:
                for master in [*self._masters.values()]:
                    if master.resident is not None:
                        master.resident.save()
                self._saved = now
        if self._reporter is None and self.options.metrics:
            self._reporter = Reporter(self.replica_set, weakref.WeakMethod(self.stats))
        return found

    def master(self, module: nn.Module) -> Trainable:
        """Return the driver's side of a module, which all its wrappers share."""
        found = self._masters.get(id(module))
        if found is None or found.structure.module() is None:
            found = self._masters[id(module)] = Trainable(module, next(self.keys))
            drop = weakref.finalize(module, _drop, weakref.ref(self), id(module), found.number)
            drop.atexit = False
        return found

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Describe the replicas, one entry per device."""
        if self.replica_set.forked:
            raise forked()
        return tuple(slot.info() for slot in [*self.replica_set.slots.values()])

    def stats(self) -> ExecutorStats:
        """Describe the replicas' work so far, for all models."""
        links = {slot.client.link for slot in self.replica_set.ready_slots()}
        links |= {"nccl" for group in [*self.dispatcher.groups.values()] if group.nccl}
        link = " + ".join(sorted(links)) or "none"
        return self.replica_set.recorder.stats(self.replicas(), link)

    def grow(self, timeout: float | None = None) -> int:
        """Wait for replicas that are missing: after a node was added, or before a long run.

        An executor for every GPU of the cluster (``device_ids`` left out) gets those that were
        added since. How many chunks a wrapper makes does not change.

        Args:
            timeout: Seconds to wait for all; None is ``placement_timeout``. Fewer are no error.

        Returns:
            How many joined.
        """
        with self.replica_set.calling():
            joined = self.replica_set.grow(timeout)
        if self._every:
            more = [k for k in all_gpus(self.options) if k not in self.device_ids]
            self.slots(more)
            self.device_ids = [*self.device_ids, *more]
            joined += len(more)
        return joined

    def flush(self) -> list[tuple[int, int]]:
        """Tell the replicas now what the driver released; returns how many models and graphs each
        still holds.
        """
        with self.replica_set.calling():
            calls = [Call(slot, "flush", Forget(())) for slot in self.replica_set.ready_slots()]
            answers = [*map(self.dispatcher.ask, calls)]
            return [answer.held for answer in answers if answer is not None]

    def close(self) -> None:
        """End the replicas. Their graphs are lost, what the driver holds is not. Trained weights
        are fetched before, if they come within ``call_timeout``, else ``placement_timeout``. May be
        called twice. In a forked process it ends nothing.
        """
        if self.replica_set.forked:
            return
        limit = self.options.call_timeout or self.options.placement_timeout
        self.replica_set.options = replace(self.options, call_timeout=limit)
        free = self.replica_set.lock.acquire(timeout=limit)
        if free:
            self.replica_set.lock.release()  # calls that begin now have the limit, too
        else:
            log.warning("closing an executor: a call of another thread does not end, and is ended")
            end_all([slot.client for slot in self.replica_set.ready_slots()])
        for master in [*self._masters.values()] if free else ():
            for _ in range(0 if self.closed else 2):
                try:
                    if master.resident is not None:
                        master.resident.fetch_departing(master.trained.keys())
                    break
                except Exception as error:  # of the last step, perhaps, which comes once
                    log.warning("closing an executor that trains: %s", error)
        if self._reporter is not None:
            self._reporter.close()
        self.replica_set.close()


def _drop(executor: weakref.ref[Executor], key: int, number: int) -> None:
    known = executor()
    if known is not None:
        known._masters.pop(key, None)
        for slot in [*known.replica_set.slots.values()]:
            slot.revisions.pop(number, None)
            slot.forget.append(number)


_shared: dict[Options, Executor] = {}
_shared_lock = threading.Lock()


def _after_fork() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()  # the thread that held it is not in the child


os.register_at_fork(after_in_child=_after_fork)


def shared(options: Options) -> Executor:
    """Return the process's executor for these options; it has no replica until one is needed."""
    found = _shared.get(options)
    if found is None or found.closed:
        with _shared_lock:
            # Wrappers that differ in their own settings share one.
            plain = replace(options, **vars(WrapperOptions()))
            if plain not in _shared or _shared[plain].closed:
                _shared[plain] = Executor((), options=plain)
            found = _shared[options] = _shared[plain]
    return found


def shutdown() -> None:
    """End the process's replicas, and the Ray cluster if it was started for them. The next use
    starts anew.
    """
    with _shared_lock:
        for executor in _shared.values():
            executor.close()
        _shared.clear()
    ray_api.disconnect()
