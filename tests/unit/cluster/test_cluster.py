"""Several nodes: the driver on a head without GPUs, replicas on nodes that share neither memory nor
sockets with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long
TESTS = Path(__file__).parents[2]
HERE = TESTS / "support"


def run(script: str, *arguments: str) -> str:
    """What a script prints that has a cluster of its own."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env["PYTHONPATH"] = os.pathsep.join(
        map(str, (HERE, TESTS.parent, TESTS / "unit" / "transport"))
    )
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
    """Two and three nodes, code that only the driver has, which job holds what, nodes that come,
    go, die and drain.
    """
    printed = run("cluster_script.py")
    for line in (
        "two nodes train as one process does, a package that only the driver has",
        "PlacementError asked for 3 GPU and 0 CPU replicas (each GPU replica with 1 GPU); "
        "after 1 s",
        "0 of 1 GPU, 1 of 1 CPU; node ",
        "1 by executor 'first' of this program",
        "cpu replicas are spread over the nodes that have CPUs",
        "a node that is added meanwhile is used, and the autoscaler knew",
        "nodes are lost in each phase, and training gives the same",
        "replicas join and leave, and training gives the same",
        "replicas go where Options say, two on one GPU",
    ):
        assert line in printed, printed


@pytest.mark.parametrize(
    "moments",
    [
        ["relay", "midway 2"],
        pytest.param(["forward 2", "backward 2", "summed"], marks=pytest.mark.soak),
    ],
    ids=", ".join,
)
def test_replicas_of_several_nodes_among_themselves(moments: list[str]) -> None:
    """With two nodes of two replicas each: the same bits, no more bytes through the driver, a lost
    root and nodes.
    """
    printed = run("collective_script.py", *moments)
    for line in (
        "two nodes train as one process does, and exchange gradients and weights",
        "with twice the replicas the driver carries no more",
        "a root dies in the midst of a sum, and the bits are the same",
        f"a node is lost in {' '.join(moments)} and the bits are the same",
    ):
        assert line in printed, printed


def test_a_node_that_joins_later() -> None:
    """Its replicas see none of the memory that those of the first node see."""
    assert ("replicas of a later node are sent what the others see") in run(
        "reach_script.py", "later"
    )


def test_the_same_call_again_after_ctrl_c() -> None:
    """Over lines between nodes, with sockets that hold less than a message, both ways at the
    same time.
    """
    assert ("a call that was aborted between nodes can be made again") in run(
        "reach_script.py", "aborted"
    )


# beside another running Ray, as the suite's, Ray drops that user's actors before they start
@pytest.mark.soak
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root may become another user"
)
def test_replicas_of_another_user() -> None:
    """They refuse the line, and their memory cannot be read: calls go through Ray."""
    assert "replicas of another user are reached through Ray" in run("reach_script.py", "user")
