"""Ray Tune: each trial wraps a model of its own, on replicas of its own, and reports as ever.

Output::

    best learning rate 0.1, loss 0.0309
"""

from __future__ import annotations

import tempfile
from typing import Any

import command_line
import torch
from ray import tune
from torch import nn

from raydp_parallel import DataParallel, Executor


def trial(config: dict[str, Any]) -> None:
    """One training."""
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = x @ torch.randn(8, 1)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with Executor(config["devices"]) as executor:
        model = DataParallel(net, executor=executor)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        for _ in range(30):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tune.report({"loss": loss.item()})


def main(device_ids: list[str | int] | None = None) -> float:
    """Tries two learning rates, and returns the best one."""
    space = {"lr": tune.grid_search([0.0001, 0.1]), "devices": device_ids}
    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        best = tuner.fit().get_best_result()
    assert best.config is not None and best.metrics is not None
    rate: float = best.config["lr"]
    print(f"best learning rate {rate}, loss {best.metrics['loss']:.4f}")
    return rate


if __name__ == "__main__":
    main(command_line.devices(__doc__, default="cpu,cpu"))
