"""Checkpoints of a wrapped model: `torch.save`, `torch.distributed.checkpoint`, and a trial of Ray
Tune that was interrupted. Training that goes on from one has the bits of training that never ended.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mortal
import pytest
import ray
import torch
import torch.distributed.checkpoint as dcp
from harness import assert_same_state
from mortal import Everything, rows, same, state
from ray import tune
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from raydp_parallel import DataParallel, Executor, shutdown

pytestmark = pytest.mark.usefixtures("cluster")

TWO = ["cpu", "cpu"]


class Training:
    """A model with batch norm, dropout and a counter, and its optimizer.

    Args:
        seed: The seed of its weights.
        executor: The executor that runs it; None is the process's.
    """

    def __init__(self, seed: int, executor: Executor | None = None) -> None:
        torch.manual_seed(seed)
        self.model = DataParallel(Everything(), TWO, executor=executor)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)

    def step(self, number: int) -> float:
        """One step on a batch that follows from its number; the loss."""
        torch.manual_seed(number)
        loss = self.model(rows(2, number)[:, 1:]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def save_file(training: Training, folder: Path) -> None:
    """By `torch.save`."""
    found = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save(found, folder / "checkpoint.pt")


def load_file(training: Training, folder: Path) -> None:
    """Nothing but tensors and plain containers is in it."""
    found = torch.load(folder / "checkpoint.pt", weights_only=True)
    training.model.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])


def save_distributed(training: Training, folder: Path) -> None:
    """By `torch.distributed.checkpoint`."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def load_distributed(training: Training, folder: Path) -> None:
    """It loads into the tensors that are there."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found = {"model": model, "optimizer": optimizer}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    set_state_dict(
        training.model,
        training.optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("save", "load"),
    [(save_file, load_file), (save_distributed, load_distributed)],
    ids=["torch.save", "distributed"],
)
def test_X1_training_goes_on_from_a_checkpoint(
    save: Callable[[Training, Path], None], load: Callable[[Training, Path], None], tmp_path: Path
) -> None:
    """In the replicas that have run the model, and in others, to the bit."""
    undisturbed = Training(0)
    for number in range(3):
        undisturbed.step(number)
    save(undisturbed, tmp_path)
    losses = [undisturbed.step(number) for number in range(3, 6)]
    with Executor(TWO) as executor:
        for resumed in (Training(1), Training(2, executor)):
            resumed.step(9)  # its weights, buffers and moments are others, and were sent
            load(resumed, tmp_path)
            assert [resumed.step(number) for number in range(3, 6)] == losses
            assert same(state(resumed.model), state(undisturbed.model))


def test_X1_a_distributed_checkpoint_has_the_wrapper_s_keys(tmp_path: Path) -> None:
    """Those of ``state_dict``; it is read into the plain module by its own keys."""
    training = Training(0)
    training.step(0)
    dcp.save(training.model.state_dict(), checkpoint_id=tmp_path / "wrapped", no_dist=True)
    plain: Any = nn.ModuleDict({"module": Everything()})
    found = plain.state_dict()
    dcp.load(found, checkpoint_id=tmp_path / "wrapped", no_dist=True)
    plain.load_state_dict(found)
    assert_same_state(training.model, plain)
    dcp.save(training.model.module.state_dict(), checkpoint_id=tmp_path / "bare", no_dist=True)
    bare = Everything()
    found = bare.state_dict()
    dcp.load(found, checkpoint_id=tmp_path / "bare", no_dist=True)
    bare.load_state_dict(found)
    assert_same_state(training.model, bare)


def test_X1_a_snapshot_in_memory_is_one(tmp_path: Path) -> None:
    """A deep copy of ``state_dict`` does not follow the weights, which lie in shared memory."""
    training = Training(0)
    training.step(0)
    before = copy.deepcopy(training.model.state_dict())
    first = training.step(1)
    saved = tmp_path / "now"
    torch.save(training.model.state_dict(), saved)
    training.model.load_state_dict(before)
    training.optimizer = torch.optim.Adam(training.model.parameters(), 0.01)
    assert training.step(1) == first
    assert not same([*before.values()], [*torch.load(saved).values()])


@pytest.fixture
def by_value() -> Iterator[None]:
    """Ray's workers find no modules of the tests: functions and classes are sent, as those of a
    script are.
    """
    modules = [sys.modules[__name__], mortal]
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)


def trial(settings: dict[str, Any]) -> None:
    """What a user gives to Ray Tune: it begins where its last checkpoint ended."""
    training = Training(settings["seed"])
    first, found = 0, tune.get_checkpoint()
    if found is not None:
        with found.as_directory() as folder:
            load_file(training, Path(folder))
            first = int((Path(folder) / "step").read_text()) + 1
    for number in range(first, 4):
        loss = training.step(number)
        folder = Path(settings["folder"]) / f"{settings['seed']}-{number}"
        folder.mkdir()
        save_file(training, folder)
        (folder / "step").write_text(str(number))
        kept = tune.Checkpoint.from_directory(folder)
        tune.report({"loss": loss, "process": os.getpid()}, checkpoint=kept)
        if number == 1 and found is None:
            raise RuntimeError("the trial is interrupted here")
    shutdown()


@pytest.mark.long
@pytest.mark.usefixtures("by_value")
def test_X1_a_trial_of_ray_tune_is_resumed(tmp_path: Path) -> None:
    """Two trials with replicas of their own; both fail once, and end with the right bits."""
    (tmp_path / "kept").mkdir()
    tuner = tune.Tuner(
        tune.with_resources(trial, {"CPU": 1}),
        param_space={"seed": tune.grid_search([0, 1]), "folder": str(tmp_path / "kept")},
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "results"),
            failure_config=tune.FailureConfig(max_failures=1),
            verbose=0,
        ),
    )
    found = tuner.fit()
    assert not found.errors
    for result in found:
        assert result.metrics is not None and result.config is not None
        undisturbed = Training(result.config["seed"])
        losses = [undisturbed.step(number) for number in range(4)]
        assert result.metrics["loss"] == losses[-1]
        ended = Training(7)
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as folder:
            load_file(ended, Path(folder))
        assert_same_state(ended.model, undisturbed.model, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.usefixtures("by_value")
def test_X1_a_task_of_ray_saves_what_the_driver_loads(tmp_path: Path) -> None:
    """A trial is a process of its own, with replicas of its own."""

    @ray.remote(num_cpus=0)
    def train(folder: Path) -> list[float]:
        torch.set_num_threads(1)
        training = Training(3)
        losses = [training.step(number) for number in range(2)]
        save_file(training, folder)
        shutdown()
        return losses

    losses = ray.get(train.remote(tmp_path))
    undisturbed = Training(3)
    assert [undisturbed.step(number) for number in range(2)] == losses
    resumed = Training(4)
    load_file(resumed, tmp_path)
    assert resumed.step(2) == undisturbed.step(2)
