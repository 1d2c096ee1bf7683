"""Ray Train: a `TorchTrainer` with workers that dial the driver, to be told when to step."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from typing import Any

import torch
from torch import nn

from benchmarks.measure import replicas_threads
from benchmarks.nets import CASES
from benchmarks.peers.base import Peer, Workers, serve, stepper


def ray_train(workers: int) -> Peer:
    """Start a trainer in a thread."""
    folder = tempfile.TemporaryDirectory()
    listener = Listener(os.path.join(folder.name, "driver"), "AF_UNIX")
    config = {"address": listener.address, "threads": replicas_threads(workers)}
    thread = threading.Thread(target=_fit, args=(config, workers, folder.name), daemon=True)
    thread.start()

    def end() -> None:
        thread.join()
        listener.close()
        folder.cleanup()

    return Workers(lambda: [listener.accept() for _ in range(workers)], end)


def _fit(config: dict[str, Any], workers: int, folder: str) -> None:
    from ray.train import RunConfig, ScalingConfig  # optional
    from ray.train.torch import TorchTrainer

    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.01})
    place = RunConfig(storage_path=folder)
    TorchTrainer(_loop, train_loop_config=config, scaling_config=scaling, run_config=place).fit()


def _loop(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_model

    torch.set_num_threads(config["threads"])
    place = ray.train.get_context()

    def begin(case: str) -> tuple[nn.Module, Callable[[], None]]:
        net = CASES[case].make()
        return net, stepper(
            case, prepare_model(net), (place.get_world_rank(), place.get_world_size())
        )

    with Client(config["address"], "AF_UNIX") as connection:
        serve(connection, begin)
