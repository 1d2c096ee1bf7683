"""What replicas hold of a cluster: placement groups with names that are never used twice, and are
asked for again.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.util.placement_group import placement_group_table
from torch import nn

from raydp_parallel import DataParallel, Executor, Options, PlacementError
from raydp_parallel.cluster import ray_api, ray_backend
from raydp_parallel.cluster.backend import DevicePlace
from raydp_parallel.devices import ambient_state

pytestmark = pytest.mark.usefixtures("cluster")
X = torch.ones(4, 2)


@pytest.fixture
def held(cluster: None) -> Callable[[], list[str]]:
    """Gives the names of the placement groups that the test has made, and that exist."""
    before = {*placement_group_table()}

    def names() -> list[str]:
        found: dict[str, Any] = placement_group_table()
        return [
            group["name"]
            for number, group in found.items()
            if number not in before and group["state"] != "REMOVED"
        ]

    return names


def refusing(times: float) -> tuple[Callable[..., Any], list[str]]:
    """Ray's `placement_group`, which refuses the second group of each executor so many times, and
    the names asked.
    """
    names: list[str] = []
    real = ray_api.placement_group

    def asked(*arguments: Any, name: str, **keywords: Any) -> Any:
        names.append(name)
        if len(names) > 1 and len(names) <= 1 + times:
            raise ray.exceptions.RaySystemError(f"the group {name} cannot be made now")
        return real(*arguments, name=name, **keywords)

    return asked, names


@pytest.mark.long
def test_cpu_replicas_that_book_cpus(held: Callable[[], list[str]]) -> None:
    """Each has a group of its own; another executor of the same name has others, at the same time
    and later.
    """
    options = Options(cpus_per_replica=1, name="twin")
    with (
        Executor(["cpu", "cpu"], options=options) as one,
        Executor(["cpu"], options=options) as other,
    ):
        names = held()
        assert len({*names}) == len(names) == 3 and all(
            name.startswith("raydp:twin") for name in names
        )
        for executor, ids in ((one, ["cpu"] * 2), (other, ["cpu"])):
            assert torch.equal(DataParallel(nn.Identity(), ids, executor=executor)(X), X)
    with Executor(["cpu"], options=options):
        (again,) = held()
        assert again not in names


@pytest.mark.long
def test_a_group_that_ray_cannot_make_now_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
    held: Callable[[], list[str]],
) -> None:
    """What was made before is let go of, and no name comes twice: Ray may know of it all
    the same.
    """
    asked, names = refusing(times=1)
    monkeypatch.setattr(ray_api, "placement_group", asked)
    with Executor(["cpu", "cpu"], options=Options(cpus_per_replica=0.5)) as executor:
        assert len(executor.replicas()) == len(held()) == 2
    assert len(names) == len({*names}) == 4
    assert held() == []


def test_a_group_that_ray_never_makes_is_an_error_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
    held: Callable[[], list[str]],
) -> None:
    """At the deadline, in Ray's words; nothing stays behind."""
    asked, names = refusing(times=float("inf"))
    monkeypatch.setattr(ray_api, "placement_group", asked)
    with pytest.raises(PlacementError, match="cannot be made now"):
        Executor(["cpu", "cpu"], options=Options(cpus_per_replica=0.5, placement_timeout=1))
    assert len(names) == len({*names}) > 2
    assert held() == []


@pytest.mark.parametrize(
    "words",
    [
        "The name x (namespace=y) is already taken.",
        "Actor with name 'x' already exists in the namespace y",
    ],
)
def test_a_replica_s_name_that_another_program_has(
    monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """Seen before it is asked for, or got by the other at the same moment: a number behind it tells
    them apart.
    """
    asked: list[str] = []

    def options(name: str) -> Any:
        asked.append(name)
        return SimpleNamespace(remote=lambda *_, **__: name if len(asked) > 1 else refuse())

    def refuse() -> None:
        raise ValueError(words)

    monkeypatch.setattr(ray_backend, "ReplicaActor", SimpleNamespace(options=options))
    assert (
        ray_backend.ActorNames("train", {}).start(DevicePlace("cpu", 0), "auto", (), {})
        == "raydp:train:0@cpu~2"
    )
    assert asked == ["raydp:train:0@cpu", "raydp:train:0@cpu~2"]


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("wanted", [None, "expandable_segments:True"])
def test_the_allocator_s_variables_are_there_when_a_process_begins(
    monkeypatch: pytest.MonkeyPatch, kind: str, wanted: str | None
) -> None:
    """Torch reads them when it is loaded. Other replicas start as Ray has prepared them."""
    for name in ambient_state.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    if wanted is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", wanted)
    asked: list[dict[str, Any]] = []
    begun: list[Any] = []

    def options(**given: Any) -> Any:
        asked.append(given)
        return SimpleNamespace(remote=lambda *given, **_: begun.extend(given))

    monkeypatch.setattr(ray_backend, "ReplicaActor", SimpleNamespace(options=options))
    ray_backend.ActorNames("train", {}).start(DevicePlace(kind, 0), "auto", (), {"num_cpus": 1})
    assert ambient_state.environment() in begun  # for those that are read later
    early = {"runtime_env": {"env_vars": {"PYTORCH_CUDA_ALLOC_CONF": wanted}}}
    name = f"raydp:train:0@{'cpu' if kind == 'cpu' else 'cuda:0'}"
    expected = {"name": name, "num_cpus": 1}
    assert asked == [expected | (early if wanted and kind == "gpu" else {})]
