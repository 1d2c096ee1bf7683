"""DDP over gloo, and Accelerate, in processes of their own, as their launchers would start them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import replicas_threads
from benchmarks.nets import CASES
from benchmarks.peers.base import Peer, Workers, optimizer_of, serve, stepper

Entry = Callable[[int, int, Connection], None]


def ddp(workers: int) -> Peer:
    """DDP as torchrun would start it."""
    return start(_ddp_worker, workers)


def accelerate(workers: int) -> Peer:
    """Accelerate as `accelerate launch --cpu` would start it."""
    return start(_accelerate_worker, workers)


def start(entry: Entry, workers: int) -> Peer:
    """Start processes."""
    context = mp.get_context("spawn")
    port, connections, processes = free_port(), [], []
    for rank in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_enter, args=(entry, rank, workers, port, theirs), daemon=True
        )
        process.start()
        theirs.close()
        connections.append(ours)
        processes.append(process)

    def end() -> None:
        for process in processes:
            process.join()

    return Workers(lambda: connections, end)


def free_port() -> int:
    """A port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _enter(entry: Entry, rank: int, workers: int, port: int, connection: Connection) -> None:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": workers,
        "LOCAL_WORLD_SIZE": workers,
        "MASTER_PORT": port,
    }
    threads = replicas_threads(workers)
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # as the launchers set it
    torch.set_num_threads(threads)
    entry(rank, workers, connection)
    if dist.is_initialized():
        dist.destroy_process_group()


def _ddp_worker(rank: int, workers: int, connection: Connection) -> None:
    dist.init_process_group("gloo")

    def begin(case: str) -> tuple[nn.Module, Callable[[], None]]:
        net = CASES[case].make()
        return net, stepper(case, DistributedDataParallel(net), (rank, workers))

    serve(connection, begin)


def _accelerate_worker(rank: int, workers: int, connection: Connection) -> None:
    from accelerate import Accelerator  # optional

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(replicas_threads(workers))  # it sets its own

    def begin(case: str) -> tuple[nn.Module, Callable[[], None]]:
        net = CASES[case].make()
        model, optimizer = accelerator.prepare(net, optimizer_of(case, net))
        x, y = (part.chunk(workers)[rank].clone() for part in CASES[case].batch())

        def step() -> None:
            loss = CASES[case].loss(model, x, y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()

        return net, step

    serve(connection, begin)
