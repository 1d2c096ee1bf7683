"""Several nodes: the driver on a head without GPUs, replicas on nodes that share neither memory nor
sockets with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
TESTS = Path(__file__).parents[1]
HERE = TESTS / "support"


def run(script: str, *arguments: str) -> str:
    """What a script prints that has a cluster of its own."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, (HERE, TESTS.parent)))
    # A folder of its own: Ray writes there which cluster others are to join. A short one: it has
    # sockets in it.
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        env["RAY_TMPDIR"] = folder
        command = [sys.executable, str(HERE / script), *arguments]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_several_nodes() -> None:
    """Two and three nodes, code that only the driver has, nodes that come, go, die and
    drain.
    """
    printed = run("cluster_script.py")
    for line in (
        "two nodes train as one process does, a package that only the driver has",
        "PlacementError asked for 3 GPU and 0 CPU replicas (each GPU replica with 1 GPU); "
        "after 1 s",
        "Free now: 0 of 2 GPU, 2 of 2 CPU, on 3 node(s)",
        "cpu replicas are spread over the nodes that have CPUs",
        "a node that is added meanwhile is used, and the autoscaler knew",
        "nodes are lost in each phase, and training gives the same",
        "replicas join and leave, and training gives the same",
        "replicas go where Options say, two on one GPU",
    ):
        assert line in printed, printed
