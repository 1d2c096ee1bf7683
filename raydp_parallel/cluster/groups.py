"""What places hold of the cluster: Ray's placement groups.

[Note: groups]
If all replicas that start together fit into what is free now, each gets a group of its own, tied to the node that it
was planned for. Else they wait as one group, tied to no node: Ray places it as a whole or not at all, so that two
programs never wait for each other's half, and its autoscaler knows the whole demand. In either case a group is there
before any process starts, and outlives the process: nobody else gets the GPU while a successor starts. What was held
on a node that ended, or is about to, is let go of, and the place gets another group. One group for a whole executor
could not do that: Ray neither frees a part of a group nor adds to it, and a part that is tied to a lost node never
comes back.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raydp_parallel.cluster.nodes import Node, at_home, booked, for_cpus, homes, in_order, nodes, plan
from raydp_parallel.crew import Place
from raydp_parallel.errors import PlacementError
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting

_PATIENCE = 1.0
"""Seconds that others may take to free the places at home, as an executor of this program that was just closed."""
_RACE = 2.0
"""Seconds after which somebody else must have been faster."""
_LOOK = 0.02
"""Seconds between two looks at a group; Ray makes one in a few milliseconds."""
_BY_LABEL = "bundle_label_selector" in inspect.signature(placement_group).parameters


class Hold(NamedTuple):
    """What a place holds.

    Attributes:
        group: The placement group, None if nothing is booked.
        bundle: Which of its bundles.
        node: The node.
    """

    group: PlacementGroup | None
    bundle: int
    node: str

    def strategy(self) -> Any:
        """How Ray is told to start a process there."""
        if self.group is None:
            # Not soft: then Ray takes any node for what needs nothing (seen with 2.60).
            return NodeAffinitySchedulingStrategy(self.node, soft=False)
        return PlacementGroupSchedulingStrategy(self.group, self.bundle)


class Groups:
    """The holds of an executor's places.

    Args:
        name: The executor's, for Ray's dashboard.
        options: What to book, and how long to wait for it.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._options = options
        self._holds: dict[Place, Hold] = {}
        self._lock = threading.Lock()  # replicas are also started behind the scenes
        if options.label_selector and not _BY_LABEL:
            raise PlacementError(f"Options(label_selector=...): Ray {ray.__version__} cannot place by label")

    def claim(
        self, places: Sequence[Place], deadline: float, cancelled: Callable[[], bool] | None = None
    ) -> dict[Place, Hold]:
        """A hold for each place; for fewer by the deadline, and with ``elastic`` as soon as there are some.

        Args:
            places: The places.
            deadline: How long to wait, by the monotonic clock.
            cancelled: Whether nobody wants them any more; None if somebody watches.
        """
        machines = nodes()
        found = self._kept(places, machines)
        missing = [place for place in places if place not in found]
        unbooked = [place for place in missing if not booked(place.kind, self._options)]
        suitable = for_cpus(machines, self._options)
        found |= {place: Hold(None, 0, suitable[place.number % len(suitable)].id) for place in unbooked}
        missing = [place for place in missing if place not in found]
        if missing:
            found |= self._reserve(missing, deadline, cancelled)
        with self._lock:
            self._holds |= found
        return found

    def _kept(self, places: Sequence[Place], machines: Sequence[Node]) -> dict[Place, Hold]:
        """What places hold from before, where the node is still there."""
        there = {node.id for node in machines}
        old = {place: self._holds[place] for place in places if place in self._holds}
        gone = {place for place, hold in old.items() if hold.group is None or hold.node not in there}
        self.release(gone)
        return {place: hold for place, hold in old.items() if place not in gone}

    def _reserve(
        self, places: Sequence[Place], deadline: float, cancelled: Callable[[], bool] | None
    ) -> dict[Place, Hold]:
        planned = self._plan(places, deadline)
        fits_now = len(planned) == len(places) or (self._options.elastic and bool(planned))
        made = self._singles(planned) if fits_now else self._together(places)
        begun = time.monotonic()
        try:
            with Waiting(_room, len(places), level=logging.WARNING) as tell:
                while (left := deadline - time.monotonic()) > 0 and not (cancelled is not None and cancelled()):
                    ready = [group for group in made if _is_made(group)]
                    if len(ready) == len(made) or (ready and self._options.elastic):
                        self._remove([group for group in made if group not in ready])
                        return _holds({group: made[group] for group in ready})
                    waited = time.monotonic() - begun
                    if fits_now and waited > _RACE:
                        fits_now = False
                        self._remove(made)
                        made = self._together(places)
                    if cancelled is None:  # nobody waits for what is started behind the scenes
                        tell(len(ready))
                    time.sleep(min(left, _LOOK if waited < 1 else 10 * _LOOK))
        except BaseException:
            self._remove(made)
            raise
        self._remove(made)
        return {}

    def _plan(self, places: Sequence[Place], deadline: float) -> dict[Place, str]:
        """Where there is room now, at home if that gets free in a moment."""
        now = time.monotonic()
        until = now + min(_PATIENCE, (deadline - now) / 2)
        while True:
            machines = nodes()
            planned = plan(places, machines, self._options)
            if at_home(places, planned, homes(machines, self._options)) or time.monotonic() >= until:
                return planned
            time.sleep(5 * _LOOK)

    def _singles(self, planned: Mapping[Place, str]) -> dict[PlacementGroup, list[Place]]:
        return {self._make([place], {"ray.io/node-id": node}): [place] for place, node in planned.items()}

    def _together(self, places: Sequence[Place]) -> dict[PlacementGroup, list[Place]]:
        # Where one is enough to start with, none waits for the others.
        parts = [[place] for place in places] if self._options.elastic else [[*places]]
        return {self._make(part, {}): part for part in parts}

    def _make(self, places: Sequence[Place], where: Mapping[str, str]) -> Any:
        labels = {**self._options.label_selector, **where}
        by_label = {"bundle_label_selector": [labels for _ in places]} if labels and _BY_LABEL else {}
        bundles = [booked(place.kind, self._options) for place in places]
        numbers = ",".join(str(place.device_id) for place in places)
        return placement_group(bundles, "PACK", name=f"raydp:{self._name}:{numbers}", **by_label)

    def release(self, places: Collection[Place] | None = None) -> None:
        """Let go of what some places hold, by default all."""
        with self._lock:
            wanted = [*(self._holds if places is None else places)]
            gone = [self._holds.pop(place) for place in wanted if place in self._holds]
            used = {hold.group.id for hold in self._holds.values() if hold.group is not None}
        self._remove([hold.group for hold in gone if hold.group is not None and hold.group.id not in used])

    @staticmethod
    def _remove(groups: Collection[PlacementGroup]) -> None:
        for group in groups:
            remove_placement_group(group)


def _is_made(group: PlacementGroup) -> bool:
    return bool(placement_group_table(group).get("state") == "CREATED")


def _holds(made: Mapping[PlacementGroup, Sequence[Place]]) -> dict[Place, Hold]:
    """What the groups got, handed out in the order of nodes."""
    found = {
        places[bundle]: Hold(group, bundle, node)
        for group, places in made.items()
        for bundle, node in sorted(placement_group_table(group)["bundles_to_node_id"].items())
    }
    rank = {node.id: number for number, node in enumerate(nodes())}
    return in_order(found, lambda hold: rank.get(hold.node, len(rank)))


def _room() -> str:
    machines = nodes()
    free, total = (sum(getattr(n, which).get("GPU", 0) for n in machines) for which in ("free", "total"))
    return f"room for replicas ({free:g} of the cluster's {total:g} GPUs are free)"
