"""Training that goes on from a checkpoint has the bits of training that never ended."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from mortal import Everything, rows, same, state
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from raydp_parallel import DataParallel, Executor

TWO = ["cpu", "cpu"]


class Training:
    """A model with batch norm, dropout and a counter, and its optimizer."""

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


def save(training: Training, folder: Path) -> None:
    """By `torch.distributed.checkpoint`."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def load(training: Training, folder: Path) -> None:
    """It loads into the tensors that are there."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found = {"model": model, "optimizer": optimizer}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    states = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
    set_state_dict(training.model, training.optimizer, **states)


@pytest.mark.long
def test_X1_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
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
