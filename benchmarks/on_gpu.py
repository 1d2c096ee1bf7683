"""How fast is it on GPUs, and is it right?

`python -m benchmarks.on_gpu` takes at most eight minutes on one GPU, prints a table and writes
``on_gpu.json``: send us both. It compares the plain module, `nn.DataParallel`, DDP where there are
two GPUs or more, and this package in place and with replicas by each way. Without a GPU it runs on
the stand-in of the tests, small, which shows that it runs, and nothing of speed.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measure import Table, as_text, on_standin
from benchmarks.nets import RowLosses, perceptron, resnet50

REAL = torch.cuda.is_available() and "STANDIN_LIBRARY" not in os.environ
STEPS, WARM = (20, 4) if REAL else (2, 1)
HOWS = ("evaluated", "smaller", "streamed")
"""Ways to train."""


class Load(NamedTuple):
    """A net and its batch.

    Attributes:
        make: Makes the net.
        batch: Makes inputs and targets.
        loss: Computes the loss.
        dtype: The dtype of autocast; None computes as the net is.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    dtype: torch.dtype | None = None


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel  # optional

    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return RowLosses(GPT2LMHeadModel(GPT2Config(**quiet)))


def _outside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = net(x)
    return F.cross_entropy(found if isinstance(found, Tensor) else found.logits, y)


def _inside(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = net(x, y).mean()
    return loss


def _rows(width: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(64, width), torch.randint(10, (64,)))


def loads() -> dict[str, Load]:
    """Return the nets that this machine can train."""
    if not REAL:
        return {"perceptron": Load(lambda: perceptron(16), _rows(16), _outside)}
    found = {"perceptron 2.1 M, batch 64": Load(lambda: perceptron(1024), _rows(1024), _outside)}
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401

        def pictures() -> tuple[Tensor, Tensor]:
            return torch.randn(64, 3, 224, 224), torch.randint(10, (64,))

        def words() -> tuple[Tensor, Tensor]:
            ids = torch.randint(50257, (8, 1025))
            return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

        found["ResNet-50, batch 64"] = Load(resnet50, pictures, _outside)
        found["GPT-2 small, 8 x 1024, bf16"] = Load(_gpt2, words, _inside, torch.bfloat16)
    return found


def cpu_ms(pid: int) -> float:
    """Return the CPU time of a process so far."""
    parts = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return 1e3 * (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def stepper(
    model: nn.Module, load: Load, batch: tuple[Tensor, Tensor], how: str = ""
) -> Callable[[], Tensor]:
    """Return a step of training.

    Args:
        model: The model.
        load: The net and its batch.
        batch: Inputs and targets, on the GPU.
        how: ``"evaluated"`` comes after evaluations, ``"streamed"`` runs forward on a stream of its
            own, ``"smaller"`` comes after a step of one row, which is one chunk.
    """
    if how == "smaller":
        load.loss(model, batch[0][:1], batch[1][:1]).backward()
    if how == "evaluated":
        with torch.inference_mode():
            for _ in range(3):
                load.loss(model, *batch)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    side = torch.cuda.Stream() if how == "streamed" else torch.cuda.current_stream()

    def step() -> Tensor:
        optimizer.zero_grad()
        side.wait_stream(torch.cuda.current_stream())
        cast = torch.autocast("cuda", load.dtype, enabled=load.dtype is not None)
        with torch.cuda.stream(side), cast:
            loss = load.loss(model, *batch)
        loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        optimizer.step()
        return loss.detach()

    return step


def measured(step: Callable[[], Tensor], executor: Any = None) -> dict[str, Any]:
    """Measure some steps."""
    for _ in range(WARM):
        step()
    pids = [r.pid for r in executor.replicas()] if executor is not None and REAL else []
    before, stats = [cpu_ms(pid) for pid in pids], executor.stats() if executor else None
    times, own, losses = [], time.process_time(), []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
    found: dict[str, Any] = {
        "ms": statistics.median(times),
        "driver_cpu_ms": 1e3 * (time.process_time() - own) / STEPS,
        "driver_peak_mb": torch.cuda.max_memory_allocated() >> 20,
        "last_loss": float(losses[-1]),
    }
    if stats is not None:
        grown = executor.stats().since(stats)
        found["link"] = grown.link
        replicas = grown.replicas
        found["busy_ms"] = max(1e3 * r.busy / STEPS for r in replicas)
        found["mb_in"] = sum(r.bytes_in for r in replicas) / STEPS / 1e6
        found["mb_out"] = sum(r.bytes_out for r in replicas) / STEPS / 1e6
        after = [cpu_ms(pid) for pid in pids]
        found["replica_cpu_ms"] = sum(after) / STEPS - sum(before) / STEPS
    return found


@contextlib.contextmanager
def contender(name: str, net: nn.Module, gpus: int) -> Iterator[tuple[nn.Module, Any]]:
    """Wrap a net; gives the executor of its replicas, too."""
    from raydp_parallel import DataParallel, Executor, Options

    if name == "plain":
        yield net, None
    elif name.startswith("nn.DataParallel"):
        yield nn.DataParallel(net, json.loads(name.partition(" ")[2])), None
    elif name == "in place":
        yield DataParallel(net, [0]), None
    else:
        way, _, places = name.partition(" ")
        places = places.partition("]")[0] + "]"
        ids = json.loads(places)
        # More replicas than GPUs share them.
        share = 1.0 if len(ids) <= gpus else gpus / len(ids)
        ways = "auto" if way == "auto" else ("host",)
        options = Options(gpu_paths=ways, gpus_per_replica=share, metrics=False)
        with Executor(ids, options=options) as executor:
            yield DataParallel(net, executor=executor), executor


def names(gpus: int) -> list[str]:
    """Return the contenders for so many GPUs."""
    every = json.dumps([*range(gpus)])
    found = ["plain", "in place", "auto [0]"]
    if REAL:
        found += ["host [0]", "nn.DataParallel [0, 0]"]
    found += [
        "auto [0, 1]",
        *[f"auto [0, 1] {how}" for how in HOWS],
    ]
    if gpus > 1 and REAL:
        found += [f"nn.DataParallel {every}", f"auto {every}", f"host {every}", "DDP"]
    return list(dict.fromkeys(found))


def _ddp(rank: int, gpus: int, port: int, name: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=gpus)
    load = loads()[name]
    torch.manual_seed(0)
    net = nn.parallel.DistributedDataParallel(load.make().cuda(), device_ids=[rank])
    x, y = load.batch()
    mine = x.chunk(gpus)[rank].cuda(), y.chunk(gpus)[rank].cuda()
    found = measured(stepper(net, load, mine))
    if rank == 0:
        results.put(found)
    torch.distributed.destroy_process_group()


def ddp(name: str, gpus: int) -> dict[str, Any]:
    """Measure DDP on all GPUs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_ddp, (gpus, port, name, results), gpus)
    return dict(results.get())


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__)
    parser.add_argument("--seconds", type=float, default=470.0, help="the most that it may take")
    parser.add_argument("--out", type=Path, default=Path("on_gpu.json"))
    chosen = parser.parse_args()
    end = time.monotonic() + chosen.seconds
    if not REAL:
        on_standin("on_gpu")
    gpus = torch.cuda.device_count()
    rows: list[dict[str, Any]] = []
    for load_name, load in loads().items():
        torch.manual_seed(0)
        start, batch = load.make(), load.batch()
        first = None
        for name in names(gpus):
            row: dict[str, Any] = {"load": load_name, "contender": name}
            rows.append(row)
            if time.monotonic() > end:
                row["failed"] = "no time was left"
                continue
            try:
                if name == "DDP":
                    row.update(ddp(load_name, gpus))
                    continue
                net = copy.deepcopy(start).cuda()
                own = batch[0].cuda(), batch[1].cuda()
                before = torch.cuda.mem_get_info()[0]
                with contender(name, net, gpus) as (model, executor):
                    free = torch.cuda.mem_get_info()[0]
                    step = stepper(model, load, own, name.rpartition(" ")[2])
                    row.update(measured(step, executor))
                    after = torch.cuda.mem_get_info()[0]  # NCCL took its own with the first one
                    row["gpu_mb"], row["steps_mb"] = before - after >> 20, free - after >> 20
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            first = row if first is None else first
            if "last_loss" in row and "last_loss" in first:
                row["deviation"] = abs(row["last_loss"] - first["last_loss"])
            model = executor = net = own = step = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.ipc_collect()
            if REAL:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    device = torch.cuda.get_device_properties(0).name if REAL else "a stand-in"
    about = {"date": str(date.today()), "device": device, "gpus": gpus, "torch": torch.__version__}
    about["python"] = platform.python_version()
    columns = ["ms", "busy_ms", "driver_cpu_ms", "replica_cpu_ms", "mb_in", "mb_out"]
    columns += ["driver_peak_mb", "gpu_mb", "steps_mb", "deviation", "link", "failed"]
    table = [[f"{r['load']}: {r['contender']}", *[r.get(c, "") for c in columns]] for r in rows]
    print(as_text(Table(f"a step of training on {gpus} x {device}", ["", *columns], table)))
    chosen.out.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    print(f"wrote {chosen.out}")


if __name__ == "__main__":
    main()
