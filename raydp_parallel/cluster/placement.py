"""`Holds`: what places hold of the cluster, as Ray's placement groups.

[Note: groups]
Each replica has a group of its own, tied to the node that it was planned for. It is there before
the process starts, and outlives it: no other job gets the GPU while a successor starts. What was
held on a node that ended, or is about to, is released, and the place gets another group. One group
for a whole executor could not do that: Ray neither frees a part of a group nor adds to it, and what
was lost with several nodes comes back together or not at all.

Where there is no room for all, they wait as one group that is tied to no node. Ray places it as a
whole or not at all, so that two programs do not wait for each other's half, and its autoscaler
knows the whole demand. Once it is placed, groups of their own take its place. If another job was
faster, they wait again.

The name of a group ends in letters that no other has. Ray refuses a name that a group of the
namespace has, and frees that of a removed group later, or, where a node was lost, not for long.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.nodes import at_home, booked, for_cpus, homes, in_order, plan
from raydp_parallel.cluster.ray_api import Group, Node, nodes
from raydp_parallel.errors import PlacementError
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting

log = logging.getLogger("raydp_parallel")

_PATIENCE = 1.0
"""Seconds to wait for the nodes that the numbers of replicas name: an executor of this program that
was just closed may be about to free them.
"""
_RACE = 2.0
"""Seconds after which another job must have been faster."""
_LOOK = 0.02
"""Seconds between two checks of a group; Ray makes one in a few milliseconds."""


class Hold(NamedTuple):
    """What a place holds.

    Attributes:
        group: The placement group, None if nothing is booked.
        bundle: Which of its bundles.
        node: The node.
    """

    group: Group | None
    bundle: int
    node: str

    def strategy(self) -> Any:
        """How Ray is told to start a process there."""
        return ray_api.strategy(self.group, self.bundle, self.node)


class Made(NamedTuple):
    """A placement group that was asked for.

    Attributes:
        group: The group.
        places: The place of each of its bundles.
    """

    group: Group
    places: tuple[DevicePlace, ...]


class Holds:
    """The holds of an executor's places.

    Args:
        name: The executor's, for Ray's dashboard.
        options: What to book, and how long to wait for it.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._options = options
        self._elastic = options.elastic
        self._holds: dict[DevicePlace, Hold] = {}
        self._lock = threading.Lock()  # replicas are also started in the background
        if options.label_selector and not ray_api.BY_LABEL:
            raise PlacementError(
                f"Options(label_selector=...): Ray {ray_api.VERSION} cannot place by label"
            )

    def claim(
        self,
        places: Sequence[DevicePlace],
        deadline: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> dict[DevicePlace, Hold]:
        """A hold for each place; for fewer by the deadline, and with ``elastic`` as soon as there
        are some.

        Args:
            places: The places.
            deadline: How long to wait, by the monotonic clock.
            cancelled: Whether they are not needed any more; None if the user waits for them.
        """
        machines = nodes()
        found = self._kept(places, machines)
        missing = [place for place in places if place not in found]
        unbooked = [place for place in missing if not booked(place.kind, self._options)]
        if unbooked:
            found |= self._unbooked(unbooked, deadline, cancelled)
        missing = [place for place in missing if place not in unbooked]
        if missing:
            found |= self._reserve(missing, deadline, cancelled)
        with self._lock:
            self._holds |= found
        return found

    def _kept(
        self, places: Sequence[DevicePlace], machines: Sequence[Node]
    ) -> dict[DevicePlace, Hold]:
        """What places hold from before, on nodes that are still there."""
        there = {node.id for node in machines}
        old = {place: hold for place in places if (hold := self._holds.get(place)) is not None}
        gone = {
            place for place, hold in old.items() if hold.group is None or hold.node not in there
        }
        self.release(gone)
        return {place: hold for place, hold in old.items() if place not in gone}

    def _unbooked(
        self, places: Sequence[DevicePlace], deadline: float, cancelled: Callable[[], bool] | None
    ) -> dict[DevicePlace, Hold]:
        """Nodes for replicas that book nothing. They wait only if no node has the labels that
        Options ask for.
        """
        while not (suitable := for_cpus(nodes(), self._options)):
            if time.monotonic() >= deadline or (cancelled is not None and cancelled()):
                return {}
            time.sleep(10 * _LOOK)
        return {place: Hold(None, 0, suitable[place.number % len(suitable)].id) for place in places}

    def _reserve(
        self, places: Sequence[DevicePlace], deadline: float, cancelled: Callable[[], bool] | None
    ) -> dict[DevicePlace, Hold]:
        planned, refused = self._plan(places, deadline), None
        with Waiting(_room, len(places), level=logging.WARNING) as tell:

            def over() -> bool:
                if cancelled is None:  # the user does not wait for a start in the background
                    tell(0)
                return time.monotonic() >= deadline or (cancelled is not None and cancelled())

            while not over():
                try:
                    if len(planned) == len(places) or (self._elastic and planned):
                        made = self._make([{place: node} for place, node in planned.items()])
                        if found := self._wait(made, over, most=_RACE):
                            return found
                    # Elastic replicas wait as a group each, others as one group for all.
                    wanted = [dict.fromkeys(places, "")]
                    if self._elastic:
                        wanted = [{place: ""} for place in places]
                    found = self._wait(self._make(wanted), over, enough=1)
                except ray_api.RaySystemError as error:
                    log.info(
                        "Ray could not make a placement group, which is tried again: %s", error
                    )
                    refused = error
                    time.sleep(10 * _LOOK)
                    continue
                refused = None
                if self._elastic and found:
                    return found
                planned = {place: hold.node for place, hold in found.items()}
                ray_api.remove({hold.group for hold in found.values() if hold.group is not None})
        if refused is not None:
            raise refused
        return {}

    def _wait(
        self,
        made: Sequence[Made],
        over: Callable[[], bool],
        enough: int | None = None,
        most: float = math.inf,
    ) -> dict[DevicePlace, Hold]:
        """What some groups got, once enough of them are placed, by default all; the others are
        removed.
        """
        ready: list[Made] = []
        begun = time.monotonic()
        try:
            needed = enough or len(made)
            while len(ready := [m for m in made if ray_api.is_placed(m.group)]) < needed:
                waited = time.monotonic() - begun
                if over() or waited > most:
                    break
                time.sleep(_LOOK if waited < 1 else 10 * _LOOK)
            if len(ready) < len(made) and not self._elastic:
                ready = []
            return _holds(ready)
        except BaseException:
            ready = []
            raise
        finally:
            ray_api.remove([m.group for m in made if m not in ready])

    def _plan(self, places: Sequence[DevicePlace], deadline: float) -> dict[DevicePlace, str]:
        """The nodes with room now; those that the numbers of replicas name, if they get free in a
        moment.
        """
        now = time.monotonic()
        until = now + min(_PATIENCE, (deadline - now) / 2)
        while True:
            machines = nodes()
            planned = plan(places, machines, self._options)
            if at_home(places, planned, homes(machines, self._options)):
                return planned
            if time.monotonic() >= until:
                return planned
            time.sleep(5 * _LOOK)

    def _make(self, wanted: Sequence[Mapping[DevicePlace, str]]) -> list[Made]:
        """Make groups, each for some places, tied to their nodes if those are named. All of them,
        or none.
        """
        made: list[Made] = []
        try:
            for part in wanted:
                bundles = [booked(place.kind, self._options) for place in part]
                devices = ",".join(
                    f"{'cpu' if place.kind == 'cpu' else ''}{place.number}" for place in part
                )
                name = f"raydp:{self._name}:{devices}~{uuid.uuid4().hex[:8]}"
                group = ray_api.group(name, bundles, [*part.values()], self._options.label_selector)
                made.append(Made(group, (*part,)))
        except BaseException:
            ray_api.remove([m.group for m in made])
            raise
        return made

    def release(self, places: Collection[DevicePlace] | None = None) -> None:
        """Release what some places hold, by default all."""
        with self._lock:
            wanted = [*(self._holds if places is None else places)]
            gone = [self._holds.pop(place) for place in wanted if place in self._holds]
        ray_api.remove([hold.group for hold in gone if hold.group is not None])


def _holds(made: Sequence[Made]) -> dict[DevicePlace, Hold]:
    """The holds that groups gave, handed out in the order of nodes."""
    found = {
        m.places[bundle]: Hold(m.group, bundle, node)
        for m in made
        for bundle, node in enumerate(ray_api.nodes_of(m.group))
    }
    rank = {node.id: number for number, node in enumerate(nodes())}
    return in_order(found, lambda hold: rank.get(hold.node, len(rank)))


def _room() -> str:
    machines = nodes()
    free = sum(node.free.get("GPU", 0) for node in machines)
    total = sum(node.total.get("GPU", 0) for node in machines)
    return f"room for replicas ({free:g} of the cluster's {total:g} GPUs are free)"
