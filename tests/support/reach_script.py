"""Run by test_cluster.py in its own process: replicas that see none of the driver's memory, where
others may.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor, nn

import raydp_parallel
from raydp_parallel import DataParallel, Executor, Options

USER = 12345
"""Another user."""


def train(model: Any, steps: int) -> list[Tensor]:
    """Losses and weights, with an edit that moves no version."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(torch.linspace(-1, 1, 64).view(8, 8) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        next(model.parameters()).data.mul_(1.01)
        losses.append(loss.detach())
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def check(net: nn.Module, chunks: int) -> DataParallel[Any]:
    """Training over so many CPU replicas has the bits of training in this process."""
    model = DataParallel(copy.deepcopy(net), ["cpu"] * chunks, options=Options(threads=1))
    here = DataParallel(
        copy.deepcopy(net), ["cpu"] * chunks, options=Options(in_process=True, threads=1)
    )
    assert all(torch.equal(a, b) for a, b in zip(train(model, 3), train(here, 3), strict=True))
    return model


def a_later_node(net: nn.Module) -> None:
    """Two replicas of one node see the weights; two more, on a node that joined, see none
    of them.
    """
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False}
    )
    ray.init(address=cluster.address, log_to_driver=False)
    first = check(net, 2)
    assert next(first.parameters()).is_shared()
    cluster.add_node(num_cpus=2)
    second = check(net, 4)
    assert len({info.node_id for info in second.executor.replicas()}) == 2
    train(first, 1)
    raydp_parallel.shutdown()
    ray.shutdown()
    cluster.shutdown()
    print("replicas of a later node are sent what the others see")


def aborted(_net: nn.Module) -> None:
    """Ctrl-C on lines between nodes: the answers are on their way when the same call is made again,
    as large.
    """
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    x = torch.rand(2, 1 << 22)
    with Executor(["cpu", "cpu"]) as executor:
        model = DataParallel(nn.Flatten(), executor=executor)
        assert torch.equal(model(x), x)
        assert all(
            slot.client.line and not slot.client.line.near
            for slot in executor.slots(["cpu", "cpu"])
        )
        backend: Any = executor.replica_set.backend
        for _ in range(3):
            backend.collect = _ctrl_c
            try:
                model(x)
            except KeyboardInterrupt:
                del backend.collect
            assert torch.equal(model(x), x)
        assert executor.stats().deaths == 0
    ray.shutdown()
    cluster.shutdown()
    print("a call that was aborted between nodes can be made again")


def _ctrl_c(*_arguments: Any) -> Any:
    raise KeyboardInterrupt


def another_user(net: nn.Module) -> None:
    """Ray runs as another user, as in a container that was entered as root."""
    folder = tempfile.mkdtemp(prefix="rp", dir="/tmp")
    os.chown(folder, USER, USER)
    # He may read files as root does: this checkout may lie where only root can.
    reads = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    become = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        *reads,
        "env",
        f"HOME={folder}",
    ]
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    start = [
        "start",
        "--head",
        "--num-cpus=2",
        "--port=0",
        "--include-dashboard=false",
        f"--temp-dir={folder}/ray",
    ]
    # Ray gives each user a token; here both are to get in.
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": folder}
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_TMPDIR=folder)
    try:
        done = subprocess.run(
            [*become, *ray_command, *start], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        address = Path(folder, "ray", "ray_current_cluster").read_text().strip()
        ray.init(address=address, log_to_driver=False)
        model = check(net, 2)
        owners = {os.stat(f"/proc/{info.pid}").st_uid for info in model.executor.replicas()}
        assert owners == {USER} and os.getuid() != USER, owners
        raydp_parallel.shutdown()
        ray.shutdown()
    finally:
        subprocess.run(
            [*become, *ray_command, "stop", "--force"], env=env, capture_output=True, check=False
        )
    print("replicas of another user are reached through Ray")


def main() -> None:
    """The scene that is named."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8000), nn.Tanh(), nn.Linear(8000, 2))
    {"later": a_later_node, "aborted": aborted, "user": another_user}[sys.argv[1]](net)


if __name__ == "__main__":
    main()
