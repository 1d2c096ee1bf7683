"""Several nodes: the driver on a head without GPUs, replicas on nodes that share neither memory nor sockets with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script: str) -> str:
    """What a script prints that has a cluster of its own."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_several_nodes() -> None:
    """Training to the bit, CPU replicas spread, the object store alone, a lost node and what is left."""
    printed = run("cluster_script.py")
    for line in (
        "two nodes train as one process does",
        "cpu replicas are spread, the driver's node first",
        "the object store alone gives the same",
        "a node is lost, and training gives the same",
        "PlacementError device_ids: [1] not in the cluster",
        "the other node goes on",
    ):
        assert line in printed, printed


def test_replicas_of_several_nodes_among_themselves() -> None:
    """With two nodes of two replicas each: the same bits, no more bytes through the driver, a lost root and node."""
    printed = run("collective_script.py")
    for line in (
        "two nodes train as one process does, and exchange gradients and weights",
        "with twice the replicas the driver carries no more",
        "a root dies in the midst of a sum, and the bits are the same",
        "a node is lost in the midst of a sum, and the bits are the same",
    ):
        assert line in printed, printed
