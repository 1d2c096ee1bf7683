"""Trains with replicas in processes of their own, all on fake GPUs, and prints what was used."""

from __future__ import annotations

import os
import sys

support = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, support)
os.environ["PYTHONPATH"] = os.pathsep.join([support, os.environ.get("PYTHONPATH", "")])

import logging  # noqa: E402

import ray  # noqa: E402
import torch  # noqa: E402
from fake_gpu import installed  # noqa: E402
from torch import nn  # noqa: E402

from raydp_parallel import DataParallel, Executor, Options  # noqa: E402
from raydp_parallel.wire import trial  # noqa: E402

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
trial.SIZES[:], trial._PRODUCTS = [1 << 16], 1
how = {"include_dashboard": False, "num_gpus": 2, "num_cpus": 2}
hook = {"worker_process_setup_hook": "fake_gpu.install"}
ray.init(address="local", runtime_env=hook, log_to_driver=False, **how)
with installed(2) as gpus:
    gpus.lossy = "lossy" in sys.argv
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    plain.load_state_dict(net.state_dict())
    x = torch.randn(8, 8, dtype=torch.double)
    net.cuda()  # before replicas start: a GPU that the driver does not use is not shared
    with Executor([0, 1], options=Options(placement_timeout=120)) as executor:
        for model, batch in ((DataParallel(net, executor=executor), x.cuda()), (plain, x)):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(10):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
        print("link:", executor.stats().link)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b.detach())
    print("right")
ray.shutdown()
