"""Where replicas go, as arithmetic: nodes are given, no Ray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raydp_parallel.cluster import placement, ray_api
from raydp_parallel.cluster.placement import booked, for_cpus, homes, places, plan
from raydp_parallel.cluster.ray_api import Node
from raydp_parallel.options import Options


def node(name: str, gpus: float = 0, free: float | None = None, cpus: float = 4) -> Node:
    """A node with so many GPUs, of which some are free, by default all."""
    total = {"GPU": gpus, "CPU": cpus, "disk": 2.0}
    return Node(name, "10.0.0.1", total, {**total, "GPU": gpus if free is None else free})


def placed(machines: list[Node], ids: list[Any], **options: Any) -> list[str | None]:
    """The node of each entry of ``device_ids``, by name."""
    wanted = places(tuple(ids))
    found = plan(wanted, machines, Options(**options))
    return [found.get(place) for place in wanted]


def test_a_logical_gpu_is_at_home() -> None:
    """The driver's node first, the others in their order, as long as they are free."""
    machines = [node("a", 1), node("b", 2), node("c", 1)]
    assert homes(machines, Options()) == ["a", "b", "b", "c"]
    assert placed(machines, [0, 1, 2, 3]) == ["a", "b", "b", "c"]
    assert placed(machines, [3, 1]) == ["c", "b"]


def test_a_gpu_that_others_hold_is_left_to_them() -> None:
    """Another is taken, and ranks stay in the order of nodes."""
    machines = [node("a", 2, free=0), node("b", 2, free=1), node("c", 2)]
    assert placed(machines, [0, 1]) == ["b", "c"]
    assert placed(machines, [4, 0]) == ["c", "b"]
    assert placed(machines, [0, 1, 2]) == ["b", "c", "c"]
    assert placed(machines, [0, 1, 2, 3]).count(None) == 1


def test_a_driver_without_gpus_and_nodes_of_all_sizes() -> None:
    """As many as there are of each."""
    machines = [node("head", cpus=0), node("b", 4), node("c", 1)]
    assert placed(machines, [0, 1, 2, 3, 4]) == ["b"] * 4 + ["c"]


def test_two_replicas_on_one_gpu() -> None:
    """Each GPU counts as two."""
    machines = [node("a", 1), node("b", 2, free=1.5)]
    assert len(homes(machines, Options(gpus_per_replica=0.5))) == 6
    assert placed(machines, [0, 1, 2, 3, 4], gpus_per_replica=0.5) == ["a", "a", "b", "b", "b"]
    assert len(homes([node("a", 1)], Options(gpus_per_replica=0.3))) == 3


def test_what_is_booked() -> None:
    """For GPU replicas too; what is nothing is left out."""
    options = Options(cpus_per_replica=2, gpus_per_replica=0.5, resources={"disk": 1})
    assert booked("gpu", options) == {"CPU": 2, "GPU": 0.5, "disk": 1}
    assert booked("cpu", options) == {"CPU": 2, "disk": 1}
    assert booked("cpu", Options()) == {}
    machines = [node("a", 4, cpus=3), node("b", 4, cpus=2)]
    assert placed(machines, [0, 1, 2], cpus_per_replica=2) == ["a", "b", None]
    assert placed([node("a", 4)], [0, 1, 2], resources={"disk": 1}) == ["a", "a", None]


def test_cpu_replicas_go_round() -> None:
    """The driver's node first; a head that was started without CPUs is left alone, unless there is
    nothing else.
    """
    machines = [node("a"), node("b"), node("c")]
    assert placed(machines, ["cpu"] * 4, cpus_per_replica=1) == ["a", "b", "c", "a"]
    head = node("head", cpus=0)
    assert [n.id for n in for_cpus([head, *machines], Options())] == ["a", "b", "c"]
    assert [n.id for n in for_cpus([head], Options())] == ["head"]
    assert placed([node("a", 1), node("b", 1)], ["cpu", 1, "cpu"], cpus_per_replica=1) == [
        "a",
        "b",
        "b",
    ]


def test_a_cluster_without_gpus_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still get nodes, so replicas wait; the error then says what to do."""
    said: list[str] = []
    monkeypatch.setattr(ray_api, "warn_once", said.append)
    monkeypatch.setattr(ray_api, "connect", lambda: True)
    monkeypatch.setattr(placement, "is_private", lambda: False)
    for gpus, count in ((2, 0), (0, 1)):
        monkeypatch.setattr(placement, "nodes", lambda gpus=gpus: [node("a", gpus, free=0)])
        placement.check_gpus([0, 1], Options())
        assert len(said) == count
        wanted = places((0, 1))
        text = str(placement.no_room(wanted, wanted, Options()))
        assert f"0 of {gpus} GPU" in text and "or 'cpu' entries" in text
    assert "the cluster has no GPU" in said[0] and "Give 'cpu' entries" in said[0]


def test_nothing_is_started_or_said_where_the_module_runs_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU, or one, and no cluster but one that is noted and dead."""
    said: list[str] = []
    monkeypatch.setattr(ray_api, "warn_once", said.append)
    monkeypatch.setattr(ray_api, "connected", lambda: False)
    monkeypatch.setattr(ray_api, "inherited", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_api, "read_ray_address", lambda: "127.0.0.1:1")
    for own in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=own: own)
        assert placement.all_gpus(Options()) == [*range(own)] and not said
