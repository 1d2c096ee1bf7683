"""How fast is a training step, beside the peers?

`python -m benchmarks.training_step` trains four nets with SGD, each in one interleaved run of all
that can train it, on two workers or replicas with the cores shared among them: DDP over gloo, a
naive Ray driver (weights into the object store each step, gradients back as lists of tensors), and
one process with all threads. Each makes a few steps in its turn. At the end all must hold the same
weights.

The peers' workers time themselves and make the steps of a turn without waiting for the driver,
which favours them; ours is timed as the user sees it. All have the defaults of their makers, and as
many threads as a fair share of the cores.
"""

from __future__ import annotations

from functools import partial

from benchmarks.measure import Asked, Effort, Report, Table, alone, interleaved
from benchmarks.nets import CASES, CONV, GPT2_SMALL, LARGE_MLP, SMALL_MLP, usable
from benchmarks.peers import DDP, OURS, PEERS, PLAIN, Peer, Weights

LIMITS = {SMALL_MLP: 0.95, LARGE_MLP: 0.85, CONV: 0.95, GPT2_SMALL: 1.25}
"""The nets, and how long a step may take beside DDP's."""
REPLICAS = 2
_CLOSE = 1e-6


def measure(
    case: str, peers: dict[str, Peer], effort: Effort
) -> tuple[dict[str, float], dict[str, Weights]]:
    """Milliseconds per step of each, and the weights at the end, in one interleaved run."""
    for peer in peers.values():
        peer.begin(case)
    steps = CASES[case].steps
    turns = {name: partial(_turn, peer, steps) for name, peer in peers.items()}
    medians = interleaved(turns, effort.rounds(CASES[case].rounds), min(effort.warmup, 3))
    return medians, {name: peer.finish() for name, peer in peers.items()}


def _turn(peer: Peer, steps: int) -> float:
    return peer.steps(steps) / steps


def check(case: str, found: dict[str, Weights]) -> None:
    """Raise if weights differ by more than rounding. One process has batch norm of all rows."""
    sums = {name: w.checksum for name, w in found.items() if case != CONV or name != PLAIN}
    low, high = min(sums.values()), max(sums.values())
    if high - low > _CLOSE * high:
        raise RuntimeError(f"{case}: different weights at the end, checksums {sums}")


def run(effort: Effort) -> Report:
    """Training step beside the peers."""
    peers = {name: start(REPLICAS) for name, start in PEERS.items()}
    tables, asked, data = [], [], {}
    cases = [case for case in LIMITS if usable(case)]
    for case in cases if effort is not Effort.SMOKE else cases[:1]:
        medians, found = measure(case, peers, effort)
        check(case, found)
        data[case] = medians
        tables.append(_table(case, medians, found))
        asked.append(Asked(f"{case}: step to {DDP}", medians[OURS] / medians[DDP], LIMITS[case]))
    for peer in peers.values():
        peer.close()
    question = "How fast is a training step, beside the peers?"
    return Report("training_step", question, tables, asked, {"median_ms": data})


def _table(case: str, medians: dict[str, float], found: dict[str, Weights]) -> Table:
    rows = []
    for name, ms in medians.items():
        same = "yes" if found[name].digest == found[DDP].digest else "no"
        rows.append([name, ms, ms / medians[DDP], f"{found[name].checksum:.9g}", same])
    columns = ["", "ms per step", f"to {DDP}", "checksum", f"bits as {DDP}"]
    return Table(f"{case}, {REPLICAS} workers", columns, rows)


if __name__ == "__main__":
    alone(run)
