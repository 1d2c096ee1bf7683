"""Faults that need a Ray of their own, such as a driver that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, ended, printed

pytestmark = pytest.mark.long


DRIVER = """
import time
import torch
from ray._private import worker
from raydp_parallel import DataParallel, Executor

executor = Executor(["cpu", "cpu"])
out = DataParallel(torch.nn.Linear(300, 3000), executor=executor)(torch.ones(400, 300))
pids = [info.pid for info in executor.replicas()]
print(worker._global_node.get_session_dir_path(), *pids, flush=True)
time.sleep(120)
"""


def test_a_driver_that_is_killed_leaves_nothing() -> None:
    """Its replicas end, on an idle machine in two seconds, and with them all memory, which has no
    name but theirs. Nobody else can enter the folder of the cluster that was started for it.
    """
    command = [sys.executable, "-c", DRIVER]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder, *told = driver.stdout.readline().split()
        pids = [*map(int, told)]
        assert any(path.stat().st_mode & 0o077 == 0 for path in Path(folder).parents), folder
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        driver.kill()
        assert all(map(ended, pids))


HEADLESS = """
import os, signal
import ray, torch
from ray._private import worker
from raydp_parallel import DataParallel

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
model = DataParallel(torch.nn.Linear(3, 2), ["cpu", "cpu"])
expected = model(torch.ones(4, 3))
(head,) = worker._global_node.all_processes["gcs_server"]
head.process.kill()
head.process.wait()
os.kill(model.executor.replicas()[1].pid, signal.SIGKILL)
print(torch.equal(model(torch.ones(4, 3)), expected), flush=True)
signal.alarm(50)
"""


def test_a_program_ends_though_its_cluster_s_head_was_killed() -> None:
    """While a replica is to be replaced, too. Ray itself waits a minute, and then fails."""
    assert "True\n" in printed("-c", HEADLESS)
