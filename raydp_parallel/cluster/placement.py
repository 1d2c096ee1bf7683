"""The node that a replica goes to, and `Holds`: its part of the cluster, as Ray's placement groups.

[Note: logical GPUs]
Logical GPU k is the k-th in the order of nodes: the driver's first, the others by id. With
``gpus_per_replica=0.5`` there are two of them for each GPU. A replica goes to the node of its
number if something is free there, else where Ray finds room; then the replicas are numbered anew,
so that ranks are in the order of nodes all the same.

[Note: groups]
A group outlives the processes in it: no other job gets the GPU while a successor starts. At home
each replica has one of its own. Where there is no room for all, they wait as one group that is tied
to no node: Ray places it as a whole or not at all, so that two programs do not wait for each
other's half, and its autoscaler knows the whole demand. Ray itself moves the bundle of a node that
is lost; a replica that has its group alone asks for another one, which is tied to a node that
lives. Names end in letters that no other has: Ray refuses a name that is in use, and frees that of
a removed group late.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from raydp_parallel.cluster import ray_api
from raydp_parallel.cluster.ray_api import Node, PlacementGroup, is_private, nodes
from raydp_parallel.errors import NoRoom, PlacementError
from raydp_parallel.options import ExecutorOptions

Device = int | str | torch.device
DeviceId = int | str
"""A logical GPU of the cluster, or ``"cpu"``."""


class Place(NamedTuple):
    """A device that can hold a replica: a logical ``"gpu"``, or the n-th ``"cpu"`` entry."""

    kind: str
    number: int

    @property
    def device(self) -> str:
        """The device, as torch writes it."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.number}"


Places = Sequence[Place]
Over = Callable[[], bool]
"""Tells if the time for a start is over; raises an error if nobody waits for it any more."""


def places(device_ids: tuple[DeviceId, ...]) -> tuple[Place, ...]:
    """Return the places that ``device_ids`` name. The n-th ``"cpu"`` is always the same replica."""
    cpus = itertools.count()
    return tuple(
        Place("cpu", next(cpus)) if entry == "cpu" else Place("gpu", int(entry))
        for entry in device_ids
    )


def device_id(entry: object, of: str = "device_ids") -> DeviceId:
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


def normalize(device_ids: Sequence[object] | None, options: ExecutorOptions) -> list[DeviceId]:
    """Return ``device_ids`` in their plain form, checked against the cluster."""
    if device_ids is None:
        return list(all_gpus(options))
    if isinstance(device_ids, (str, int)) or not hasattr(device_ids, "__iter__"):
        raise TypeError(f"device_ids={device_ids!r}: give a list, such as [0, 1] or ['cpu', 'cpu']")
    given = [*device_ids]
    ids = [device_id(entry) for entry in given]
    if not ids:
        raise ValueError("device_ids=[] names no device: leave it out for every GPU, or give 'cpu'")
    if all(entry == "cpu" for entry in ids):
        return ids
    ray_api.connect()
    count = len(homes("gpu", options))
    pairs = zip(given, ids, strict=True)
    missing = [entry for entry, number in pairs if number != "cpu" and int(number) >= count]
    text = f"device_ids: {missing} not in the cluster (its GPUs: {count})"
    if options.elastic or options.label_selector or not is_private():  # it may still get nodes
        if not count:
            ray_api.warn_once(f"{text}. Replicas wait for one. Give 'cpu' entries for CPU replicas")
    elif missing:
        use = [*range(count)] or ["cpu"] * len(ids)
        raise PlacementError(f"{text}. Use {use}, or 'cpu' entries")
    return ids


def all_gpus(options: ExecutorOptions) -> list[int]:
    """Return every GPU of the cluster. None is started where torch sees no or one GPU here."""
    if options.label_selector:
        raise ValueError("Options(label_selector=...): give device_ids; only Ray knows which fit")
    own = torch.cuda.device_count() * options.replicas_per_gpu
    cluster = ray_api.connect(start=own > 1)
    return list(range(len(homes("gpu", options)) if cluster else own))


def booked(kind: str, options: ExecutorOptions) -> dict[str, float]:
    """Return the resources that Ray books for a replica."""
    needs = {
        "CPU": options.cpus_per_replica,
        "GPU": options.gpus_per_replica if kind == "gpu" else 0.0,
    }
    found = {name: amount for name, amount in {**needs, **options.resources}.items() if amount}
    # Ray compares labels only for what books something.
    return found or ({"CPU": 0.001} if options.label_selector else {})


def homes(kind: str, options: ExecutorOptions) -> list[Node]:
    """Return the node of each logical GPU, or those to which CPU replicas go in turn; what is free
    there does not matter, and labels are for Ray to compare.
    """
    needs = options.resources
    suitable = [n for n in nodes() if all(n.total.get(k, 0.0) >= needs[k] for k in needs)]
    if kind == "cpu":  # a head that was started without CPUs is left alone
        return [node for node in suitable if node.total.get("CPU", 0) > 0] or suitable
    per = options.replicas_per_gpu
    return [node for node in suitable for _ in range(int(node.total.get("GPU", 0)) * per)]


def at_home(wanted: Places, options: ExecutorOptions) -> dict[Place, str]:
    """Return the node of each place, for those that the cluster has."""
    rows, found = {kind: homes(kind, options) for kind in ("gpu", "cpu")}, {}
    for place in wanted:
        row = rows[place.kind]
        if row and (place.kind == "cpu" or place.number < len(row)):
            found[place] = row[place.number % len(row)].id
    return found


def no_room(wanted: Places, absent: Places, options: ExecutorOptions) -> NoRoom:
    """Make the error for replicas that found no place: their needs, and what is free."""
    kinds = [place.kind for place in wanted]
    each = ", ".join(f"{kind.upper()} {booked(kind, options)}" for kind in dict.fromkeys(kinds))
    ids = [place.number if place.kind == "gpu" else "cpu" for place in absent]
    labels = f", on nodes with {dict(options.label_selector)}" if options.label_selector else ""
    return NoRoom(
        f"asked for {kinds.count('gpu')} GPU and {kinds.count('cpu')} CPU replicas "
        f"(booked for each {each}{labels}); after "
        f"{options.placement_timeout:g} s those for device_ids {ids} had no place. Free now: "
        f"{ray_api.free(('GPU', 'CPU', *options.resources))}, on {len(nodes())} node(s): close "
        "other executors, end what `ray list placement-groups` shows, add nodes, book less, or use "
        "fewer device_ids or 'cpu' entries"
    )


class Hold(NamedTuple):
    """A place's part of the cluster: a bundle of a group on a node; no group books nothing."""

    group: PlacementGroup | None
    bundle: int
    node: str


class Holds:
    """The holds of an executor's places, under its name in Ray's dashboard."""

    def __init__(self, name: str, options: ExecutorOptions) -> None:
        self._name = name
        self._options = options
        self._holds: dict[Place, Hold] = {}
        self._lock = threading.Lock()  # replicas are also started in the background
        if options.label_selector and not ray_api.BY_LABEL:
            raise PlacementError("Options(label_selector=...) needs Ray 2.49 or newer")

    def claim(self, wanted: Places, over: Over) -> dict[Place, Hold]:
        """Hold something for each place until it is over; with ``elastic`` for some, at once."""
        there = {node.id for node in nodes()}
        known = {place: self._holds[place] for place in wanted if place in self._holds}
        self.release([place for place, hold in known.items() if hold.node not in there])
        found = {place: hold for place, hold in known.items() if hold.node in there}
        for place, hold in known.items():  # Ray moves the bundles of groups that stay
            while place in self._holds and place not in found and not over():
                moved = ray_api.nodes_of(hold.group) if hold.group is not None else None
                if moved:
                    found[place] = hold._replace(node=moved[hold.bundle])
                time.sleep(ray_api.PAUSE)
        elastic, home = self._options.elastic, at_home(wanted, self._options)
        new = [place for place in wanted if place not in self._holds]
        missing = [place for place in new if booked(place.kind, self._options)]
        found |= {place: Hold(None, 0, home[place]) for place in new if place not in missing}
        parts = [[place] for place in missing if place in home]
        taken = {}
        if parts and not self._options.label_selector and (elastic or len(parts) == len(missing)):
            taken = self._ask(parts, home, over)
        if missing and not taken:
            taken = self._ask([[p] for p in missing] if elastic else [missing], {}, over)
        with self._lock:
            self._holds |= found | taken
        return found | taken

    def _ask(
        self, parts: Sequence[Places], home: Mapping[Place, str], over: Over
    ) -> dict[Place, Hold]:
        """Make a group for each part, and return the holds if all have room; with ``elastic`` those
        that have. With homes the groups are tied to these, and wait for no room.
        """
        made: dict[PlacementGroup, Places] = {}
        holds: dict[Place, Hold] = {}
        try:
            for part in parts:
                bundles = [booked(place.kind, self._options) for place in part]
                devices = ",".join(f"{'cpu' * (p.kind == 'cpu')}{p.number}" for p in part)
                name = f"raydp:{self._name}:{devices}~{uuid.uuid4().hex[:8]}"
                pins = [home.get(place, "") for place in part]
                made[ray_api.group(name, bundles, pins, self._options.label_selector)] = part
            while True:
                placed = [ray_api.nodes_of(group) for group in made]
                if (None not in placed and (home or any(placed))) or over():
                    break
                time.sleep(ray_api.PAUSE)
            rank = {node.id: number for number, node in enumerate(nodes())}
            if all(placed) or self._options.elastic:
                holds = {
                    part[bundle]: Hold(group, bundle, node)
                    for (group, part), there in zip(made.items(), placed, strict=True)
                    for bundle, node in enumerate(there or ())
                }
            return _in_order(holds, rank)
        finally:
            kept = {hold.group for hold in holds.values()}
            ray_api.remove([group for group in made if group not in kept])

    def release(self, wanted: Iterable[Place] | None = None) -> None:
        """Release the holds of some places, by default all. A group that others have, too, stays
        with all of its holds.
        """
        with self._lock:
            chosen = {*(self._holds if wanted is None else wanted)}
            kept = {h.group for place, h in self._holds.items() if place not in chosen} - {None}
            gone = [p for p, hold in self._holds.items() if p in chosen and hold.group not in kept]
            groups = {self._holds[place].group for place in gone}
            # Before they are forgotten: Ctrl-C may come.
            ray_api.remove([group for group in groups if group is not None])
            for place in gone:
                del self._holds[place]


def _in_order(holds: Mapping[Place, Hold], rank: Mapping[str, int]) -> dict[Place, Hold]:
    """Hand the same out so that GPU replicas are numbered in the order of nodes."""
    gpus = sorted(place for place in holds if place.kind == "gpu")
    ranked = sorted((holds[place] for place in gpus), key=lambda h: rank.get(h.node, len(rank)))
    return {**holds, **dict(zip(gpus, ranked, strict=True))}
