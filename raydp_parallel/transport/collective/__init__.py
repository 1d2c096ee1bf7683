"""Groups of replicas, which sum gradients and pass weights on among themselves. The replica's side.

A group is a process group of `torch.distributed`, made directly: with a store of its own, and never
the process's default group, so that a user's own groups keep working. A group works as long as all
its members do: if one member fails, the others learn that from their sockets or from the driver,
and leave too. Groups only save time: each member can answer without them.

Gradients of replicas on GPUs are summed there, by nccl, if each has a GPU of its own. Weights are
passed on in the machine's memory, by gloo, also among GPUs: a replica keeps the driver's bytes
there, to restore what a forward writes, and a second copy of all weights would need too much of the
GPU's memory.
"""

from __future__ import annotations

from raydp_parallel.transport.collective.group import Group, Groups
from raydp_parallel.transport.collective.reducer import APART, NOTHING, SUMMED, Reducer, fits
from raydp_parallel.transport.collective.relay import pass_kept, pass_on, placed

__all__ = [
    "APART",
    "NOTHING",
    "SUMMED",
    "Group",
    "Groups",
    "Reducer",
    "fits",
    "pass_kept",
    "pass_on",
    "placed",
]
