"""Run by test_cluster.py in its own process: a head without GPUs, the driver on it, two nodes with two GPUs each."""

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


def main() -> None:
    """Everything in one cluster, for starting one takes long."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    workers = [cluster.add_node(num_cpus=1, num_gpus=2) for _ in range(2)]
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

    lost = next(node for node in workers if node.node_id == whole(four).replicas()[3].node_id)
    (folder / "stop 2 0").touch()
    ending = threading.Thread(target=end_node, args=(cluster, lost, folder / "stop 2 0"))
    ending.start()
    begun = time.monotonic()
    assert same(train(four, folder, {}, 5, chunks=4), expected)
    assert time.monotonic() - begun < 60
    ending.join()
    print("a node is lost in the midst of a sum, and the bits are the same")
    four.close()
    raydp_parallel.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
