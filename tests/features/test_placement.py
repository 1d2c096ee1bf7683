"""Where replicas go, by arithmetic: nodes are given, no Ray."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raydp_parallel.cluster import placement, ray_api
from raydp_parallel.cluster.placement import Hold, Place, _in_order, at_home, places
from raydp_parallel.cluster.ray_api import Node
from raydp_parallel.cluster.start import Starter
from raydp_parallel.errors import ClusterError, ExecutorClosed, PlacementError
from raydp_parallel.options import Options


def node(name: str, gpus: float = 0, cpus: float = 4) -> Node:
    """A node with so many GPUs."""
    return Node(name, {"GPU": gpus, "CPU": cpus, "disk": 2.0})


At = Callable[..., list[str | None]]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> At:
    """The home of each entry of ``device_ids``, by name."""

    def found(machines: list[Node], ids: list[Any], **options: Any) -> list[str | None]:
        monkeypatch.setattr(placement, "nodes", lambda: machines)
        wanted = places(tuple(ids))
        found = at_home(wanted, Options(**options))
        return [found.get(place) for place in wanted]

    return found


def test_a_logical_gpu_is_at_home(at: At) -> None:
    """The driver's node first, the others in their order, as many as there are of each."""
    machines = [node("a", 1), node("b", 2), node("c", 1)]
    assert at(machines, [0, 1, 2, 3]) == ["a", "b", "b", "c"]
    assert at(machines, [3, 1, 4]) == ["c", "b", None]
    assert at([node("head", cpus=0), *machines], [0, 3]) == ["a", "c"]
    assert at(machines, [0, 1], resources={"disk": 3}) == [None, None]


def test_replicas_are_numbered_in_the_order_of_nodes() -> None:
    """Wherever Ray found room; CPU replicas stay where they are."""
    wanted = places((2, "cpu", 0, 1))
    holds = [Hold(None, 0, name) for name in ("a", "a", "c", "b")]
    found = _in_order(dict(zip(wanted, holds, strict=True)), {"a": 0, "b": 1})
    assert [found[place].node for place in places((0, 1, 2, "cpu"))] == ["a", "b", "c", "a"]


def test_cpu_replicas_go_round(at: At) -> None:
    """A head without CPUs is left alone, unless there is nothing else."""
    machines = [node("a"), node("b"), node("c")]
    assert at(machines, ["cpu"] * 4) == ["a", "b", "c", "a"]
    head = node("head", cpus=0)
    assert at([head, *machines], ["cpu"] * 3) == ["a", "b", "c"]
    assert at([head], ["cpu"]) == ["head"]


def test_a_cluster_without_gpus_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still get nodes, so replicas wait; the error then says what to do."""
    said: list[str] = []
    monkeypatch.setattr(ray_api, "warn_once", said.append)
    monkeypatch.setattr(ray_api, "connect", lambda: True)
    monkeypatch.setattr(placement, "is_private", lambda: False)
    for gpus, count in ((2, 0), (0, 1)):
        monkeypatch.setattr(placement, "nodes", lambda gpus=gpus: [node("a", gpus)])
        monkeypatch.setattr(ray_api, "free", ", ".join)
        placement.normalize([0, 1], Options())
        assert len(said) == count
        wanted = places((0, 1))
        text = str(placement.no_room(wanted, wanted, Options()))
        assert "Free now: GPU, CPU, on 1 node" in text and "or 'cpu' entries" in text
    assert "its GPUs: 0" in said[0] and "Give 'cpu' entries" in said[0]


def test_gpus_that_a_machine_lacks_are_named_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to write instead."""
    monkeypatch.setattr(ray_api, "connect", lambda: True)
    monkeypatch.setattr(placement, "is_private", lambda: True)
    for gpus, ids, text in (
        (0, ["cpu:0", "cuda"], "['cuda'] not in the cluster (its GPUs: 0). Use ['cpu', 'cpu']"),
        (1, ["cuda:0", "cuda:1", 2], "['cuda:1', 2] not in the cluster (its GPUs: 1). Use [0], or"),
    ):
        monkeypatch.setattr(placement, "nodes", lambda gpus=gpus: [node("a", gpus)])
        with pytest.raises(PlacementError, match=re.escape(text)):
            placement.normalize(ids, Options())


def test_a_stranger_names_no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a file, a folder or a link. One's own, and those of root, name one."""
    monkeypatch.setattr(ray_api, "_silent", lambda address: "")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    note, mine, other = tmp_path / "ray" / "ray_current_cluster", os.getuid(), os.getuid() + 1
    note.parent.mkdir()
    note.write_text("host:1\n")
    for of_file, of_folder, found in ((mine, 0, "host:1"), (other, mine, ""), (mine, other, "")):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstat", lambda _, uid=of_file: SimpleNamespace(st_uid=uid))
            patch.setattr(Path, "lstat", lambda _, uid=of_folder: SimpleNamespace(st_uid=uid))
            assert ray_api._noted(False) == found
    note.symlink_to(note.rename(tmp_path / "elsewhere"))
    assert ray_api._noted(False) == ""


def test_a_cluster_s_folder_is_its_user_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where others may enter the one that has its name, or names of sockets would be long."""
    with tempfile.TemporaryDirectory(prefix="rp", dir="/tmp") as short:
        open_to_all = Path(short, "open", f"raydp-{os.getuid()}")
        open_to_all.mkdir(parents=True)
        open_to_all.chmod(0o777)
        for name, there in (("", True), ("open", False), ("long" * 9, False)):
            Path(short, name).mkdir(exist_ok=True)
            monkeypatch.setenv("RAY_TMPDIR", os.path.join(short, name))
            made = Path(ray_api._folder()).parent
            assert made.stat().st_mode & 0o777 == 0o700 and len(f"{made}/ray") <= 40
            assert (made.parent == Path(short, name)) == there
            made.rmdir()


@pytest.mark.ray  # whose own functions say so
def test_a_node_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a KeyError."""
    monkeypatch.setattr(ray_api, "here", str)
    monkeypatch.setattr(ray_api, "draining", frozenset)
    monkeypatch.setattr(ray_api.ray, "nodes", list)
    with pytest.raises(ClusterError, match="this program's Ray node is gone"):
        at_home([Place("cpu", 0)], Options())


def test_a_start_asks_nothing_of_a_cluster_that_was_left() -> None:
    """In the foreground either: at the program's end, a thread may be at its first call."""
    for alive, error in ((False, ClusterError), (True, ExecutorClosed)):
        starter = object.__new__(Starter)
        starter.alive = starter.ended = lambda alive=alive: alive  # type: ignore[assignment]
        starter.ended.is_set, starter.holds = lambda: True, SimpleNamespace(release=id)  # type: ignore[attr-defined]
        with pytest.raises(error):
            starter.start({Place("cpu", 0): 0})


@pytest.mark.ray  # whose own functions say so
def test_nothing_is_started_or_said_where_the_module_runs_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No GPU, or one, and no cluster but one that is noted and dead."""
    said: list[str] = []
    monkeypatch.setattr(ray_api, "warn_once", said.append)
    monkeypatch.setattr(ray_api, "connected", lambda: False)
    monkeypatch.setattr(ray_api, "inherited", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
    assert ray_api._silent("127.0.0.1:1")
    for own in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda own=own: own)
        assert placement.all_gpus(Options()) == [*range(own)] and not said
