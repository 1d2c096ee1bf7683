"""Several nodes: the driver on a head without GPUs, and replicas that share nothing with it."""

from __future__ import annotations

import tempfile

import pytest
from harness import printed

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_several_nodes() -> None:
    """Two and three, code that only the driver has, nodes that come, go, die and drain."""
    # A folder of its own: Ray writes there which cluster others are to join. A short one: it has
    # sockets in it.
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        said = printed("tests/support/cluster_script.py", RAY_TMPDIR=folder)
    for line in (
        "two nodes train as one process does, a package that only the driver has",
        "PlacementError asked for 3 GPU and 0 CPU replicas (booked for each GPU {'GPU': 1.0}); "
        "after 1 s",
        "Free now: 0 of 2 GPU, 2 of 2 CPU, on 3 node(s)",
        "a node that is added meanwhile is used, and the autoscaler knew",
        "nodes are lost in each phase, and training gives the same",
        "replicas join and leave, and training gives the same",
        "replicas go where Options say, two on one GPU",
    ):
        assert line in said, said
