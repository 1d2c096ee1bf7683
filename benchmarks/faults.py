"""What does a death cost, and does training end with the same bits, whatever dies?

`python -m benchmarks.faults soak --kills 100` trains while a thread kills, stops and starves
replicas at random moments, then trains as many steps undisturbed, and compares every weight,
buffer, loss and generator. It also looks at what is left over: processes, threads, file
descriptors, memory.

`python -m benchmarks.faults cost` kills a replica at a random moment of a step, again and again,
and compares the step with undisturbed ones in between; the same kill on DDP over gloo, and on Ray
Train, until each has made the next step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm

from benchmarks.measure import RESULTS, machine
from benchmarks.nets import perceptron, vectors
from benchmarks.peers.told import Ddp, stepper
from raydp_parallel import DataParallel, Executor, Options, ReplicaStats

CALL_TIMEOUT = 8.0
"""Seconds after which a stopped replica counts as dead; a chunk that met two of them would be given
up.
"""

_LOOKS = 30
"""Kills between two looks at what the driver holds."""


class Net(nn.Module):
    """Dropout, batch norm and spectral norm; something in it that has second derivatives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(16, width), nn.BatchNorm1d(width)
        self.two, self.last = spectral_norm(nn.Linear(width, width)), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.dropout(self.norm(self.one(x)).tanh(), 0.3, self.training)
        return self.last(self.two(h).tanh())


class Trainer:
    """A training run, step by step; every number of it follows from its seed.

    Args:
        executor: The replicas are its.
        seed: What data, weights and masks follow from.
        penalty: Whether each step has a gradient penalty, and so a second derivative.
    """

    def __init__(self, executor: Executor, seed: int, penalty: bool) -> None:
        torch.manual_seed(seed)
        self.penalty = penalty
        self.model = DataParallel(Net(96), executor=executor)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """One step."""
        x = torch.randn(8 * len(self.model.device_ids), 16, requires_grad=self.penalty)
        loss = self.model(x).square().mean() - self.model(x + 1).mean()
        if self.penalty:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + (slope.norm(dim=1) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def state(self) -> list[Tensor]:
        """Everything that there is to compare."""
        tensors = [t.detach().clone() for t in (*self.model.parameters(), *self.model.buffers())]
        return [*tensors, torch.stack(self.losses), torch.get_rng_state()]


BURN = "import time\nend = time.time() + 0.5\nwhile time.time() < end: pass"
"""Takes a core away from the others."""


class Chaos(threading.Thread):
    """Does harm at random moments.

    Args:
        executor: Its replicas are harmed.
        seed: What it does follows from it.
        kills: How many replicas it kills, before it stops.
        pause: Seconds between two deeds, on average.
    """

    def __init__(self, executor: Executor, seed: int, kills: int, pause: float) -> None:
        super().__init__(daemon=True)
        self.random = random.Random(seed)
        self.executor, self.kills, self.pause = executor, kills, pause
        self.done = {"killed": 0, "stopped for good": 0, "stopped for a while": 0, "starved": 0}

    def run(self) -> None:
        while self.done["killed"] < self.kills:
            # Every other deed finds all at work, so that not each step meets six deaths on a slow
            # machine.
            patient = self.random.random() < 0.5
            time.sleep(self.random.expovariate(1 / self.pause))
            while len(ready := self.ready()) < len(self.executor.device_ids) and patient:
                time.sleep(0.02)
            if ready:
                self.harm(self.random.choice(ready))

    def ready(self) -> list[int]:
        """The processes of those that can be called."""
        return [info.pid for info in self.executor.replicas() if info.state == "ready"]

    def harm(self, pid: int) -> None:
        """One deed: nine in ten are kills."""
        what = self.random.choices([*self.done], [90, 2, 4, 4])[0]
        try:
            if what == "starved":
                subprocess.run([sys.executable, "-S", "-c", BURN], check=True)
            else:
                os.kill(pid, signal.SIGKILL if what == "killed" else signal.SIGSTOP)
            if what == "stopped for a while":
                time.sleep(0.3)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # it is dead already
        self.done[what] += 1


def belongings() -> dict[str, int]:
    """What this process holds."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "replicas": len(replicas_alive()),
        "MB": int(resident.split()[1]) // 1024,
    }


def replicas_alive() -> list[int]:
    """The replicas among this process's Ray workers."""
    mine, found = f"/{ray._private.worker._global_node.session_name}/", []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"ReplicaActor" in Path(f"/proc/{name}/cmdline").read_bytes():
                parent = (
                    Path(f"/proc/{name}/stat")
                    .read_text(encoding="utf-8")
                    .rsplit(")", 1)[1]
                    .split()[1]
                )
                if mine in Path(f"/proc/{parent}/cmdline").read_text(encoding="utf-8"):
                    found.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def settle(executor: Executor) -> None:
    """Wait until every slot is taken."""
    while not all(info.state == "ready" for info in executor.replicas()):
        executor.slots(executor.device_ids)
        time.sleep(0.02)


def soak(replicas: int, kills: int, seed: int, penalty: bool, pause: float) -> dict[str, Any]:
    """Train under fire, then undisturbed, and compare."""
    options = Options(call_timeout=CALL_TIMEOUT, max_restarts_per_hour=1_000_000)
    begun = time.monotonic()
    with Executor(["cpu"] * replicas, options=options) as executor:
        trainer = Trainer(executor, seed, penalty)
        for _ in range(20):
            trainer.step()
        before, meanwhile = belongings(), []
        chaos = Chaos(executor, seed, kills, pause)
        chaos.start()
        while chaos.is_alive():
            trainer.step()
            if chaos.done["killed"] >= _LOOKS * (len(meanwhile) + 1):
                meanwhile.append(belongings())
        settle(executor)
        trainer.step()
        found, steps, stats = trainer.state(), len(trainer.losses), executor.stats()
        settle(executor)
        after = belongings()
    minutes = (time.monotonic() - begun) / 60
    threads = executor.replica_set.backend.threads(replicas)
    options = Options(in_process=True, threads=threads)
    with Executor(["cpu"] * replicas, options=options) as local:
        calm = Trainer(local, seed, penalty)
        for _ in range(steps):
            calm.step()
    same = all(torch.equal(one, other) for one, other in zip(found, calm.state(), strict=True))
    counted = {"deaths": stats.deaths, "replays": stats.replays, "respawns": stats.respawns}
    return {
        "replicas": replicas,
        "seed": seed,
        "gradient penalty": penalty,
        "steps": steps,
        "minutes": round(minutes, 2),
        **chaos.done,
        **counted,
        "lost ms": round(stats.lost_ms),
        "bit-identical": same,
        "before": before,
        f"after each {_LOOKS} kills": meanwhile,
        "after": after,
    }


def cost(rounds: int, replicas: int) -> dict[str, Any]:
    """Milliseconds of a step in which a replica is killed at a random moment, and of those around
    it.
    """
    width, rows = 1024, 64
    x, y = vectors(width, rows)
    draw = random.Random(0)
    calm: list[float] = []
    hit: list[float] = []
    extra: list[float] = []
    chunks: list[float] = []
    lost: list[float] = []
    with Executor(["cpu"] * replicas, options=Options(max_restarts_per_hour=1_000_000)) as executor:
        step = stepper(DataParallel(perceptron(width), executor=executor), x, y)
        for _ in range(10):
            step()
        for _ in range(rounds):
            settle(executor)
            for _ in range(8):
                step()
            first = executor.stats()
            around = [timed(step) for _ in range(7)]
            before, typical = executor.stats(), statistics.median(around)
            chunk = max(map(worked, first.replicas, before.replicas)) / len(around)
            pid = draw.choice(executor.replicas()).pid
            timer = threading.Timer(
                draw.uniform(0, 0.9) * typical / 1e3, os.kill, (pid, signal.SIGKILL)
            )
            timer.start()
            took = timed(step)
            timer.join()
            after = executor.stats()
            if after.replays == before.replays:
                # it had answered already, and was not needed any more: this one sees that it died
                step()
                continue
            calm += around
            chunks.append(chunk)
            hit.append(took)
            extra.append(took - typical - chunk)
            lost.append(after.lost_ms - before.lost_ms)
    return {
        "rounds": len(hit),
        "undisturbed step": statistics.median(calm),
        "a chunk's forward and backward in it": statistics.median(chunks),
        "step with a kill": statistics.median(hit),
        "of that, from the notice of the death": statistics.median(lost),
        "over the undisturbed step and the recompute": statistics.median(extra),
    }


def worked(before: ReplicaStats, after: ReplicaStats) -> float:
    """Milliseconds that a replica computed in between."""
    seconds = (
        after.forward_seconds
        + after.backward_seconds
        - before.forward_seconds
        - before.backward_seconds
    )
    return seconds * 1e3


def timed(work: Any) -> float:
    """Milliseconds."""
    begun = time.perf_counter()
    work()
    return (time.perf_counter() - begun) * 1e3


def ddp(world: int) -> dict[str, float]:
    """DDP over gloo: the others fail with the one; the job is started again, here without reading a
    checkpoint.
    """
    width, rows = 1024, 64
    threads = max(1, (os.cpu_count() or 1) // world)
    job = Ddp(world, threads, width, rows)
    for _ in range(5):
        job.step()
    begun = time.perf_counter()
    os.kill(job.processes[1].pid, signal.SIGKILL)
    job.pipes[0].send(True)
    with contextlib.suppress(EOFError):
        job.pipes[0].recv()
    seen = time.perf_counter() - begun
    for process in job.processes:
        process.kill()
        process.join()
    again = Ddp(world, threads, width, rows)
    again.step()
    until = time.perf_counter() - begun
    again.close()
    return {"until the others failed": seen * 1e3, "until the next step": until * 1e3}


def train_loop(config: dict[str, Any]) -> None:
    """One worker of Ray Train: saves and reports each step, and is killed once."""
    import ray.train
    import ray.train.torch

    width, rows = 1024, 64
    torch.set_num_threads(config["threads"])
    rank, world = ray.train.get_context().get_world_rank(), ray.train.get_context().get_world_size()
    x, y = (part.chunk(world)[rank] for part in vectors(width, rows))
    model = ray.train.torch.prepare_model(perceptron(width))
    folder = Path(config["folder"])
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        model.load_state_dict(torch.load(Path(checkpoint.path) / "weights.pt"))
    step = stepper(model, x, y)
    for number in range(8):
        if number == 5 and rank == 1 and not (folder / "killed").exists():
            (folder / "killed").write_text(str(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL)
        step()
        if rank == 0 and (folder / "killed").exists() and not (folder / "back").exists():
            (folder / "back").write_text(str(time.time()), encoding="utf-8")
        with tempfile.TemporaryDirectory() as place:
            torch.save(model.state_dict(), Path(place) / "weights.pt")
            kept = ray.train.Checkpoint.from_directory(place) if rank == 0 else None
            ray.train.report({"step": number}, checkpoint=kept)


def ray_train(world: int) -> dict[str, float]:
    """Ray Train with a checkpoint at each step: from the kill until the first step after it."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": folder, "threads": max(1, (os.cpu_count() or 1) // world)},
            scaling_config=ScalingConfig(num_workers=world, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                storage_path=f"{folder}/runs", failure_config=FailureConfig(max_failures=2)
            ),
        )
        trainer.fit()
        killed, back = (
            float((Path(folder) / name).read_text(encoding="utf-8")) for name in ("killed", "back")
        )
    return {"until the next step": (back - killed) * 1e3}


def kept(name: str, found: Any) -> dict[str, Any]:
    """The results so far, with one part new."""
    path = RESULTS / "faults.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results.pop("machine", None)
    if name == "soak":
        others = [
            run
            for run in results.get(name, [])
            if (run["seed"], run["replicas"]) != (found["seed"], found["replicas"])
        ]
        found = [*others, found]
    return {**results, name: found}


def main() -> None:
    """Run one part, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("soak", "cost", "peers"))
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--penalty", action="store_true")
    parser.add_argument(
        "--pause", type=float, default=1.2, help="seconds between two deeds, on average"
    )
    parser.add_argument("--rounds", type=int, default=25)
    chosen = parser.parse_args()
    logging.getLogger("raydp_parallel").setLevel(logging.ERROR)
    print(machine())
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    if chosen.part == "soak":
        found: Any = soak(chosen.replicas, chosen.kills, chosen.seed, chosen.penalty, chosen.pause)
    elif chosen.part == "cost":
        found = cost(chosen.rounds, chosen.replicas)
    else:
        found = {"DDP gloo": ddp(chosen.replicas), "Ray Train": ray_train(chosen.replicas)}
    print(found)
    text = json.dumps({"machine": machine(), **kept(chosen.part, found)}, indent=2)
    (RESULTS / "faults.json").write_text(text + "\n", encoding="utf-8")
    ray.shutdown()
    if chosen.part == "soak" and not found["bit-identical"]:
        raise SystemExit("the weights are not those of the undisturbed run")


if __name__ == "__main__":
    main()
