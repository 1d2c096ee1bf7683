"""The nodes of the cluster, what a replica books on them, and the node that it goes to. The
driver's node comes first.

[Note: logical GPUs]
Logical GPU k is the k-th in the order of nodes: the driver's first, the others by id. With
``gpus_per_replica=0.5`` there are two of them for each GPU. A replica goes to the node of its
number if something is free there, else to the first node that has room; then the replicas are
numbered anew, so that ranks are in the order of nodes all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from raydp_parallel.cluster import joining
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.ray_api import Node, is_private, nodes
from raydp_parallel.errors import PlacementError
from raydp_parallel.options import Options

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
