"""Trains with replicas in processes of their own, each with a fake GPU, among which tensors go by a
fake NCCL; prints what was used, and whether all bits are those of host memory.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

support = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, support)
os.environ["PYTHONPATH"] = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])
how, count, *moments = sys.argv[1:]
plan = [moment.replace(":", " ") for moment in moments]
os.environ["RAYDP_FAKE_NCCL"] = how
os.environ["RAYDP_FAKE_NCCL_FOLDER"] = tempfile.mkdtemp()

import logging  # noqa: E402

import ray  # noqa: E402
import torch  # noqa: E402
from fake_gpu import installed  # noqa: E402
from mortal import Everything, Mortal, arm, armed, rows, same, state, step, whole  # noqa: E402
from torch import nn  # noqa: E402

from raydp_parallel import DataParallel, Executor, Options  # noqa: E402
from raydp_parallel.driver import groups  # noqa: E402

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
groups._LEAST = 1
if how in ("hangs", "stalls"):
    groups._TRIAL, groups._GRACE = 2.0, 1.0
folder, devices = Path(os.environ["RAYDP_FAKE_NCCL_FOLDER"]), list(range(int(count)))
early = {k: os.environ[k] for k in ("RAYDP_FAKE_NCCL", "RAYDP_FAKE_NCCL_FOLDER")}
hook = {"worker_process_setup_hook": "fake_gpu.install_with_nccl", "env_vars": early}
ray.init(
    address="local",
    runtime_env=hook,
    log_to_driver=False,
    include_dashboard=False,
    num_gpus=len(devices),
    num_cpus=2,
)


class Heads(nn.Module):
    """Has a part for each chunk, so that chunks have gradients of other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 3) for _ in devices])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the part of the chunk that the first column names."""
        found: torch.Tensor = self.parts[int(x[0, 0])](x[:, 1:])
        return found


def trained(executor: Executor, plan: list[str]) -> list[torch.Tensor]:
    """Train, with a death in some steps; returns losses and the final state."""
    torch.manual_seed(7)
    net = Heads() if how == "differing" else Mortal(Everything(), folder)
    model = DataParallel(net, executor=executor)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    if how == "resident":
        optimizer = model.optimizer(torch.optim.Adam, lr=0.01)
    losses = []
    for number in range(6):
        whole(executor)
        arm(folder, *plan[number - 1 : number] if number else ())  # the first step has the trial
        few = how == "smaller" and number % 2 == 1
        batch = rows(len(devices) - 1, number, 2) if few else rows(len(devices), number)
        losses.append(step(model, optimizer, batch.requires_grad_(bool(moments))))
        losses += [] if batch.grad is None else [batch.grad]
        model.sync()
        assert not armed(folder)
    return [*losses, *state(model)]


with installed(len(devices)):
    found = []
    for ways in (("host",), ("host", "nccl")):
        options = Options(gpu_paths=ways, placement_timeout=120)
        with Executor(devices, options=options) as executor:
            found.append(trained(executor, plan if "nccl" in ways else []))
            stats = executor.stats()
            if how == "smaller":
                print("groups:", len(executor.groups))
            print("link:", stats.link)
            print("bytes:", [(row.bytes_in, row.bytes_out) for row in stats.replicas])
    print("right" if same(*found) else "wrong")
ray.shutdown()
