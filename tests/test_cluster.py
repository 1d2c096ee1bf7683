"""Several nodes: the driver on a head without GPUs, replicas on nodes that share neither memory nor sockets with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_several_nodes() -> None:
    """Training to the bit, CPU replicas spread, the object store alone, a lost node and what is left."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent)])
    command = [sys.executable, str(HERE / "cluster_script.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "two nodes train as one process does",
        "cpu replicas are spread, the driver's node first",
        "the object store alone gives the same",
        "a node is lost, and training gives the same",
        "PlacementError device_ids: [1] not in the cluster",
        "the other node goes on",
    ):
        assert line in done.stdout, done.stdout
