"""The text of the error that says which jobs hold the resources that replicas wait for. It is read
from Ray's own tables, which need no dashboard.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.cluster.nodes import booked, suits
from raydp_parallel.cluster.ray_api import Holder, Node, holders, nodes
from raydp_parallel.errors import NoRoom
from raydp_parallel.monitoring.stats import printable
from raydp_parallel.options import Options

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
        f"each {kind.upper()} replica with {_amounts(needs)}"
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


def _amounts(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


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
