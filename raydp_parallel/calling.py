"""One forward over some chunks: what `parallel_apply` and a single remote replica have in common."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raydp_parallel import batch, bridge, codec, context, devices, replay
from raydp_parallel.exchange import Relay
from raydp_parallel.executor import Executor
from raydp_parallel.jobs import Answer, Graph, Handle, Job
from raydp_parallel.links import Mail
from raydp_parallel.messages import Arguments, ForwardRequest, Produced, Reply, StateUpdate
from raydp_parallel.options import UnusedGrads
from raydp_parallel.pool import Part
from raydp_parallel.post import Post, Route, post, route, size_of
from raydp_parallel.seats import Seat
from raydp_parallel.snapshot.master import Master
from raydp_parallel.snapshot.moments import Mark

log = logging.getLogger("raydp_parallel")

_MOST_RERUNS = 2
"""How often a forward is run again while somebody writes to the weights behind their versions. A thread that never
stops doing so gets, like any race, one of the possible results."""

_MUCH = 64 << 20
"""Bytes of a model whose way to a replica is worth a line in the log."""


class Chunk(NamedTuple):
    """One chunk's work.

    Attributes:
        seat: Who runs it.
        master: The module.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        where: Names chunk and device in an exception's text; None leaves exceptions as they are.
        rows: Rows of the batch in it, for statistics.
        detach: Whether its module takes no gradients.
        alone: Whether there is one device only, where upstream runs the master itself.
    """

    seat: Seat
    master: Master
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str | None
    rows: int = 0
    detach: bool = False
    alone: bool = False


class Capture:
    """Asks for outputs of submodules, and takes them.

    Args:
        module: Whose submodules.
        names: The submodules.
    """

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        self.module = module
        self.names = names
        self.parts: list[dict[str, list[Any]]] = []


joining: ContextVar[bool] = ContextVar("raydp_parallel_joining", default=False)
"""Whether outputs are going to be joined, and nobody else sees them."""

capturing: ContextVar[Capture | None] = ContextVar("raydp_parallel_capturing", default=None)


def run(executor: Executor, chunks: Sequence[Chunk], unused: UnusedGrads) -> list[Any]:
    """Run every chunk, and make the outputs part of torch's graph."""
    return _Forward(executor, chunks, unused).run()


class _Forward:
    """One forward on its way.

    While the replicas work, the driver plans the graph and verifies contents; what it needs for that is collected as
    the chunks' messages are made, one after the other, each sent at once.
    """

    def __init__(self, executor: Executor, chunks: Sequence[Chunk], unused: UnusedGrads) -> None:
        self.executor = executor
        self.chunks = chunks
        self.masters = list(dict.fromkeys([chunk.master for chunk in chunks]))
        self.ambient = context.capture()
        wanted = capturing.get()
        self.capture = wanted if wanted is not None and wanted.module is chunks[0].master.module else None
        self.seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        on_cpu = devices.is_cpu(chunks[0].master.device)
        self.joins = joining.get() and self.capture is None and len(chunks) > 1 and on_cpu
        self.call = bridge.Call(executor, [], [], unused)
        self.threads = executor.threads(len(chunks))
        self.sends: list[int] = []
        self.verified = True
        self.token: Tensor | None = None
        self.graphs: list[Graph | None] = []

    def run(self) -> list[Any]:
        """The chunks' outputs."""
        try:
            return self._run()
        except BaseException:
            # The exception's traceback may keep this alive for long.
            for graph in self.graphs:
                if graph is not None:
                    graph.drop()
            raise

    def _run(self) -> list[Any]:
        answers = self._attempt()
        while {answer.reply.failure for answer in answers} != {None} and self.executor.teach(answers):
            answers = self._attempt()
        reruns = 0
        while not self.verified and reruns < _MOST_RERUNS:
            answers = self._attempt()
            reruns += 1
        self.executor.note_forward(reruns, len(self.sends), sum(self.sends))
        self._leave_out_unreached(answers)
        if self.token is None and self.call.leaves:
            self.token = bridge.fork(self.call)
        first = self.chunks[0].master
        bridge.finish([(first if i == 0 else None, answer) for i, answer in enumerate(answers)])
        self._note_parts()
        return self._outputs(answers)

    def _attempt(self) -> list[Answer]:
        self.executor.revive([chunk.seat for chunk in self.chunks])
        self.inputs: list[list[Tensor]] = [[] for _ in self.chunks]
        self.marks: dict[Master, Mark] = {}
        self.made: dict[int, tuple[ForwardRequest, replay.Kept]] = {}
        self.graphs = [Graph() if self.ambient.grad else None for _ in self.chunks]
        self.handle = Handle([graph for graph in self.graphs if graph is not None])
        self.posts: dict[Master, Post | None] = {}
        self.token = None
        self.ways = {master: self._way(master) for master in self.masters}
        jobs = [
            Job(
                c.seat, "forward", functools.partial(self._request, i), c.master.id, self.graphs[i], (),
                c.rows, self._listener(c.master) if self.ways[c.master] is not None else None,
            )
            for i, c in enumerate(self.chunks)
        ]  # fmt: skip
        try:
            return self.executor.run(jobs, self._meanwhile)
        except BaseException:
            for post in self.posts.values():
                if post is not None:
                    post.abandon()
            raise

    def _way(self, master: Master) -> Route | None:
        """The way for a model's new contents from replica to replica, if there is to be one."""
        seats = [chunk.seat for chunk in self.chunks if chunk.master is master]
        return route(self.executor.groups, seats, size_of(master, master.module)) if len(seats) > 1 else None

    def _post(self, master: Master) -> Post | None:
        chunks = {number: chunk.seat for number, chunk in enumerate(self.chunks) if chunk.master is master}
        return post(self.executor.groups, self.ways[master], master, chunks)

    def _listener(self, master: Master) -> Callable[[Reply | None], None]:
        """Who is to hear at once what became of a chunk, for replicas wait for each other."""

        def heard(reply: Reply | None) -> None:
            post = self.posts.get(master)
            if post is not None:
                post.heard(reply)

        return heard

    def _request(self, number: int, seat: Seat, mail: Mail) -> ForwardRequest:
        """The message for one chunk. The executor's lock is held, for other threads may send the same modules.

        If a replica dies, this is asked again, for another one.
        """
        if not self.marks:
            for master in self.masters:
                master.sync()
                self.executor.books.changed(master.why())
            self.marks = {master: master.mark() for master in self.masters}
            self.doubts = {master: master.doubtful() for master in self.masters}
            self.posts = {master: self._post(master) for master in self.masters}
        chunk, graph = self.chunks[number], self.graphs[number]
        value, root = (Arguments(chunk.args, chunk.kwargs), "") if chunk.kwargs else (chunk.args, "inputs")
        grad = self.ambient.grad
        parcel, tensors = codec.encode(value, mail, root, requires_grad=grad)
        self.inputs[number] = [t for t in tensors if t.requires_grad] if grad else []
        name = seat.name_of(chunk.master.id, chunk.seat)
        update, relay = self._update(number, seat, name, mail)
        request = ForwardRequest(
            model=name,
            update=update,
            graph=graph.key if graph is not None else None,
            chunk=number,
            where=chunk.where,
            inputs=parcel,
            context=self.ambient,
            seed=self.seed,
            threads=self.threads,
            write_back=number == 0,
            capture=self.capture.names if self.capture is not None else (),
            detach=chunk.detach,
            alone=chunk.alone,
            doubtful=() if chunk.detach else self.doubts[chunk.master],
            forget=seat.forget(),
            overlay=replay.overlay(chunk.master, self.marks[chunk.master], mail),
            relay=relay,
            by_host=devices.is_cpu(chunk.master.device),
        )
        if graph is not None and self.executor.replays:
            self.made[number] = request, replay.keep(parcel, tensors, "arguments")
        return request

    def _update(self, number: int, seat: Seat, name: int, mail: Mail) -> tuple[StateUpdate | None, Relay | None]:
        """What a seat's replica needs of the state, entered in the books."""
        before, master = len(self.sends), self.chunks[number].master
        post = self.posts[master]
        update, relay = (post and post.update(number, seat, name, mail, self.sends.append)) or (None, None)
        if relay is None:
            update = replay.update(master, seat, name, mail, self.sends.append)
        sent = sum(self.sends[before:])
        if update is not None and update.structure is not None and sent > _MUCH:
            log.info("sending %.0f MB of %s to %s", sent / 1e6, type(master.module).__name__, seat)
        self.executor.books.state(seat, master.id, sent, master.size)
        return update, relay

    def _meanwhile(self) -> None:
        self._plan()
        if self.call.leaves and not any(self.doubts.values()):  # else the answers tell which leaves take part
            self.token = bridge.fork(self.call)
        verified = [master.verify() for master in self.masters]
        self.verified = all(verified)

    def _plan(self) -> None:
        """The call's leaves, each once, and which of them each chunk has, in its replica's order."""
        leaves: dict[int, Tensor] = {}
        kinds: list[str] = []
        known: dict[Master, list[int]] = {}
        index: dict[int, int] = {}

        def enter(tensor: Tensor, kind: str) -> int:
            at = index.setdefault(id(tensor), len(leaves))
            if at == len(leaves):
                leaves[at] = tensor
                kinds.append(kind)
            return at

        self.owned: list[list[int]] = []
        self.own: list[int] = []
        for chunk, inputs in zip(self.chunks, self.inputs, strict=True):
            model = chunk.master if self.ambient.grad and not chunk.detach else None
            if model is not None and model not in known:
                known[model] = [enter(leaf.tensor, leaf.kind) for leaf in model.leaves()]
            own = known[model] if model is not None else []
            self.own.append(len(own))
            self.owned.append([*own, *[enter(tensor, "input") for tensor in inputs]])
        self.call.leaves, self.call.kinds = [*leaves.values()], kinds

    def _leave_out_unreached(self, answers: Sequence[Answer]) -> None:
        """Torch must not walk on into the graph of a doubtful leaf that no chunk used: it may be gone."""
        if not any(self.doubts.values()):
            return
        asked = {self.owned[i][k] for i, c in enumerate(self.chunks) if not c.detach for k in self.doubts[c.master]}
        reached = {row[k] for row, answer in zip(self.owned, answers, strict=True) for k in answer.reply.reached}
        for at in asked - reached:
            self.call.leaves[at] = self.call.leaves[at].detach()

    def _note_parts(self) -> None:
        marks = {master: (master.versions(), master.mark()) for master in self.masters}
        for i, (chunk, graph) in enumerate(zip(self.chunks, self.graphs, strict=True)):
            part = None
            if graph is not None:
                mark, after = marks[chunk.master]
                if i in self.made:
                    before_and_after = self.marks[chunk.master], after
                    graph.recipe = replay.forward(*self.made[i], chunk.master, chunk.seat, before_and_after)
                part = Part(chunk.seat, graph, chunk.master, mark, self.owned[i], i == 0, self.own[i])
            self.call.parts.append(part)

    def _outputs(self, answers: Sequence[Answer]) -> list[Any]:
        unpacked = [
            codec.unpack(a.reply.value, a.mail, c.master.device) if a.reply.value else []
            for c, a in zip(self.chunks, answers, strict=True)
        ]
        if self.token is not None:
            joined = self.joins and not batch.any_registered() and codec.in_rows([a.reply.value for a in answers])
            bridge.graft(self.call, self.token, self.handle, unpacked, joined)
        else:
            for tensor in itertools.chain.from_iterable(unpacked):
                tensor.requires_grad_(False)
        values = [codec.load(a.reply.value, row) for a, row in zip(answers, unpacked, strict=True) if a.reply.value]
        if self.capture is not None:
            self.capture.parts = [value.captured for value in values]
        for chunk, value in zip(self.chunks, values, strict=True):
            if isinstance(value, Produced):
                chunk.master.rebind(value.rebound)
        return [value.output if isinstance(value, Produced) else value for value in values]
