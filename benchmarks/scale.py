"""What would 8 to 1,024 replicas cost, and from where on is Ray Train the better choice?

`python -m benchmarks.scale` measures on real actors what one more replica costs the driver, in wall
time and in its own processor's time, flat and through relays, and how fast memory is copied here.
The rest is a model (docs/scaling.md has it in words): bytes over each link for each way to move
weights and gradients, beside DDP's, and the time of a step that follows for some networks and
workloads. For your own::

    python -m benchmarks.scale --weights 500 --inputs 1 --compute 300 --network 100 --per-node 8
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import ray
import torch
from torch import Tensor, nn

import raydp_parallel
from benchmarks.measure import RESULTS, Effort, Report, Table, alone, as_text, interleaved
from benchmarks.peers import echo

COUNTS = (1, 2, 4, 8, 16)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ROUNDS = 80
MB, GBIT = 1e6, 1e9 / 8
_ADAM = 7.0
_REFERENCE = 200.0
"""Bytes of a chunk's inputs that are a reference, or numbers of rows."""
TOO_MUCH = 1.25
"""Times DDP's step, from which on handing over to Ray Train is said to pay."""


class Workload(NamedTuple):
    """What is trained; each replica has the same batch, however many there are.

    Attributes:
        name: Its name.
        weights: Bytes of parameters, and of gradients.
        inputs: Bytes of one replica's chunk of the batch.
        outputs: Bytes of what comes back from one replica, such as a loss per row.
        compute: Seconds of forward and backward of one chunk.
    """

    name: str
    weights: float
    inputs: float
    outputs: float
    compute: float


class Machines(NamedTuple):
    """Where it is trained.

    Attributes:
        network: Bytes per second in and out of a node.
        per_node: Replicas of a node.
        memory: Bytes per second that the driver copies.
        trip: Seconds of a call to one replica and back.
        per_call: Seconds of the driver for each further call.
        optimizer: How many times the optimizer touches each weight's bytes in the driver's memory,
            beyond what each process of DDP does too: Adam seven times on a driver without a GPU,
            and on one with a GPU not at all.
    """

    network: float
    per_node: int
    memory: float
    trip: float
    per_call: float
    optimizer: float = 0.0


class Traffic(NamedTuple):
    """Bytes of one step.

    Attributes:
        driver_out: Out of the driver's node.
        driver_in: Into it.
        node: In or out of the busiest other node.
    """

    driver_out: float
    driver_in: float
    node: float


WORKLOADS = (
    Workload("ResNet-50, 64 images as bytes", 102 * MB, 9.6 * MB, 512, 0.15),
    Workload("GPT-2 124 M, 8 x 1,024 tokens", 498 * MB, 0.07 * MB, 512, 0.30),
    Workload("GPT-2 124 M, 64 x 1,024 tokens", 498 * MB, 0.52 * MB, 512, 2.4),
    Workload("1.3 G parameters, 4 x 2,048 tokens", 5200 * MB, 0.07 * MB, 512, 1.5),
)
"""Float32 weights, of a GPU of the A100's kind the time of one chunk, rounded: inputs, and no
measurement of ours.
"""

NETWORKS = (10, 25, 100, 400)
"""Gigabits per second."""


def star(load: Workload, count: int, nodes: int) -> Traffic:
    """A copy of the weights to each replica, and each one's gradients back."""
    each = count / nodes
    per_node = each * (load.weights + max(load.inputs, load.outputs))
    return Traffic(
        count * (load.weights + load.inputs), count * (load.weights + load.outputs), per_node
    )


def once_per_node(load: Workload, count: int, nodes: int) -> Traffic:
    """The weights once to each node, by Ray's object store; each replica's gradients back."""
    each = count / nodes
    node = max(load.weights + each * load.inputs, each * (load.weights + load.outputs))
    return Traffic(
        nodes * load.weights + count * load.inputs, count * (load.weights + load.outputs), node
    )


def shared_per_node(load: Workload, count: int, nodes: int) -> Traffic:
    """The same, with gradients summed on each node before they leave it."""
    node = load.weights + count / nodes * max(load.inputs, load.outputs)
    both = nodes * load.weights
    return Traffic(both + count * load.inputs, both + count * load.outputs, node)


def collective(load: Workload, count: int, nodes: int) -> Traffic:
    """The weights to one replica, which broadcasts them; gradients summed among replicas, and the
    sum back.
    """
    passed = load.weights if nodes > 1 else 0.0
    node = load.weights + max(passed, count / nodes * max(load.inputs, load.outputs))
    return Traffic(load.weights + count * load.inputs, load.weights + count * load.outputs, node)


def trained(load: Workload, count: int, nodes: int) -> Traffic:
    """An optimizer in the replicas: no weights, and sums of gradients from all to all, so that each
    replica's bytes leave its node, twice. In the order of chunks a node cannot add up its own
    first.
    """
    each = count / nodes
    among = 2 * each * (nodes - 1) / nodes * load.weights
    return Traffic(count * load.inputs, count * load.outputs, among)


def referred(load: Workload, count: int, nodes: int) -> Traffic:
    """The same, with inputs that replicas have or fetch for themselves, as DDP's processes do."""
    return trained(load._replace(inputs=_REFERENCE), count, nodes)


def chained(load: Workload, count: int, nodes: int) -> Traffic:
    """The same, with sums that go from node to node, where each adds its replicas' gradients in
    order, and back to all. It is not built.
    """
    among = 2 * (nodes - 1) / nodes * load.weights
    return referred(load, count, nodes)._replace(node=among)


def ddp(load: Workload, count: int, nodes: int) -> Traffic:
    """No driver: a ring through all nodes, twice."""
    return Traffic(0.0, 0.0, 2 * (nodes - 1) / nodes * load.weights)


WAYS: dict[str, Callable[[Workload, int, int], Traffic]] = {
    "star": star,
    "weights once per node": once_per_node,
    "both once per node": shared_per_node,
    "collective": collective,
    "trained there": trained,
    "and inputs by reference": referred,
    "and sums node by node": chained,
    "DDP": ddp,
}
TRAINED = ("trained there", "and inputs by reference", "and sums node by node")
"""Ways with the optimizer in the replicas."""


def seconds(way: str, load: Workload, count: int, machines: Machines) -> float:
    """A step. Two thirds of the computing are backward, which overlaps with traffic among replicas
    alone.
    """
    nodes = -(-count // machines.per_node)
    found = WAYS[way](load, count, nodes)
    if way == "DDP":
        return load.compute + max(0.0, found.node / machines.network - load.compute * 2 / 3)
    driver = min(machines.network, machines.memory)
    calls = 2 * (machines.trip + (count - 1) * machines.per_call)
    through = found.driver_out / driver + found.driver_in / driver
    if way in TRAINED:
        among = max(0.0, found.node / machines.network - load.compute * 2 / 3)
        return load.compute + calls + through + among
    among = (
        max(0.0, load.weights / machines.network - load.compute * 2 / 3)
        if way == "collective" and nodes > 1
        else 0.0
    )
    optimizer = machines.optimizer * load.weights / machines.memory
    return load.compute + calls + through + among + optimizer


def hand_over(way: str, load: Workload, machines: Machines) -> int | None:
    """From how many replicas on DDP is faster by more than a quarter; None if it never is."""
    slow = (
        n
        for n in SIZES
        if seconds(way, load, n, machines) > TOO_MUCH * seconds("DDP", load, n, machines)
    )
    return next(slow, None)


def traffic_table(load: Workload, per_node: int) -> Table:
    """Megabytes of one step for each way."""
    names = [f"{way}: driver out / in, node" for way in WAYS]
    rows: list[list[object]] = []
    for count in SIZES:
        nodes = -(-count // per_node)
        found = [way(load, count, nodes) for way in WAYS.values()]
        cells = [
            f"{t.driver_out / MB:,.0f} / {t.driver_in / MB:,.0f}, {t.node / MB:,.0f}" for t in found
        ]
        rows.append([str(count), *cells])
    return Table(
        f"bytes of one step, MB: {load.name}, {per_node} replicas per node",
        ["replicas", *names],
        rows,
    )


def times_table(load: Workload, machines: Machines) -> Table:
    """Milliseconds of one step for each way."""
    rows = [[str(n), *(seconds(way, load, n, machines) * 1e3 for way in WAYS)] for n in SIZES]
    gbits = machines.network / GBIT
    return Table(
        f"a step, ms, by the model: {load.name}, {gbits:g} Gbit/s", ["replicas", *WAYS], rows
    )


def through_relays(machines: Machines, fitted: dict[str, float]) -> Machines:
    """Calls as one per node, passed on there: what a call's way costs the driver is paid once per
    node, and a hop.
    """
    spared = fitted["call_ms"] / 1e3 * (1 - 1 / machines.per_node)
    return machines._replace(
        per_call=max(0.0, machines.per_call - spared), trip=machines.trip + fitted["hop_ms"] / 1e3
    )


def faster(
    machines: Machines, fitted: dict[str, float], times: float = 4.0
) -> tuple[Machines, dict[str, float]]:
    """A driver that does everything in a fraction of the time: this one when idle, or a
    better one.
    """
    trips = machines._replace(trip=machines.trip / times, per_call=machines.per_call / times)
    less = {name: value / times for name, value in fitted.items()}
    return trips._replace(memory=machines.memory * times), less


def hand_over_table(
    loads: Sequence[Workload], machines: Machines, fitted: dict[str, float], which: str = ""
) -> Table:
    """For each workload and network: up to where each way is within a quarter of DDP's step."""
    ours = [way for way in WAYS if way != "DDP"]
    poor, relayed = machines._replace(optimizer=_ADAM), through_relays(machines, fitted)
    rows: list[list[object]] = []
    for load in loads:
        for gbits in NETWORKS:
            found = [hand_over(way, load, machines._replace(network=gbits * GBIT)) for way in ours]
            others = (kind._replace(network=gbits * GBIT) for kind in (relayed, poor))
            found.extend(hand_over("collective", load, kind) for kind in others)
            rows.append(
                [f"{load.name}, {gbits} Gbit/s", *(f"{n:,}" if n else "over 1,024" for n in found)]
            )
    title = (
        "hand over to Ray Train: from how many replicas on a step takes over "
        f"{TOO_MUCH:g} of DDP's{which}"
    )
    columns = [
        "workload and network",
        *ours,
        "collective, calls relayed",
        "collective, Adam on a driver's CPU",
    ]
    return Table(title, columns, rows)


@ray.remote(num_cpus=0)
class Relay:
    """Passes a call on to some actors, as one per node would."""

    def __init__(self, actors: list[Any]) -> None:
        self.actors = actors

    def fan_out(self) -> None:
        """There and back."""
        echo.fan_out(self.actors)


def relayed(relays: Sequence[Any]) -> None:
    """One call to each relay."""
    ray.get([relay.fan_out.remote() for relay in relays])


def step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model(x).sum().backward()


def empty_trip(executor: raydp_parallel.Executor, count: int) -> None:
    """A message that asks for nothing to each of so many replicas, over their lines."""
    slots = executor.slots(["cpu"] * count)
    backend = executor.replica_set.backend
    backend.collect(
        [
            backend.submit(slot.client, "forget", pickle.dumps(slot.contents.forget()), ())
            for slot in slots
        ]
    )


def own_time(work: Callable[[], None]) -> float:
    """Seconds of this process's processors, all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(effort: Effort) -> dict[str, dict[int, float]]:
    """What calls cost as they become more."""
    counts = COUNTS if effort is not Effort.SMOKE else COUNTS[:2]
    net, actors = nn.Linear(4, 2), echo.start(counts[-1])
    # no memory is shared, as with other machines
    remote = raydp_parallel.Options(link="inline", metrics=False)
    contenders: dict[str, Callable[[], Any]] = {}
    relays = {count: _relays(actors[:count]) for count in counts}
    for count in counts:
        model, x = (
            raydp_parallel.DataParallel(net, ["cpu"] * count, options=remote),
            torch.randn(count, 4),
        )
        run = partial(step, model, x)
        trip = partial(empty_trip, model.executor, count)
        contenders |= {f"{count} {STEP}": run, f"{count} {STEP_OWN}": partial(own_time, run)}
        contenders |= {f"{count} {TRIP}": trip, f"{count} {TRIP_OWN}": partial(own_time, trip)}
        contenders[f"{count} {RAY}"] = partial(echo.fan_out, actors[:count])
        contenders[f"{count} {TREE}"] = partial(relayed, relays[count])
    medians = interleaved(contenders, effort.rounds(ROUNDS), effort.warmup)
    echo.end([*actors, *(relay for found in relays.values() for relay in found)])
    return {name: {count: medians[f"{count} {name}"] for count in counts} for name in COLUMNS}


STEP, STEP_OWN = "a step", "of that the driver's processor"
TRIP, TRIP_OWN = "an empty trip", "of that the driver's"
RAY, TREE = "the same by Ray calls", "by Ray calls through relays of 4"
COLUMNS = (STEP, STEP_OWN, TRIP, TRIP_OWN, RAY, TREE)


def _relays(actors: Sequence[Any], each: int = 4) -> list[Any]:
    return [Relay.remote([*actors[at : at + each]]) for at in range(0, len(actors), each)]


def _line(points: dict[int, float]) -> tuple[float, float]:
    found = statistics.linear_regression([*points], [*points.values()])
    return found.intercept, found.slope


def copy_speed() -> float:
    """Bytes per second of a large copy."""
    source = torch.ones(16 << 20)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times)


def run(effort: Effort) -> Report:
    """Scaling past this machine."""
    return report(measure(effort), copy_speed())


def report(points: dict[str, dict[int, float]], memory: float) -> Report:
    """What follows from the measurement."""
    rows: list[list[object]] = [
        [str(count), *(found[count] for found in points.values())] for count in points[STEP]
    ]
    rows.append(["each more", *(_line(found)[1] for found in points.values())])
    measured = Table("measured: actors that do next to nothing, ms", ["replicas", *points], rows)
    first = points[STEP][COUNTS[0]] / 2
    per_call = max(0.0, _line(points[STEP_OWN])[1] / 2)
    fitted = {
        "trip_ms": first,
        "per_call_ms": per_call,
        "call_ms": max(0.0, _line(points[TRIP_OWN])[1]),
        "hop_ms": points[TRIP][COUNTS[0]],  # a relay is called over a line, too
        "memory_gb_s": memory / 1e9,
    }
    machines = with_fit(fitted)
    tables = [
        measured,
        traffic_table(WORKLOADS[0], machines.per_node),
        *(times_table(load, machines) for load in WORKLOADS),
        hand_over_table(WORKLOADS, machines, fitted),
        hand_over_table(
            WORKLOADS, *faster(machines, fitted), "; a driver four times as fast as measured here"
        ),
        hand_over_table(
            WORKLOADS,
            *faster(machines._replace(per_node=1), fitted),
            "; such a driver, and one replica per node",
        ),
    ]
    notes = [
        f"Taken from the measurement: a trip of {first:.2f} ms, {per_call:.3f} ms of the "
        "driver for each further call, "
        f"{fitted['call_ms']:.3f} ms of it for the call's way, {fitted['hop_ms']:.2f} ms "
        "for a hop through a relay, "
        f"{fitted['memory_gb_s']:.1f} GB/s for copies. The rest is computed; "
        "docs/scaling.md says how.",
        "All actors are on this machine: the wall time of a step has their work in it, too, "
        "as far as cores are short; "
        "the driver's own time has not.",
    ]
    data: dict[str, Any] = {
        "measured_ms": {
            name: {str(n): ms for n, ms in found.items()} for name, found in points.items()
        }
    }
    data["fitted"], data["replicas"] = fitted, [*SIZES]
    data["step_ms"] = {
        load.name: {way: [seconds(way, load, n, machines) * 1e3 for n in SIZES] for way in WAYS}
        for load in WORKLOADS
    }
    return Report("scale", "What would 8 to 1,024 replicas cost?", tables, [], data, notes)


def with_fit(fitted: dict[str, float], gbits: float = 100, per_node: int = 8) -> Machines:
    """Machines like this one, in a network."""
    memory = fitted["memory_gb_s"] * 1e9
    return Machines(
        gbits * GBIT, per_node, memory, fitted["trip_ms"] / 1e3, fitted["per_call_ms"] / 1e3
    )


def plan(arguments: Sequence[str]) -> None:
    """Print the model for a workload of one's own, with what was measured last."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=plan.__doc__)
    parser.add_argument("--weights", type=float, required=True, help="MB of parameters")
    parser.add_argument("--inputs", type=float, default=1.0, help="MB of one replica's chunk")
    parser.add_argument(
        "--outputs", type=float, default=0.0, help="MB that come back from one replica"
    )
    parser.add_argument(
        "--compute", type=float, required=True, help="ms of forward and backward of one chunk"
    )
    parser.add_argument("--network", type=float, default=100.0, help="Gbit/s of a node")
    parser.add_argument("--per-node", type=int, default=8, help="replicas of a node")
    given = parser.parse_args(arguments)
    fitted = json.loads((RESULTS / "scale.json").read_text(encoding="utf-8"))["data"]["fitted"]
    load = Workload(
        "yours", given.weights * MB, given.inputs * MB, given.outputs * MB, given.compute / 1e3
    )
    machines = with_fit(fitted, given.network, given.per_node)
    tables = [
        traffic_table(load, given.per_node),
        times_table(load, machines),
        hand_over_table([load], machines, fitted),
    ]
    print(*(as_text(table) for table in tables), sep="\n\n")


if __name__ == "__main__":
    if "--weights" in sys.argv:
        plan(sys.argv[1:])
    else:
        alone(run)
