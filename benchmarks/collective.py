"""What do replicas of two nodes gain from exchanging gradients and weights among themselves?

`python -m benchmarks.collective` starts a cluster of two nodes on this machine, which share neither
memory nor files (`ray.cluster_utils.Cluster`), with the driver on the first and one CPU replica on
each. It trains the perceptron of 16.8 million parameters in one interleaved run of: DDP over gloo
with as many processes; the default, where the replicas are a group; the same without overlap, so
that sums begin when backward is over; and the object store, where everything goes through the
driver. At the end all must hold the same weights.

It then counts the bytes through the driver per step, with 2 replicas and with 8 on two further
nodes, and trains with AdamW in 2, 4 and 8 replicas on one of these and on both, beside DDP with as
many processes, and one process with all threads, which is the floor: whatever the number of
replicas, they share this machine's cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved, use_niceness
from benchmarks.nets import MLP_ADAMW, perceptron
from benchmarks.peers import IN_REPLICAS
from benchmarks.peers.base import Peer
from benchmarks.peers.here import Here, in_replicas, plain
from benchmarks.peers.processes import ddp
from raydp_parallel import DataParallel, Executor, Options

CASE = "MLP 16.8 M, batch 256"
NODES = 2
ROUNDS = 24
_GPUS = _MANY = 8
"""GPUs that Ray counts on each of two further nodes, where CPU replicas take their places to count
bytes.
"""
_STORE = 2 << 30
"""Bytes of each node's object store. With the 150 MB of such a cluster's default Ray waits for room
in each step.
"""

_FIRST, _OURS, _LATE, _STAR, _FLOOR = (
    "DDP gloo",
    "among replicas",
    "among replicas, no overlap",
    "object store",
    "one process",
)


def contender(link: Any, overlap: bool = True) -> tuple[Peer, Executor]:
    """Our wrapper over one replica on each node."""
    executor = Executor(["cpu"] * NODES, options=Options(link=link, metrics=False))

    def wrap(net: torch.nn.Module) -> DataParallel[Any]:
        model = DataParallel(net, executor=executor)
        if not overlap:
            executor.groups.late.add(executor.tracker(net, keep=True).id)
        return model

    return Here(wrap, executor.close), executor


def _places(replicas: int, nodes: int = NODES) -> list[int]:
    """So many places, the same number on each of so many of the further nodes."""
    each = replicas // nodes
    return [node * _GPUS + place for node in range(nodes) for place in range(each)]


def inside(replicas: int, nodes: int, effort: Effort) -> dict[str, float]:
    """Milliseconds of a step with AdamW in replicas on some nodes, of DDP's, and of one process."""
    executor = Executor([*_places(replicas, nodes)], options=Options(metrics=False))
    peers: dict[str, Peer] = {
        _FIRST: ddp(replicas),
        _FLOOR: plain(replicas),
        IN_REPLICAS: Here(
            lambda net: DataParallel(net, executor=executor), executor.close, in_replicas
        ),
    }
    for peer in peers.values():
        peer.begin(MLP_ADAMW)
    turns = {name: partial(_turn, peer, 1) for name, peer in peers.items()}
    medians = interleaved(turns, effort.rounds(ROUNDS), min(2, effort.warmup))
    sums = {name: peer.finish().checksum for name, peer in peers.items()}
    if max(sums.values()) - min(sums.values()) > 1e-6 * max(sums.values()):
        raise RuntimeError(f"different weights at the end, checksums {sums}")
    for peer in peers.values():
        peer.close()
    return medians


def traffic(replicas: int, width: int, steps: int = 3, trained: bool = False) -> float:
    """Bytes through the driver per step, for each byte of the model.

    Args:
        replicas: How many replicas.
        width: The model's width.
        steps: How many steps are counted.
        trained: Whether the optimizer is in the replicas.
    """
    with Executor(_places(replicas), options=Options(metrics=False)) as executor:
        net = perceptron(width)
        model, x = DataParallel(net, executor=executor), torch.ones(2 * replicas, width)
        optimizer: torch.optim.Optimizer
        if trained:
            optimizer = model.optimizer(torch.optim.SGD, lr=1e-3)
        else:
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        seen = []
        for _ in range(steps + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            stats = executor.stats().replicas
            seen.append(sum(one.bytes_in + one.bytes_out for one in stats))
        return (seen[-1] - seen[0]) / steps / sum(p.nbytes for p in net.parameters())


def run(effort: Effort, add_gpus: Callable[[], None]) -> Report:
    """Two nodes, and two more with GPUs that Ray counts, once those are to be added."""
    found = {
        _OURS: contender("auto"),
        _LATE: contender("auto", overlap=False),
        "object store": contender("object_store"),
    }
    peers: dict[str, Peer] = {
        _FIRST: ddp(NODES),
        **{name: peer for name, (peer, _) in found.items()},
    }
    for peer in peers.values():
        peer.begin(CASE)
    steps = 1 if effort is Effort.SMOKE else 2
    turns = {name: partial(_turn, peer, steps) for name, peer in peers.items()}
    medians = interleaved(turns, effort.rounds(ROUNDS), min(2, effort.warmup))
    among = [
        account.traffic["collective", "among"]
        for account in found[_OURS][1].recorder.accounts.values()
    ]
    sums = {name: peer.finish().checksum for name, peer in peers.items()}
    if max(sums.values()) - min(sums.values()) > 1e-6 * max(sums.values()):
        raise RuntimeError(f"different weights at the end, checksums {sums}")
    for peer in peers.values():
        peer.close()
    rows = [[name, ms, ms / medians[_FIRST], f"{sums[name]:.9g}"] for name, ms in medians.items()]
    tables = [
        Table(f"{CASE}, {NODES} nodes", ["", "ms per step", f"to {_FIRST}", "checksum"], rows)
    ]
    asked = [Asked(f"two nodes, step to {_FIRST}", medians[_OURS] / medians[_FIRST], 1.1)]
    many = _MANY
    lines = []
    add_gpus()
    for width in (512, 2896) if effort is Effort.FULL else (512,) if effort is Effort.QUICK else ():
        few, more = traffic(2, width), traffic(many, width)
        size = (2 * width + 10) * width * 4
        own = traffic(many, width, trained=True) * size / 1e6
        lines.append([f"{size / 1e6:.0f} MB", few, more, more / few, own])
        asked.append(
            Asked(f"MB through the driver, {lines[-1][0]}, optimizer in {many} replicas", own, 1.0)
        )
        asked.append(
            Asked(
                f"bytes through the driver, {lines[-1][0]}, {many} replicas to 2", more / few, 1.1
            )
        )
    columns = [
        *("model", "2 replicas", f"{many} replicas", "ratio"),
        f"{many} replicas that train, MB in all",
    ]
    tables.append(Table("bytes through the driver per step and byte of the model", columns, lines))
    steps_inside: dict[str, dict[str, float]] = {}
    rows = []
    for nodes in (1, NODES):
        for count in (2, 4, many) if effort is not Effort.SMOKE else (2,):
            medians_inside = inside(count, nodes, effort)
            steps_inside[f"{count} on {nodes}"] = medians_inside
            first, floor = medians_inside[_FIRST], medians_inside[_FLOOR]
            ours = medians_inside[IN_REPLICAS]
            rows.append([f"{count} on {nodes}", first, ours, ours / first, ours / floor])
            if count == nodes == NODES:
                what = f"two nodes, AdamW in {count} replicas, step to {_FIRST}"
                asked.append(Asked(what, ours / first, 1.0))
    columns = [
        *("replicas, on nodes", f"{_FIRST}, ms", f"{IN_REPLICAS}, ms"),
        *(f"to {_FIRST}", f"to {_FLOOR}"),
    ]
    tables.append(Table(MLP_ADAMW, columns, rows))
    notes = [f"The replicas of the default exchanged {sum(among) / 1e6:.0f} MB in this run."]
    question = (
        "What do replicas of two nodes gain from exchanging gradients and weights among themselves?"
    )
    return Report(
        "collective",
        question,
        tables,
        asked,
        {"median_ms": medians, "traffic": lines, "inside_ms": steps_inside},
        notes,
    )


def _turn(peer: Peer, steps: int) -> float:
    return peer.steps(steps) / steps


def main() -> None:
    """Start two nodes, and measure."""
    use_niceness()
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False, "object_store_memory": _STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def add_gpus() -> None:
        for _ in range(2):
            cluster.add_node(num_cpus=1, num_gpus=_GPUS, object_store_memory=_STORE)

    try:
        cluster.add_node(num_cpus=1, num_gpus=0, object_store_memory=_STORE)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        alone(partial(run, add_gpus=add_gpus))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
