"""Who holds what replicas wait for, in words, off Ray's own tables: no dashboard is needed for them."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2

from raydp_parallel.cluster.nodes import Node, booked, nodes, suits
from raydp_parallel.crew import Place
from raydp_parallel.errors import NoRoom
from raydp_parallel.options import Options

log = logging.getLogger("raydp_parallel")

_pb: Any = gcs_pb2

_SHOWN = 8
"""Holders, and nodes, that an error names."""


class _Holder(NamedTuple):
    node: str
    amount: float
    who: str


def no_room(places: Sequence[Place], late: Sequence[Place], options: Options) -> NoRoom:
    """The error for replicas that found no place: what was asked, what is free and where, and who holds the rest."""
    machines = nodes()
    asked = f"{sum(p.kind == 'gpu' for p in places)} GPU and {sum(p.kind == 'cpu' for p in places)} CPU replicas"
    each = "; ".join(
        f"each {kind.upper()} replica with {_amounts(needs)}"
        for kind in dict.fromkeys(place.kind for place in places)
        if (needs := booked(kind, options))
    )
    labels = f", on nodes with {dict(options.label_selector)}" if options.label_selector else ""
    holders = _found() if any(place.kind == "gpu" for place in late) else []
    return NoRoom(
        f"asked for {asked} ({each or 'which book nothing'}{labels}); after {options.placement_timeout:g} s the "
        f"replicas for device_ids {[place.device_id for place in late]} had no place. Free now: "
        f"{_listed([_free(node, options) for node in machines])}. {_held(machines, holders)}End what holds them (an "
        "executor of this program: close it), add nodes, or use fewer device_ids"
    )


def _found() -> list[_Holder]:
    try:
        return [*_holders()]
    except Exception:  # tables of Ray's that are not public: another version may have others
        log.debug("who holds GPUs cannot be found out", exc_info=True)
        return []


def _amounts(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in needs.items())


def _listed(parts: Sequence[str]) -> str:
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return "; ".join(parts[:_SHOWN]) + more


def _free(node: Node, options: Options) -> str:
    names = ("GPU", "CPU", *options.resources)
    amounts = ", ".join(f"{node.free.get(name, 0):g} of {node.total.get(name, 0):g} {name}" for name in names)
    unfit = "" if suits(node, options) else " (not one of those that Options allow)"
    return f"{_place(node)}: {amounts}{unfit}"


def _place(node: Node) -> str:
    return f"node {node.id[:8]} ({node.address})"


def _held(machines: Sequence[Node], holders: Sequence[_Holder]) -> str:
    """Who holds GPUs of which node; what Ray does not say is tasks, or is about to be freed."""
    lines = []
    for node in machines:
        held = node.total.get("GPU", 0) - node.free.get("GPU", 0)
        known: dict[str, float] = defaultdict(float)
        for holder in holders:
            if holder.node == node.id:
                known[holder.who] += holder.amount
        parts = [f"{amount:g} by {who}" for who, amount in known.items()]
        rest = held - sum(known.values())
        if rest > 0.01:
            parts.append(f"{rest:g} by tasks, or about to be free")
        if parts and held > 0.01:
            lines.append(f"of {_place(node)}: {', '.join(parts)}")
    return f"GPUs are held {_listed(lines)}. " if lines else ""


def _holders() -> Iterator[_Holder]:
    """Actors that hold GPUs on their own, and placement groups."""
    accessor = state._connect_and_get_accessor()
    jobs = _jobs()
    for entry in accessor.get_actor_table(None, "ALIVE"):
        actor = _pb.ActorTableData.FromString(entry)
        amount = dict(actor.required_resources).get("GPU", 0.0)
        if amount:
            name = repr(actor.name) if actor.name else "without a name"
            who = f"actor {name} ({actor.class_name}, pid {actor.pid}) of {jobs[actor.job_id.hex()]}"
            yield _Holder(actor.node_id.hex(), amount, who)
    for entry in accessor.get_placement_group_table():
        group = _pb.PlacementGroupTableData.FromString(entry)
        amounts: dict[str, float] = defaultdict(float)
        if group.state != _pb.PlacementGroupTableData.REMOVED:
            for bundle in group.bundles:
                amounts[bundle.node_id.hex()] += dict(bundle.unit_resources).get("GPU", 0.0)
        who = f"{_named(group.name)} of {jobs[group.creator_job_id.hex()]}"
        yield from (_Holder(node, amount, who) for node, amount in amounts.items() if node and amount)


def _named(group: str) -> str:
    """A placement group, or the executor whose it is (`Holds` names it)."""
    ours = re.fullmatch(r"raydp:([^:]*):.*", group)
    return f"executor {ours[1]!r}" if ours else f"placement group {group!r}"


def _jobs() -> Mapping[str, str]:
    """What to call each job."""
    own = ray.get_runtime_context().get_job_id()
    names: dict[str, str] = defaultdict(lambda: "a job that ended")
    for job in state.job_table():
        entry = f", {job['Entrypoint']!r}" if job.get("Entrypoint") else ""
        where = f"job {job['JobID']} (pid {job['DriverPid']} on {job['DriverIPAddress']}{entry})"
        names[job["JobID"]] = "this program" if job["JobID"] == own else where
    return names
