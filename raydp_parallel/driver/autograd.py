"""Connects torch's graph in the driver with the graphs in the replicas.

  leaves ──► Fork ──► token ──► Join ──► output 0
                        └─────► Join ──► output 1
  grads  ◄── Fork ◄─────────── Join ◄── gradient

In forward there is one Fork per call, and one Join per output. In backward the Joins put their
gradients aside, and Fork, which the engine runs last, makes one trip for all of them.

[Note: how long a remote graph lives]
Exactly as long as torch would keep it. Each Join saves the token under hooks that pack it with the
call's `GraphHandle`; when the engine or the garbage collector frees the saved tensor, the handle
goes, and its end frees the remote graphs. The engine frees Join's saved tensor before it reaches
Fork, so unpacking pins the handle until Fork has made its trip.

[Note: higher orders]
Under ``create_graph`` Fork's backward is itself a call with graphs in the replicas. Its leaves are
the incoming gradients. The gradients that it passes to the graphs that it is derived from must be
added there to those of their own outputs, in one run of the engine: a hook on a tensor inside the
module is called once, with the sum. So a derived Fork makes a trip for the incoming gradients
alone, if they are asked for, and passes on what it received to the Forks that it is derived from,
which the engine runs after it because their tokens are among its inputs. Derived calls share nodes
with the ones they came from: from then on neither lets torch free buffers in passing, and the
handles free everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node, saved_tensors_hooks

from raydp_parallel.cluster.replica_set import ReplicaSlot
from raydp_parallel.devices import ambient
from raydp_parallel.driver.dispatcher import RemoteGraph
from raydp_parallel.driver.executor import Executor
from raydp_parallel.driver.gradients import Numbers
from raydp_parallel.driver.resident import Trainable
from raydp_parallel.options import UnusedGrads
from raydp_parallel.replica import exceptions
from raydp_parallel.state.mirror import Leaf, Mark
from raydp_parallel.wire.messages import Terms


class Part(NamedTuple):
    """One chunk of a call, as backward sees it."""

    graph: RemoteGraph
    terms: Terms  # of its forward
    slot: ReplicaSlot  # that it is for
    master: Trainable
    mark: Mark  # the model's tensors after the forward
    leaves: Numbers  # which of the call's leaves its own are: those of the module, then inputs


@dataclass(eq=False)
class CallNode:
    """One call, as backward sees it."""

    executor: Executor
    leaves: Sequence[Leaf]  # that gradients may be asked for
    unused: UnusedGrads
    together: bool  # layers of the chunks exchange tensors: all take part in backward, or none
    parts: dict[int, Part]  # its chunks that have a graph, by number
    differentiate: Differentiate  # makes the trip of a backward
    parents: Sequence[CallNode] = ()  # that it is derived from
    shared: bool = False  # it shares nodes with another call
    token: Tensor | None = field(default=None, init=False)  # the output of its Fork
    # What each running pass of torch's engine brought, by its number.
    passes: weakref.WeakValueDictionary[int, EnginePass] = field(
        default_factory=weakref.WeakValueDictionary, init=False
    )

    @property
    def now(self) -> EnginePass:
        """The gradients and handles of the running pass of torch's engine."""
        task = torch._C._current_graph_task_id()
        found = self.passes.get(task)
        if found is None:
            found = self.passes[task] = EnginePass({}, [], set())
            if task >= 0:  # torch has it as long as the pass lasts, which may fail on its way
                Variable._execution_engine.queue_callback(lambda: found.pinned.clear())
        return found


Stash = dict[CallNode, dict[int, dict[int, Tensor]]]
"""Gradients of outputs, by the call, the chunk and the number of the output."""


@dataclass(eq=False)
class EnginePass:
    """Gradients and handles that one pass of the engine brought so far."""

    grads: Stash  # of the call's outputs, and of those of calls derived from it
    pinned: list[GraphHandle]  # which keep the remote graphs until the trip
    streams: set[torch.cuda.Stream]  # of GPUs, that write the gradients


@dataclass(eq=False)
class GraphHandle:
    """Lives as long as torch would keep a graph, and then lets replicas free theirs."""

    graphs: Sequence[RemoteGraph]  # the chunks'
    parents: Sequence[GraphHandle] = ()  # of the graphs that these share nodes with

    def __del__(self) -> None:
        for graph in self.graphs:
            graph.drop()


Differentiate = Callable[[CallNode, EnginePass, Set[int], bool], Sequence[Tensor | None]]
"""Returns the gradients of leaves, of which some get one, and some may stay in the replicas."""


def attach(call: CallNode, handle: GraphHandle, rows: Mapping[int, list[Tensor]]) -> None:
    """Make the outputs that require a gradient part of torch's graph, in each chunk's list."""
    tokens = [parent.token for parent in call.parents]
    token = call.token = Fork.apply(call, *tokens, *[leaf.tensor for leaf in call.leaves])

    def unpack(packed: tuple[GraphHandle, Tensor]) -> Tensor:
        call.now.pinned.append(packed[0])
        return packed[1]

    with saved_tensors_hooks(lambda tensor: (handle, tensor), unpack):
        for chunk, row in rows.items():
            for k, tensor in enumerate(row):
                if tensor.requires_grad:
                    row[k] = Join.apply(call, chunk, k, token, tensor.requires_grad_(False))


class ForkNode(FunctionCtx):
    """A Fork's node in torch's graph."""

    call: weakref.ref[CallNode]
    next_functions: Sequence[tuple[Node | None, int]]


class Fork(Function):
    """Leaves in, a token out. Saves no tensor, so it may run again."""

    @staticmethod
    def forward(ctx: ForkNode, call: CallNode, *_: Tensor) -> Tensor:
        # The call holds the token, and the token holds this node. What makes the engine run the
        # node, a Join or a derived call, holds the call.
        ctx.call = weakref.ref(call)
        ctx.set_materialize_grads(False)  # a token has no gradient
        return torch.zeros((), device="cpu")

    @staticmethod
    @exceptions.ShortTraceback()
    @ambient.uncompiled
    def backward(ctx: ForkNode, *_: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call()
        assert call is not None
        ending = call.passes.pop(torch._C._current_graph_task_id())
        # Torch does not wait for the streams that write the gradients: what the Joins hand on is
        # nothing, and Fork runs on no GPU, so on the stream of whoever called backward.
        for stream in ending.streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        # Which leaves, and calls that it is derived from, does this pass go on to?
        # ``needs_input_grad`` is True for all of them, even under ``autograd.grad(y, x)``.
        running, captured = set(), False
        for at, edge in enumerate(ctx.next_functions):
            try:
                if edge[0] is not None and torch._C._will_engine_execute_node(edge[0]):
                    running.add(at)
            except RuntimeError:  # of a leaf whose gradient is captured: ``.grad`` stays as it is
                running.add(at)
                captured = True
        derived = len(call.parents)
        needed = {at - derived for at in running if at >= derived}
        grads: Sequence[Tensor | None] = [None] * len(call.leaves)
        if needed or not derived:
            grads = call.differentiate(call, ending, needed, captured)
        # Last: if the trip fails, nobody takes this out of the parents again.
        for at, parent in enumerate(call.parents):
            if at in running:
                parent.now.grads.update(ending.grads)
                parent.now.pinned.extend(ending.pinned)
        return (None, *[None] * derived, *grads)


class Join(Function):
    """A remote output."""

    @staticmethod
    def forward(
        ctx: Any, call: CallNode, chunk: int, number: int, token: Tensor, output: Tensor
    ) -> Tensor:
        ctx.call, ctx.chunk, ctx.number = call, chunk, number
        ctx.save_for_backward(token)
        # The output itself, not a view of it: users may write to it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    @ambient.uncompiled
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        (_,) = ctx.saved_tensors  # raises torch's own error if the graph was freed
        now = ctx.call.now
        now.grads.setdefault(ctx.call, {}).setdefault(ctx.chunk, {})[ctx.number] = grads[0]
        if grads[0].is_cuda:
            now.streams.add(torch.cuda.current_stream(grads[0].device))
        return None, None, None, None, None
