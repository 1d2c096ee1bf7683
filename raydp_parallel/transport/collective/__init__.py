"""What replicas do among themselves: sum gradients, and pass contents on. The replica's side.

A group is one of `torch.distributed`'s, made directly: with a store of its own, and never the
process's default group, so that a user's own groups keep working. A group is of use as long as all
its members are: if one fails to do its part, the others hear it, from their sockets or from the
driver, and leave too. Nothing depends on a group but time, for each member can answer without it.

Gradients of replicas on GPUs are summed there, by nccl, if each has a GPU of its own. Contents are
passed on in the machine's memory, by gloo, also among GPUs: there a replica keeps the driver's
bytes, so as to put back what a forward writes, and a second copy of all weights on the GPU would be
too much.
"""

from __future__ import annotations

from raydp_parallel.transport.collective.group import Group, Groups
from raydp_parallel.transport.collective.reducer import APART, NOTHING, SUMMED, Reducer, fits
from raydp_parallel.transport.collective.relay import pass_on, placed

__all__ = ["APART", "NOTHING", "SUMMED", "Group", "Groups", "Reducer", "fits", "pass_on", "placed"]
