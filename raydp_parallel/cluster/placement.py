"""The nodes of the cluster, what a replica books on them, the node that it goes to, and `Holds`:
what places hold of the cluster, as Ray's placement groups. If no resources are free, an error says
which jobs hold them, read from Ray's own tables, which need no dashboard.

[Note: logical GPUs]
Logical GPU k is the k-th in the order of nodes: the driver's first, the others by id. With
``gpus_per_replica=0.5`` there are two of them for each GPU. A replica goes to the node of its
number if something is free there, else to the first node that has room; then the replicas are
numbered anew, so that ranks are in the order of nodes all the same.

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
import re
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from raydp_parallel.cluster import joining, ray_api
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.ray_api import Group, Holder, Node, holders, is_private, nodes
from raydp_parallel.errors import NoRoom, PlacementError
from raydp_parallel.monitoring.stats import printable
from raydp_parallel.options import Options
from raydp_parallel.progress import Waiting

T = TypeVar("T")

_LITTLE = 1e-6
"""The error that sums of fractions may have."""


def booked(kind: str, options: Options) -> dict[str, float]:
    """What Ray books for a replica."""
    needs = {
        "CPU": options.cpus_per_replica,
        "GPU": options.gpus_per_replica if kind == "gpu" else 0.0,
    }
    return {name: amount for name, amount in {**needs, **options.resources}.items() if amount}


def suits(node: Node, options: Options) -> bool:
    """Whether replicas may go to a node, free or not."""
    labels = all(
        _matches(node.labels.get(name), wanted) for name, wanted in options.label_selector.items()
    )
    return labels and fits(node.total, options.resources)


def _matches(label: str | None, wanted: str) -> bool:
    """Ray's selectors: ``a``, ``!a``, ``in(a, b)``, ``!in(a, b)``."""
    no, inside, alone = re.fullmatch(r"(!?)(?:in\((.*)\)|(.*))", wanted).groups()  # type: ignore[union-attr]
    values = [value.strip() for value in inside.split(",")] if inside is not None else [alone]
    return (label in values) != bool(no)


def fits(amounts: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    """Whether the amounts cover the needs."""
    return all(amounts.get(name, 0.0) + _LITTLE >= amount for name, amount in needs.items())


def homes(machines: Sequence[Node], options: Options) -> list[str]:
    """The node of each logical GPU."""
    each = options.replicas_per_gpu
    found: list[str] = []
    for node in machines:
        if suits(node, options):
            found += [node.id] * (int(node.total.get("GPU", 0)) * each)
    return found


def for_cpus(machines: Sequence[Node], options: Options) -> list[Node]:
    """Nodes for CPU replicas: those with CPUs for Ray; a head is often started with none, to be
    left alone.
    """
    suitable = [node for node in machines if suits(node, options)]
    return [node for node in suitable if node.total.get("CPU", 0) > 0] or suitable


def plan(
    places: Sequence[DevicePlace], machines: Sequence[Node], options: Options
) -> dict[DevicePlace, str]:
    """The node of each place for which there is room now."""
    left = {node.id: dict(node.free) for node in machines if suits(node, options)}
    gpu_homes = homes(machines, options)
    cpu_homes = [node.id for node in for_cpus(machines, options)]
    found: dict[DevicePlace, str] = {}
    for place in places:
        needs = booked(place.kind, options)
        at_home = gpu_homes if place.kind == "gpu" else cpu_homes
        number = place.number if place.kind == "gpu" else place.number % max(1, len(cpu_homes))
        home = at_home[number] if number < len(at_home) else ""
        room = [node for node in left if fits(left[node], needs)]
        if room:
            node = home if home in room else room[0]
            found[place] = node
            left[node] = {
                name: amount - needs.get(name, 0.0) for name, amount in left[node].items()
            }
    rank = {node.id: number for number, node in enumerate(machines)}
    return in_order(found, rank.__getitem__)


def in_order(found: Mapping[DevicePlace, T], rank: Callable[[T], int]) -> dict[DevicePlace, T]:
    """The same, handed out so that GPU replicas are numbered in the order of nodes."""
    gpus = sorted(place for place in found if place.kind == "gpu")
    ranked = sorted((found[place] for place in gpus), key=rank)
    return {**found, **dict(zip(gpus, ranked, strict=True))}


def at_home(
    places: Sequence[DevicePlace], found: Mapping[DevicePlace, str], known: Sequence[str]
) -> bool:
    """Whether every GPU replica is on the node of its number, if the cluster has that number."""
    return all(
        found.get(p) == known[p.number] for p in places if p.kind == "gpu" and p.number < len(known)
    )


def all_gpus(options: Options) -> list[int]:
    """Every GPU of the cluster. On a machine without a GPU no cluster is started just to
    find none.
    """
    if not joining.connect(start=torch.cuda.is_available()):
        return []
    return list(range(len(homes(nodes(), options))))


def check_gpus(ids: Sequence[int], options: Options) -> None:
    """Raise `PlacementError` for ids that a private cluster does not have. Other clusters may still
    get nodes.
    """
    joining.connect()
    if options.elastic or not is_private():
        return
    machines = nodes()
    count = len(homes(machines, options))
    missing = [i for i in ids if i >= count]
    if missing:
        has = "no GPU" if not count else "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise PlacementError(
            f"device_ids: {missing} not in the cluster, which has {has} on {len(machines)} node(s)"
            f"{_by_options(options)}. Use those, or 'cpu' entries for CPU replicas"
        )


def _by_options(options: Options) -> str:
    plain = Options()
    names = ("gpus_per_replica", "resources", "label_selector")
    said = [
        f"{n}={getattr(options, n)!r}" for n in names if getattr(options, n) != getattr(plain, n)
    ]
    return f" with Options({', '.join(said)})" if said else ""


log = logging.getLogger("raydp_parallel")

_SHOWN = 8
"""Holders, and nodes, that an error names."""


def no_room(places: Sequence[DevicePlace], late: Sequence[DevicePlace], options: Options) -> NoRoom:
    """The error for replicas that found no place: what was asked for, what is free and where, and
    which jobs hold the rest.
    """
    machines = nodes()
    asked = (
        f"{sum(p.kind == 'gpu' for p in places)} GPU and "
        f"{sum(p.kind == 'cpu' for p in places)} CPU replicas"
    )
    each = "; ".join(
        f"each {kind.upper()} replica with "
        + ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
        for kind in dict.fromkeys(place.kind for place in places)
        if (needs := booked(kind, options))
    )
    labels = f", on nodes with {dict(options.label_selector)}" if options.label_selector else ""
    found = _found() if any(place.kind == "gpu" for place in late) else []
    return NoRoom(
        f"asked for {asked} ({each or 'which book nothing'}{labels}); after "
        f"{options.placement_timeout:g} s the "
        f"replicas for device_ids {[place.device_id for place in late]} had no place. Free now: "
        f"{_listed([_free(node, options) for node in machines])}. "
        f"{_held(machines, found)}End what holds them (an "
        "executor of this program: close it), add nodes, or use fewer device_ids"
    )


def _found() -> list[Holder]:
    try:
        return [*holders()]
    except Exception:  # these tables of Ray are not public: another version may differ
        log.debug("the holders of GPUs cannot be found out", exc_info=True)
        return []


def _listed(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def _free(node: Node, options: Options) -> str:
    names = ("GPU", "CPU", *options.resources)
    amounts = ", ".join(
        f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}" for name in names
    )
    unfit = "" if suits(node, options) else " (not one of those that Options allow)"
    return f"{_place(node)}: {amounts}{unfit}"


def _place(node: Node) -> str:
    return f"node {node.id[:8]} ({node.address})"


def _held(machines: Sequence[Node], found: Sequence[Holder]) -> str:
    """Which jobs hold GPUs of which node. The rest, which Ray does not list, is held by tasks or
    about to be freed.
    """
    lines = []
    for node in machines:
        held = node.total.get("GPU", 0) - node.free.get("GPU", 0)
        known: dict[str, float] = defaultdict(float)
        for holder in found:
            if holder.node == node.id:
                known[_holder_name(holder)] += holder.amount
        parts = [f"{amount:g} by {name}" for name, amount in known.items()]
        rest = held - sum(known.values())
        if rest > 0.01:
            parts.append(f"{rest:g} by tasks, or about to be free")
        if parts and held > 0.01:
            lines.append(f"of {_place(node)}: {', '.join(parts)}")
    # The names of classes, programs and groups are other users'.
    return printable(f"GPUs are held {_listed(lines)}. ") if lines else ""


def _holder_name(holder: Holder) -> str:
    return f"{holder.actor or _named(holder.group)} of {holder.job}"


def _named(group: str) -> str:
    """What to call a placement group: its executor, if it is one of `Holds`, else its name."""
    ours = re.fullmatch(r"raydp:([^:]*):.*", group)
    return f"executor {ours[1]!r}" if ours else f"placement group {group!r}"


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
