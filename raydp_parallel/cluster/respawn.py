"""`Respawner`: in the background, ends what is left of a replica that died, says why it died, and
starts the next.

There is one thread per replica that died, which ends when the next replica is there. No call waits
for it as long as another replica can do the work. A replica that dies before it ever answered is
started again after a pause, longer each time.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from raydp_parallel.cluster.backend import Backend, Death, DevicePlace
from raydp_parallel.devices import forks
from raydp_parallel.devices.process import Waiters
from raydp_parallel.devices.ranges import ReplicaHello
from raydp_parallel.errors import (
    ClusterError,
    ExecutorClosed,
    NoRoom,
    ParallelError,
    PlacementError,
    RestartsSpent,
)
from raydp_parallel.options import Options

log = logging.getLogger("raydp_parallel")

_LEFT = "the Ray cluster was left while replicas ran; the next use starts anew"
_HOUR = 3600.0
_SHORTEST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_START_DELAY = 0.25
"""Seconds before the replacement starts, so that its imports do not compete with the replayed
step.
"""

_TURN = 1.0
"""Seconds between two looks of a call that waits for a new replica, should a word of it be lost."""

_STOP_TIMEOUT = 5.0
"""Seconds that `Respawner.stop` waits for its threads, which check every 0.2 s whether to end."""


class Loss(NamedTuple):
    """A replica that died.

    Attributes:
        place: The place that it had.
        name: Its name, for the log.
        client: Its client.
        method: The method in which it died.
        death: Its death, as the driver noticed it.
        answered: Whether it had ever answered a call.
    """

    place: DevicePlace
    name: str
    client: Any
    method: str
    death: Death
    answered: bool


class Arrival(NamedTuple):
    """A replica that was started.

    Attributes:
        client: Its client.
        hello: What it said of itself.
    """

    client: Any
    hello: ReplicaHello


class Respawner:
    """Replaces the replicas of one backend.

    Args:
        backend: The backend, which starts them.
        options: How many may be started, and how long that may take.
        tell: Called with the text of a death and its cause.
    """

    def __init__(self, backend: Backend, options: Options, tell: Callable[[str], None]) -> None:
        self._backend = backend
        self._options = options
        self._tell = tell
        self._lock = threading.Lock()
        self._waiters = Waiters()
        self._ended = threading.Event()
        self._awaited = threading.Event()
        self._working: dict[DevicePlace, threading.Thread] = {}
        self.arrived: dict[DevicePlace, Arrival] = {}
        self._problems: dict[DevicePlace, ParallelError] = {}
        self._in_vain: dict[DevicePlace, int] = {}
        self._starts: deque[float] = deque()
        _respawners.add(self)

    def replace(self, loss: Loss) -> None:
        """Start the next replica, after `_START_DELAY`."""
        self._awaited.clear()
        self._begin(loss.place, loss)

    def ensure(self, places: Collection[DevicePlace]) -> None:
        """Make sure that a replica starts in each place. A place that was given up is tried again,
        if `Options.max_restarts_per_hour` allows it.
        """
        for place in places:
            if place not in self.arrived and (self._left() or place not in self._problems):
                self._begin(place, None)

    def arrivals(self) -> dict[DevicePlace, Arrival]:
        """Take the replicas that started since the last time."""
        if not self.arrived:
            return {}
        with self._lock:
            found, self.arrived = self.arrived, {}
            return found

    def wait(self, places: Collection[DevicePlace]) -> None:
        """Wait until a replica started in one of the places.

        Raises:
            ParallelError: None will start, or none did within ``placement_timeout``.
        """
        timeout = self._options.placement_timeout
        if not self.await_one(places, timeout):
            late = PlacementError(
                f"all replicas died, and no new one started in placement_timeout={timeout:g} s"
            )
            raise next((self._problems[place] for place in places if place in self._problems), late)

    def await_one(self, places: Collection[DevicePlace], timeout: float) -> bool:
        """Wait until a replica started in one of the places; False if none will, or none did in
        time.
        """

        def settled() -> bool:
            coming = not self._ended.is_set() and any(p in self._working for p in places)
            return any(p in self.arrived for p in places) or not coming

        self._awaited.set()
        deadline = time.monotonic() + timeout
        while True:
            with self._lock:
                left = deadline - time.monotonic()
                if settled() or left <= 0:
                    break
                change = self._waiters.enter()
            if not change.acquire(timeout=min(left, _TURN)):
                with self._lock:
                    self._waiters.leave(change)
        if self._ended.is_set():
            raise ExecutorClosed("this executor was closed while a call waited for a new replica")
        return any(place in self.arrived for place in places)

    def end(self) -> None:
        """Start no more replicas, and end all waits."""
        self._ended.set()
        self._awaited.set()
        with self._lock:
            self._waiters.wake()

    def stop(self) -> None:
        """Start no more replicas, and end those that started too late. May be called twice."""
        self.end()
        with self._lock:
            working = [*self._working.values()]
        for thread in working:
            thread.join(_STOP_TIMEOUT)
        self._backend.stop([arrival.client for arrival in self.arrivals().values()])

    def _begin(self, place: DevicePlace, loss: Loss | None) -> None:
        thread = threading.Thread(
            target=self._work, args=(place, loss), name="raydp-respawn", daemon=True
        )
        with self._lock:
            if self._ended.is_set() or place in self._working:
                return
            self._problems.pop(place, None)
            self._working[place] = thread
        try:
            thread.start()
        except BaseException:
            self._working.pop(place, None)
            raise

    def _work(self, place: DevicePlace, loss: Loss | None) -> None:
        arrival = None
        try:
            why = self._report(loss) if loss is not None else None
            if loss is not None:
                self._awaited.wait(_START_DELAY)
            arrival = self._start(place)
            if arrival is not None and why is not None:
                self._backend.note(arrival.client, f"This process is here because {why}")
        except ParallelError as error:
            self._problems[place] = error
            log.error("no replica for device %s: %s", place.device_id, error)
        except Exception as error:  # of any kind: no call may wait for ever
            seen = f"no replica could be started for device {place.device_id}: {error!r}"
            self._problems[place] = ClusterError(seen if self._backend.alive() else _LEFT)
            log.exception("no replica for device %s", place.device_id)
        finally:
            with self._lock:
                self._working.pop(place, None)
                if arrival is not None and not self._ended.is_set():
                    self.arrived[place], arrival = arrival, None
                self._waiters.wake()
            if arrival is not None:
                self._backend.stop([arrival.client])

    def _report(self, loss: Loss) -> str:
        """End what may be left of a replica, and log why it died, which takes Ray a while to
        know.
        """
        cause = self._backend.cause(loss.client, loss.death)
        self._backend.stop([loss.client])
        self._in_vain[loss.place] = 0 if loss.answered else self._in_vain.get(loss.place, 0) + 1
        what = f"{loss.name} died in {loss.method}: {cause}"
        self._tell(what)
        log.warning(
            "%s. Its chunks run again on other replicas, and a new one starts in the background",
            what,
        )
        return what

    def _start(self, place: DevicePlace) -> Arrival | None:
        while True:
            pauses = self._in_vain.get(place, 0)
            pause = min(_SHORTEST_PAUSE * 2**pauses, _LONGEST_PAUSE) if pauses else 0.0
            if self._ended.wait(pause):
                return None
            if not self._backend.alive():
                raise ClusterError(_LEFT)
            booked = self._book()
            begun = time.monotonic()
            try:
                found = self._backend.start([place], self._hopeless)
            except NoRoom as error:
                if self._ended.is_set():
                    return None
                if not self._backend.alive():
                    raise ClusterError(_LEFT) from error
                with self._lock:
                    self._starts.remove(booked)  # no process was started
                known = place in self._problems
                self._problems[place] = error
                log.log(
                    logging.INFO if known else logging.WARNING,
                    "device %s waits: %s",
                    place.device_id,
                    error,
                )
                continue
            except PlacementError as error:
                if self._ended.is_set():
                    return None
                if not self._backend.alive():
                    raise ClusterError(_LEFT) from error
                self._problems[place] = error
                self._in_vain[place] = pauses + 1
                log.warning(
                    "no replica for device %s yet, which is tried again: %s", place.device_id, error
                )
                continue
            client, hello = found[place]
            seconds = time.monotonic() - begun
            log.info(
                "a new replica for device %s (pid %d) started in %.1f s",
                place.device_id,
                hello.pid,
                seconds,
            )
            self._problems.pop(place, None)
            return Arrival(client, hello)

    def _hopeless(self) -> bool:
        """Whether to give a start up: after the end of the cluster, a question to Ray would start
        another one.
        """
        return self._ended.is_set() or not self._backend.alive()

    def _book(self) -> float:
        """Count a start, if the hour allows one more."""
        most = self._options.max_restarts_per_hour
        with self._lock:
            if not self._left():
                raise RestartsSpent(
                    f"{most} replicas were started within an hour in place of others that "
                    f"had died, which is what Options(max_restarts_per_hour={most}) allows. The "
                    "log names the causes; calls go on with the replicas that are left, if any"
                )
            self._starts.append(time.monotonic())
            return self._starts[-1]

    def _left(self) -> int:
        while self._starts and self._starts[0] < time.monotonic() - _HOUR:
            self._starts.popleft()
        return self._options.max_restarts_per_hour - len(self._starts)


_respawners: weakref.WeakSet[Respawner] = weakref.WeakSet()
forks.call_in_child(_respawners.clear)


@atexit.register
def _stop_all() -> None:
    """End all threads before the program leaves Ray: Ray ends a process with a thread inside it."""
    for respawner in [*_respawners]:
        respawner.stop()
