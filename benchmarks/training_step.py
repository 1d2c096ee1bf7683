"""How fast is a training step, beside the peers?

`python -m benchmarks.training_step` trains five nets with SGD, and two of them with AdamW, each in
one interleaved run of all that can train it, on two workers or replicas with the cores shared among
them: DDP over gloo, Ray Train's TorchTrainer, Accelerate, a naive Ray driver (weights into the
object store each step, gradients back as lists of tensors), and one process with all threads. Ours
comes twice: with the optimizer in the driver, and in the replicas. The floor of a loop in the
driver is two processes by hand that share the weights. Each makes a few steps in its turn. At the
end all must hold the same weights. In the last table eight replicas share the cores.

The peers' workers time themselves and make the steps of a turn without waiting for the driver,
which favours them; ours is timed as the user sees it, and so is the floor. All have the defaults of
their makers, and as many threads as a fair share of the cores. A peer is left out if its package is
missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved
from benchmarks.nets import CASES, GPT2_SMALL, GPT_ADAMW, MLP_ADAMW, usable
from benchmarks.peers import BY_HAND, IN_REPLICAS, PEERS, Peer, Weights, missing

LIMITS = {
    "MLP 2.1 M, batch 64": 1.05,
    "MLP 16.8 M, batch 256": 0.9,
    "ResNet-like 2.8 M, batch 16": 1.0,
    "GPT-2-like 20.5 M, batch 4 x 64": 1.0,
}
"""The nets that are trained, and what is asked of a step beside the first peer's."""
TO_THE_FLOOR = {GPT2_SMALL: 1.2}
"""What is asked of a step beside the floor of a loop in the driver. 76 small parameters take each
side as long as the computing does not, and the floor itself is slower than the first peer.
"""
INSIDE = {MLP_ADAMW: 0.8, GPT_ADAMW: 0.85}
"""The nets that are trained with AdamW, and what is asked of a step with it in the replicas."""
REPLICAS, MANY = 2, 8
MANY_LIMIT = 1.1
_CLOSE = 1e-6
_FIRST = next(iter(PEERS))


def measure(
    case: str, peers: dict[str, Peer], effort: Effort
) -> tuple[dict[str, float], dict[str, Weights]]:
    """Milliseconds per step of each, and the weights at the end, in one interleaved run."""
    for peer in peers.values():
        peer.begin(case)
    steps = CASES[case].steps if effort is not Effort.SMOKE else 1
    turns = {name: partial(_turn, peer, steps) for name, peer in peers.items()}
    medians = interleaved(
        turns,
        effort.rounds(CASES[case].rounds),
        min(effort.warmup, 3) if effort is not Effort.QUICK else 1,
    )
    return medians, {name: peer.finish() for name, peer in peers.items()}


def _turn(peer: Peer, steps: int) -> float:
    return peer.steps(steps) / steps


def check(case: str, found: dict[str, Weights]) -> None:
    """All ended with the same weights, but for rounding: one process sums over rows in another
    order.
    """
    sums = {name: w.checksum for name, w in found.items()}
    low, high = min(sums.values()), max(sums.values())
    if high - low > _CLOSE * high:
        raise RuntimeError(f"{case}: different weights at the end, checksums {sums}")


def run(effort: Effort, names: Sequence[str] | None = None) -> Report:
    """Training step beside the peers."""
    peers = {name: PEERS[name](REPLICAS) for name in names or PEERS if not missing(name)}
    tables, asked, data = [], [], {}
    cases = [case for case in (*LIMITS, *TO_THE_FLOOR, *INSIDE) if usable(case)]
    for case in cases if effort is not Effort.SMOKE else cases[:1]:
        medians, found = measure(case, peers, effort)
        check(case, found)
        data[case] = medians
        tables.append(_table(case, medians, found))
        ours = IN_REPLICAS if case in INSIDE else "raydp_parallel"
        limit, beside = {**LIMITS, **INSIDE, **TO_THE_FLOOR}[case], _FIRST
        if case in TO_THE_FLOOR:
            beside = BY_HAND
        if beside in medians:
            asked.append(Asked(f"{case}: step to {beside}", medians[ours] / medians[beside], limit))
    for peer in peers.values():
        peer.close()
    if effort is not Effort.SMOKE:
        table, ratio, data[f"{MLP_ADAMW}, {MANY} replicas"] = _many(effort)
        tables.append(table)
        asked.append(Asked(f"{MLP_ADAMW}, {MANY} replicas: step to {_FIRST}", ratio, MANY_LIMIT))
    notes = [
        f"{name} left out: not installed: {', '.join(missing(name))}"
        for name in PEERS
        if missing(name)
    ]
    notes += [
        f"{case} left out: not installed: transformers"
        for case in (*LIMITS, *TO_THE_FLOOR)
        if not usable(case)
    ]
    notes.append(
        "Peers are timed inside their workers, without the driver's word to step, "
        "which favours them."
    )
    notes.append(
        "The ResNet-like net has group norm, because batch norm over chunks is not "
        "batch norm over the batch."
    )
    question = "How fast is a training step, beside the peers?"
    return Report("training_step", question, tables, asked, {"median_ms": data}, notes)


def _many(effort: Effort) -> tuple[Table, float, dict[str, float]]:
    """Eight replicas that share the cores, beside as many processes of DDP."""
    peers = {name: PEERS[name](MANY) for name in (_FIRST, IN_REPLICAS)}
    medians, found = measure(MLP_ADAMW, peers, effort)
    check(MLP_ADAMW, found)
    for peer in peers.values():
        peer.close()
    table = _table(MLP_ADAMW, medians, found, MANY)
    return table, medians[IN_REPLICAS] / medians[_FIRST], medians


def _table(
    case: str, medians: dict[str, float], found: dict[str, Weights], workers: int = REPLICAS
) -> Table:
    first = found[_FIRST]
    rows = []
    for name, ms in medians.items():
        same = "yes" if found[name].digest == first.digest else "no"
        rows.append([name, ms, ms / medians[_FIRST], f"{found[name].checksum:.9g}", same])
    columns = ["", "ms per step", f"to {_FIRST}", "checksum", f"bits as {_FIRST}"]
    return Table(f"{case}, {workers} workers", columns, rows)


if __name__ == "__main__":
    alone(run)
