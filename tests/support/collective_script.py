"""Run by test_cluster.py in its own process: a head without GPUs, the driver on it, two nodes with
two GPUs each.

Its arguments say in which moments a node is lost, each in a training run of its own.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from mortal import same
from ray.cluster_utils import Cluster
from test_collective import among, odd_steps, through, train, whole

import raydp_parallel
from raydp_parallel import Executor, Options


def end_node(cluster: Cluster, node: Any, sign: Path) -> None:
    """Remove a node once one of its replicas has stopped, which it tells by a file that goes."""
    while sign.exists():
        time.sleep(0.01)
    cluster.remove_node(node)


def lose_a_node(
    cluster: Cluster, four: Executor, folder: Path, moment: str, expected: list[Any]
) -> None:
    """Train, and lose the node of the third replica when that comes to some moment, where it stands
    still first.
    """
    found = whole(four).replicas()[2]
    lost = next(node for node in cluster.worker_nodes if node.node_id == found.node_id)
    sign = folder / f"stop {moment} 0" if " " in moment else folder / f"stop {moment} {found.pid} 0"
    # which a new replica needs to come to know of such moments
    train(four, folder, {}, 1, chunks=4)
    sign.touch()
    ending = threading.Thread(target=end_node, args=(cluster, lost, sign))
    ending.start()
    deaths = four.stats().deaths
    assert same(train(four, folder, {}, 5, chunks=4), expected)
    assert four.stats().deaths == deaths + 2, four.stats()
    ending.join()
    cluster.add_node(num_cpus=1, num_gpus=2)
    assert four.grow() == 2


def main() -> None:
    """Everything in one cluster, for starting one takes long."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    folder = Path(tempfile.mkdtemp())
    here = Executor(["cpu"] * 4, options=Options(in_process=True, threads=1))
    pair = Executor(["cpu"] * 2, options=Options(in_process=True, threads=1))
    expected = train(here, folder, {}, 5, chunks=4)
    expected_of_two = train(pair, folder, {}, 5, chunks=2)
    odd = odd_steps(pair)

    with Executor([0, 2]) as two:  # one on each node
        assert len({info.node_id for info in two.replicas()}) == 2
        assert same(train(two, folder, {}, 5, chunks=2), expected_of_two)
        assert among(two) > 0
        least = through(two)
        for one, other in zip(odd_steps(two), odd, strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    print("two nodes train as one process does, and exchange gradients and weights")

    four = Executor([0, 1, 2, 3])
    assert same(train(four, folder, {}, 5, chunks=4), expected)
    assert through(four) <= 1.1 * least, (through(four), least)
    print("with twice the replicas the driver carries no more")

    assert same(train(four, folder, {1: ["midway 0"]}, 5, chunks=4), expected)
    print("a root dies in the midst of a sum, and the bits are the same")

    moments = sys.argv[1:]
    for moment in moments:
        lose_a_node(cluster, four, folder, moment, expected)
    print("a node is lost in", *moments, "and the bits are the same")
    four.close()
    raydp_parallel.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
