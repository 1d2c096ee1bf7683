"""DistributedDataParallel for comparison, in its own processes: nccl on several GPUs, else gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raydp_parallel.check.loads import LOADS, stepper

_START = 120.0
"""Seconds in which the processes must start."""


def step_seconds(load: str, gpus: int, workers: int, rounds: int, start: float = _START) -> float:
    """Seconds of a step in which each worker computes its share of the batch: the median of the
    slowest worker.

    Args:
        load: The name of the load.
        gpus: How many GPUs they share; 0 for CPUs.
        workers: How many processes.
        rounds: Steps that are measured.
        start: Seconds in which the processes must start.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'rendezvous'}"
        ends, processes = [], []
        for rank in range(workers):
            ours, theirs = context.Pipe()
            arguments = theirs, place, load, rank, workers, gpus, rounds
            process = context.Process(target=_work, args=arguments)
            process.start()
            theirs.close()
            ends.append(ours)
            processes.append(process)
        try:
            return max(_take(end, start) for end in ends)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _take(end: Connection, timeout: float) -> float:
    if not end.poll(timeout):
        raise TimeoutError(f"a worker of DDP gave no answer within {timeout:g} s")
    try:
        found = end.recv()
    except EOFError as error:
        raise RuntimeError("a worker of DDP ended without an answer") from error
    if isinstance(found, str):
        raise RuntimeError(f"a worker of DDP failed: {found}")
    return float(found)


def _work(
    end: Connection, place: str, name: str, rank: int, workers: int, gpus: int, rounds: int
) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if gpus > 1 else "gloo", init_method=place, rank=rank, world_size=workers
        )
        end.send(_measure(name, rank, workers, gpus, rounds))
        dist.destroy_process_group()
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")


def _measure(name: str, rank: int, workers: int, gpus: int, rounds: int) -> float:
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    load = LOADS[name]
    net: nn.Module = DistributedDataParallel(load.make().to(device))
    x, y = (part.chunk(workers)[rank].to(device) for part in load.batch())
    step = stepper(load, net, x, y)
    times = []
    for number in range(rounds + 3):
        begun = time.perf_counter()
        step()
        if gpus:
            torch.cuda.synchronize(device)
        if number >= 3:
            times.append(time.perf_counter() - begun)
    return sorted(times)[rounds // 2]
