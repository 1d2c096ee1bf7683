"""The node that a replica goes to, and `Holds`: its part of the cluster, as Ray's placement groups.

[Note: logical GPUs]
Logical GPU k is the k-th in the order of nodes: the driver's first, the others by id. With
``gpus_per_replica=0.5`` there are two of them for each GPU. A replica goes to the node of its
number if something is free there, else to the first that has room; then the replicas are numbered
anew, so that ranks are in the order of nodes all the same.

[Note: groups]
Each replica has a group, tied to a node, which outlives its process: no other job gets the GPU
while a successor starts. Where there is no room for all, they wait as one group that is tied to no
node: Ray places it as a whole or not at all, so that two programs do not wait for each other's
half, and its autoscaler knows the whole demand. Names end in letters that no other has: Ray refuses
a name that is in use, and frees that of a removed group late.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.ray_api import Group, Node, is_private, nodes
from raydp_parallel.errors import NoRoom, PlacementError
from raydp_parallel.options import Options

T = TypeVar("T")

DeviceId = int | str
"""A logical GPU of the cluster, or ``"cpu"``."""

_LITTLE = 1e-6
"""The error that sums of fractions may have."""


class DevicePlace(NamedTuple):
    """A device that can hold a replica: a logical ``"gpu"``, or the n-th ``"cpu"`` entry."""

    kind: str
    number: int

    @property
    def device_id(self) -> DeviceId:
        """The entry of ``device_ids`` that names this place."""
        return self.number if self.kind == "gpu" else "cpu"


Places = Sequence[DevicePlace]
Plan = dict[DevicePlace, str]


@functools.lru_cache(maxsize=64)
def places(device_ids: tuple[DeviceId, ...]) -> tuple[DevicePlace, ...]:
    """Return the places that ``device_ids`` name. The n-th ``"cpu"`` is always the same replica."""
    found: list[DevicePlace] = []
    for entry in device_ids:
        number = sum(p.kind == "cpu" for p in found) if entry == "cpu" else int(entry)
        found.append(DevicePlace("cpu" if entry == "cpu" else "gpu", number))
    return tuple(found)


def device_id(entry: Any, of: str = "device_ids") -> DeviceId:
    """Return an entry of an argument in its plain form."""
    forms = "give ints from 0, torch devices, 'cuda:N' or 'cpu'"
    if isinstance(entry, bool) or not isinstance(entry, (int, str, torch.device)):
        raise TypeError(f"{of}: {entry!r} is a {type(entry).__name__}; {forms}")
    if isinstance(entry, int) and entry >= 0:
        return entry
    try:
        device = torch.device(entry)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"{of}: {entry!r} is neither a CUDA device nor 'cpu'; {forms}")
    if device.index is not None:
        return device.index
    # Torch's stubs know no device without an index.
    return torch.cuda.current_device() if torch.cuda.is_available() else 0  # type: ignore[unreachable]


def normalize(device_ids: Sequence[Any] | None, options: Options) -> list[DeviceId]:
    """Return ``device_ids`` in their plain form, checked against the cluster."""
    if device_ids is None:
        return list(all_gpus(options))
    if isinstance(device_ids, (str, int)) or not hasattr(device_ids, "__iter__"):
        raise TypeError(f"device_ids={device_ids!r}: give a list, such as [0, 1] or ['cpu', 'cpu']")
    ids = [device_id(entry) for entry in device_ids]
    if not ids:
        hint = "leave it out to use every GPU of the cluster, or give ids or 'cpu' entries"
        raise ValueError(f"device_ids=[] names no device: {hint}")
    gpus = [entry for entry in ids if isinstance(entry, int)]
    if gpus:
        check_gpus(gpus, options)
    return ids


def all_gpus(options: Options) -> list[int]:
    """Return every GPU of the cluster. None is started where torch sees no or one GPU here."""
    if options.label_selector:
        raise ValueError(
            "device_ids=None is every GPU of the cluster, and only Ray knows on which nodes "
            f"Options(label_selector={dict(options.label_selector)}) is true: give device_ids"
        )
    own = torch.cuda.device_count() * options.replicas_per_gpu
    if not ray_api.connect(start=own > 1):
        return list(range(own))
    return list(range(len(homes(nodes(), options))))


def check_gpus(ids: Sequence[int], options: Options) -> None:
    """Raise `PlacementError` for ids that a private cluster lacks. Others may still get nodes."""
    ray_api.connect()
    machines = nodes()
    count = len(homes(machines, options))
    if options.elastic or options.label_selector or not is_private():
        if not count:
            ray_api.warn_once(
                f"device_ids={[*ids]}: the cluster has no GPU for these Options. Replicas wait up "
                f"to {options.placement_timeout:g} s for a node with one. Give 'cpu' entries for "
                "CPU replicas"
            )
        return
    missing = [i for i in ids if i >= count]
    if missing:
        has = "no GPU" if not count else "GPU 0 alone" if count == 1 else f"GPUs 0 to {count - 1}"
        raise PlacementError(
            f"device_ids: {missing} not in the cluster, which has {has} on {len(machines)} node(s) "
            "for these Options. Use those, or 'cpu' entries for CPU replicas"
        )


def booked(kind: str, options: Options) -> dict[str, float]:
    """Return the resources that Ray books for a replica."""
    needs = {
        "CPU": options.cpus_per_replica,
        "GPU": options.gpus_per_replica if kind == "gpu" else 0.0,
    }
    found = {name: amount for name, amount in {**needs, **options.resources}.items() if amount}
    # Ray compares labels only for what books something.
    return found or ({"CPU": 0.001} if options.label_selector else {})


def suits(node: Node, options: Options) -> bool:
    """Tell if replicas may go to a node, free or not. Labels are for Ray to compare."""
    return _fits(node.total, options.resources)


def _fits(amounts: Mapping[str, float], needs: Mapping[str, float]) -> bool:
    return all(amounts.get(name, 0.0) + _LITTLE >= amount for name, amount in needs.items())


def homes(machines: Sequence[Node], options: Options) -> list[str]:
    """Return the node of each logical GPU."""
    found: list[str] = []
    for node in machines:
        if suits(node, options):
            found += [node.id] * (int(node.total.get("GPU", 0)) * options.replicas_per_gpu)
    return found


def for_cpus(machines: Sequence[Node], options: Options) -> list[Node]:
    """Return nodes for CPU replicas. A head that was started without CPUs is left alone."""
    suitable = [node for node in machines if suits(node, options)]
    return [node for node in suitable if node.total.get("CPU", 0) > 0] or suitable


def plan(wanted: Places, machines: Sequence[Node], options: Options) -> Plan:
    """Return the node of each place for which there is room now."""
    left = {node.id: dict(node.free) for node in machines if suits(node, options)}
    gpus, cpus = homes(machines, options), [node.id for node in for_cpus(machines, options)]
    found: dict[DevicePlace, str] = {}
    for place in wanted:
        needs = booked(place.kind, options)
        number = place.number if place.kind == "gpu" else place.number % max(1, len(cpus))
        known = (gpus if place.kind == "gpu" else cpus)[number:]
        room = [node for node in left if _fits(left[node], needs)]
        if room:
            node = found[place] = known[0] if known and known[0] in room else room[0]
            for name, amount in needs.items():
                left[node][name] = left[node].get(name, 0.0) - amount
    rank = {node.id: number for number, node in enumerate(machines)}
    return _in_order(found, rank.__getitem__)


def _in_order(found: Mapping[DevicePlace, T], rank: Callable[[T], int]) -> dict[DevicePlace, T]:
    """Hand the same out so that GPU replicas are numbered in the order of nodes."""
    gpus = sorted(place for place in found if place.kind == "gpu")
    ranked = sorted((found[place] for place in gpus), key=rank)
    return {**found, **dict(zip(gpus, ranked, strict=True))}


_SHOWN = 8
"""Nodes that an error names."""


def no_room(wanted: Places, absent: Places, options: Options) -> NoRoom:
    """Make the error for replicas that found no place: their needs, and what is free."""
    machines, kinds, each, free = nodes(), [place.kind for place in wanted], [], []
    for kind in dict.fromkeys(kinds):
        if needs := booked(kind, options):
            amounts = ", ".join(f"{amount:g} {name}" for name, amount in needs.items())
            each.append(f"each {kind.upper()} replica with {amounts}")
    labels = f", on nodes with {dict(options.label_selector)}" if options.label_selector else ""
    for node in machines[:_SHOWN]:
        amounts = ", ".join(
            f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}"
            for name in ("GPU", "CPU", *options.resources)
        )
        unfit = "" if suits(node, options) else " (not one of those that Options allow)"
        free.append(f"node {node.id[:8]} ({node.address}): {amounts}{unfit}")
    return NoRoom(
        f"asked for {kinds.count('gpu')} GPU and {kinds.count('cpu')} CPU replicas "
        f"({'; '.join(each) or 'which book nothing'}{labels}); after "
        f"{options.placement_timeout:g} s the replicas for device_ids "
        f"{[place.device_id for place in absent]} had no place. Free now: "
        f"{'; '.join(free)}. End what holds the rest (`ray list placement-groups` shows it; "
        "executors of this program: close them), add nodes, book less, or use fewer device_ids or "
        "'cpu' entries"
    )


_RACE = 2.0
"""Seconds after which another job must have been faster."""
_LOOK = 0.02
"""Seconds between two checks of a group; Ray makes one in a few milliseconds."""


class Hold(NamedTuple):
    """A place's part of the cluster: a bundle of a group on a node; no group books nothing."""

    group: Group | None
    bundle: int
    node: str


class Holds:
    """The holds of an executor's places, under its name in Ray's dashboard."""

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._options = options
        self._holds: dict[DevicePlace, Hold] = {}
        self._lock = threading.Lock()  # replicas are also started in the background
        if options.label_selector and not ray_api.BY_LABEL:
            text = f"Options(label_selector=...): Ray {ray_api.VERSION} cannot place by label"
            raise PlacementError(text)

    def claim(self, wanted: Places, over: Callable[[], bool]) -> dict[DevicePlace, Hold]:
        """Hold something for each place until it is over; with ``elastic`` for some, at once."""
        there = {node.id for node in nodes()}
        old = {place: self._holds[place] for place in wanted if place in self._holds}
        found = {p: hold for p, hold in old.items() if hold.group and hold.node in there}
        self.release(old.keys() - found.keys())
        missing = [p for p in wanted if p not in found and booked(p.kind, self._options)]
        unbooked = [p for p in wanted if p not in found and p not in missing]
        suitable = for_cpus(nodes(), self._options) if unbooked else []
        for place in unbooked:
            found[place] = Hold(None, 0, suitable[place.number % len(suitable)].id)
        if missing:
            found |= self._reserve(missing, over)
        with self._lock:
            self._holds |= found
        return found

    def _reserve(self, wanted: Places, over: Callable[[], bool]) -> dict[DevicePlace, Hold]:
        elastic = self._options.elastic
        planned = {} if self._options.label_selector else plan(wanted, nodes(), self._options)
        while not over():
            if len(planned) == len(wanted) or (elastic and planned):
                parts = [{place: node} for place, node in planned.items()]
                if found := self._wait(parts, over, len(parts), _RACE):
                    return found
            # Elastic replicas wait as a group each, others as one group for all.
            parts = [{p: ""} for p in wanted] if elastic else [dict.fromkeys(wanted, "")]
            found = self._wait(parts, over, 1, math.inf)
            if elastic and found:
                return found
            planned = {place: hold.node for place, hold in found.items()}
            ray_api.remove({hold.group for hold in found.values() if hold.group is not None})
        return {}

    def _wait(
        self, parts: Sequence[Plan], over: Callable[[], bool], enough: int, most: float
    ) -> dict[DevicePlace, Hold]:
        """Make a group for each part, tied to nodes that are named, and wait until enough are
        placed. The others are removed.
        """
        made: list[tuple[Group, list[DevicePlace]]] = []
        ready: list[tuple[Group, list[DevicePlace]]] = []
        begun = time.monotonic()
        try:
            for part in parts:
                bundles = [booked(place.kind, self._options) for place in part]
                devices = ",".join(f"{'cpu' * (p.kind == 'cpu')}{p.number}" for p in part)
                name = f"raydp:{self._name}:{devices}~{uuid.uuid4().hex[:8]}"
                labels = self._options.label_selector
                made.append((ray_api.group(name, bundles, [*part.values()], labels), [*part]))
            while len(found := [m for m in made if ray_api.is_placed(m[0])]) < enough:
                if over() or time.monotonic() > begun + most:
                    break
                time.sleep(_LOOK if time.monotonic() < begun + 1 else 10 * _LOOK)
            if len(found) < len(made) and not self._options.elastic:
                return {}
            holds = {}
            for group, members in found:
                for bundle, node in enumerate(ray_api.nodes_of(group)):
                    holds[members[bundle]] = Hold(group, bundle, node)
            rank = {node.id: number for number, node in enumerate(nodes())}
            ready = found
            return _in_order(holds, lambda hold: rank.get(hold.node, len(rank)))
        finally:
            ray_api.remove([m[0] for m in made if m not in ready])

    def release(self, wanted: Collection[DevicePlace] | None = None) -> None:
        """Release the holds of some places, by default all."""
        with self._lock:
            chosen = [*(self._holds if wanted is None else wanted)]
            gone = [self._holds.pop(place) for place in chosen if place in self._holds]
        ray_api.remove([hold.group for hold in gone if hold.group is not None])
