"""What replicas do among themselves: sum gradients, and pass contents on. The replica's side.

A group is one of `torch.distributed`'s, made directly: with a store of its own, and never the process's default group,
so that a user's own groups keep working. A group is of use as long as all its members are: if one fails to do its part,
the others hear it from their sockets at once and leave too. Nothing depends on a group but time, for each member can
answer without it.

Groups are of the backend gloo, and so work in the memory of the host, also for replicas on GPUs. One of nccl would keep
gradients on the GPUs; it needs a way to tell a member that waits in a kernel that another one died.
"""

from __future__ import annotations

from raydp_parallel.collective.group import Group, Groups
from raydp_parallel.collective.reducer import APART, NOTHING, SUMMED, Reducer, fits
from raydp_parallel.collective.relay import pass_on, placed

__all__ = ["APART", "NOTHING", "SUMMED", "Group", "Groups", "Reducer", "fits", "pass_on", "placed"]
