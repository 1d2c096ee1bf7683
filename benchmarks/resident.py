"""How fast is a step with AdamW, where the replicas make it?

`python -m benchmarks.resident` trains two nets with AdamW: by DDP over gloo, by an optimizer whose
steps the replicas make, and by one in the driver, in one interleaved run on two workers. At the end
all must hold the same weights.
"""

from __future__ import annotations

from functools import partial

import raydp_parallel
from benchmarks.measure import Asked, Effort, Report, Table, alone
from benchmarks.nets import GPT2_20M, LARGE_MLP, usable
from benchmarks.peers import DDP, Ddp, Here, Peer, adamw, resident
from benchmarks.training_step import measure

LIMIT = 1.05
IN_REPLICAS, IN_DRIVER = "steps in the replicas", "optimizer in the driver"
REPLICAS = 2


def run(effort: Effort) -> Report:
    """A step with AdamW in the replicas."""
    wrap = partial(raydp_parallel.DataParallel, device_ids=["cpu"] * REPLICAS)
    peers: dict[str, Peer] = {
        DDP: Ddp(REPLICAS, adamw),
        IN_REPLICAS: Here(wrap, resident),
        IN_DRIVER: Here(wrap, adamw),
    }
    rows, asked, data = [], [], {}
    cases = [case for case in (LARGE_MLP, GPT2_20M) if usable(case)]
    for case in cases if effort is not Effort.SMOKE else cases[:1]:
        medians, found = measure(case, peers, effort)
        data[case] = medians
        for name, ms in medians.items():
            same = "yes" if found[name].digest == found[DDP].digest else "no"
            rows.append([case, name, ms, ms / medians[DDP], f"{found[name].checksum:.9g}", same])
        ratio = medians[IN_REPLICAS] / medians[DDP]
        asked.append(Asked(f"{case}: step with AdamW in the replicas to {DDP}", ratio, LIMIT))
    for peer in peers.values():
        peer.close()
    columns = ["", "", "ms per step", f"to {DDP}", "checksum", f"bits as {DDP}"]
    table = Table(f"AdamW, {REPLICAS} workers", columns, rows)
    question = "How fast is a step with AdamW, where the replicas make it?"
    return Report("resident", question, [table], asked, {"median_ms": data})


if __name__ == "__main__":
    alone(run)
