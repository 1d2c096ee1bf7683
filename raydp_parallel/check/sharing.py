"""Several processes on one GPU, as small models may use it."""

from __future__ import annotations

import copy

import torch

from raydp_parallel.check import nets
from raydp_parallel.check.here import PLAIN, Here, exact
from raydp_parallel.check.table import NotHere, Row, RowResult
from raydp_parallel.data_parallel import DataParallel
from raydp_parallel.errors import PlacementError
from raydp_parallel.options import Options

HALVES = Options(threads=PLAIN.threads, metrics=PLAIN.metrics, gpus_per_replica=0.5)


def halves(here: Here) -> RowResult:
    """Two replicas with half a GPU each: two processes on one GPU, the plain module's gradients."""
    executor = here.executor(HALVES)
    torch.manual_seed(0)
    net = nets.perceptron().to(here.device)
    plain = copy.deepcopy(net)
    try:
        model = DataParallel(net, [0, 1], executor=executor)
    except PlacementError as error:
        raise NotHere(
            f"device ids name whole GPUs here, so that one GPU has one replica ({error})"
        ) from error
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(4)).to(here.device)
    with exact():
        model(x).square().sum().backward()
        plain(x).square().sum().backward()
    gaps = [
        float((p.grad - q.grad).abs().max())
        for p, q in zip(net.parameters(), plain.parameters(), strict=True)
        if p.grad is not None and q.grad is not None
    ]
    replicas = executor.replicas()
    pids, uuids = {r.pid for r in replicas}, {r.gpu_uuid for r in replicas}
    text = f"{len(pids)} processes on {len(uuids)} GPU(s), gradients differ by {max(gaps):.0e}"
    alone = here.gpus > 1 or len(uuids) == 1
    return RowResult(
        text,
        {"difference": max(gaps), "uuids": sorted(uuids)},
        len(pids) == 2 and alone and max(gaps) < 1e-4,
    )


ROWS = (Row("sharing", "two replicas on one GPU", halves, gpus=1),)
