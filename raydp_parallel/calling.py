"""One forward over some chunks: what `parallel_apply` and a single remote replica have in common."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydp_parallel import bridge, codec, context
from raydp_parallel.executor import Answer, Executor, Job, Seat, new_graph_key
from raydp_parallel.links import Mail
from raydp_parallel.messages import Arguments, ForwardRequest, Parcel, Produced
from raydp_parallel.options import UnusedGrads
from raydp_parallel.snapshot.master import Master, Update

_ATTEMPTS = 3
"""How often a forward is run while somebody writes to the weights behind their versions. A thread that never stops doing
so gets, like any race, one of the possible results."""


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
    """

    seat: Seat
    master: Master
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str | None
    rows: int = 0
    detach: bool = False


class Capture:
    """Asks for outputs of submodules, and takes them.

    Args:
        names: The submodules.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.parts: list[dict[str, list[Any]]] = []


capturing: ContextVar[Capture | None] = ContextVar("raydp_parallel_capturing", default=None)


class _Sent(NamedTuple):
    """A chunk whose arguments are packed.

    Attributes:
        chunk: The chunk.
        inputs: The parcel of its arguments.
        mail: The arguments' packets.
        leaves: The arguments that require a gradient.
    """

    chunk: Chunk
    inputs: Parcel
    mail: Mail
    leaves: list[Tensor]


def run(executor: Executor, chunks: Sequence[Chunk], unused: UnusedGrads) -> list[Any]:
    """Run every chunk, and make the outputs part of torch's graph."""
    masters = list(dict.fromkeys(chunk.master for chunk in chunks))
    for master in masters:
        master.sync()
    grad = torch.is_grad_enabled()
    sent = [_pack(executor, chunk, grad) for chunk in chunks]
    call, owned = _plan(executor, sent, unused, grad)
    doubtful = [_doubtful(call, row) for row in owned]
    keys, handle, answers = _run(executor, sent, doubtful, masters, bool(call.leaves))
    _leave_out_unreached(call, owned, doubtful, answers)
    token = bridge.fork(call) if call.leaves else None
    marks = {master: master.versions() for master in masters}
    bridge.finish([(c.seat, c.master if i == 0 else None, a) for i, (c, a) in enumerate(zip(chunks, answers, strict=True))])
    for i, (chunk, answer, leaves) in enumerate(zip(chunks, answers, owned, strict=True)):
        chunk.seat.tally.rows += chunk.rows
        key = keys[i]
        call.parts.append(
            bridge.Part(chunk.seat, answer.incarnation, key, chunk.master, marks[chunk.master], leaves, i == 0)
            if key is not None
            else None
        )
    return _outputs(call, token, handle, chunks, answers)


def _pack(executor: Executor, chunk: Chunk, grad: bool) -> _Sent:
    mail = Mail(executor.link)
    value, root = (Arguments(chunk.args, chunk.kwargs), "") if chunk.kwargs else (chunk.args, "inputs")
    parcel, tensors = codec.encode(value, mail, root, requires_grad=grad)
    return _Sent(chunk, parcel, mail, [t for t in tensors if t.requires_grad] if grad else [])


def _plan(
    executor: Executor, sent: Sequence[_Sent], unused: UnusedGrads, grad: bool
) -> tuple[bridge.Call, list[list[int]]]:
    """The call's leaves, each once, and which of them each chunk has, in its replica's order."""
    leaves: list[Tensor] = []
    kinds: list[str] = []
    index: dict[int, int] = {}
    known: dict[tuple[int, bool], list[int]] = {}

    def enter(tensor: Tensor, kind: str) -> int:
        at = index.setdefault(id(tensor), len(leaves))
        if at == len(leaves):
            leaves.append(tensor)
            kinds.append(kind)
        return at

    owned = []
    for chunk, _, _, inputs in sent:
        key = chunk.master.id, chunk.detach
        if grad and key not in known:
            known[key] = [enter(leaf.tensor, leaf.kind) for leaf in chunk.master.leaves()]
        owned.append([*known.get(key, ()), *(enter(tensor, "input") for tensor in inputs)])
    return bridge.Call(executor, leaves, kinds, unused), owned


def _doubtful(call: bridge.Call, owned: Sequence[int]) -> tuple[int, ...]:
    """Plain attributes that were computed in the driver, and that modules like weight_norm's compute anew in forward.

    Where nobody uses them, torch must not walk on into the graph that they come from: it may be gone.
    """
    if "attribute" not in call.kinds:
        return ()
    return tuple(k for k, i in enumerate(owned) if call.kinds[i] == "attribute" and not call.leaves[i].is_leaf)


def _leave_out_unreached(
    call: bridge.Call, owned: Sequence[Sequence[int]], doubtful: Sequence[Sequence[int]], answers: Sequence[Answer]
) -> None:
    asked = {row[k] for row, found in zip(owned, doubtful, strict=True) for k in found}
    reached = {row[k] for row, answer in zip(owned, answers, strict=True) for k in answer.reply.reached}
    for i in asked - reached:
        call.leaves[i] = call.leaves[i].detach()


def _run(
    executor: Executor,
    sent: Sequence[_Sent],
    doubtful: Sequence[tuple[int, ...]],
    masters: Sequence[Master],
    differentiable: bool,
) -> tuple[list[int | None], bridge.Handle, list[Answer]]:
    """Run the chunks; and again, if the contents turn out to be other than they were taken to be."""
    ambient = context.capture()
    seed = int(torch.empty((), dtype=torch.int64).random_().item())
    capture = capturing.get()
    sends: list[Update] = []
    for attempt in range(_ATTEMPTS):
        keys = [new_graph_key() if differentiable else None for _ in sent]
        handle = bridge.Handle(
            [(s.chunk.seat, key, s.chunk.seat.incarnation) for s, key in zip(sent, keys, strict=True) if key is not None]
        )
        jobs = [_job(s, i, keys[i], ambient, seed, capture, doubtful[i], sends) for i, s in enumerate(sent)]
        same: list[bool] = []
        answers = executor.run(jobs, lambda: same.extend([master.verify() for master in masters]))
        _note_held(sent, answers)
        if all(same):
            break
    executor.note_forward(attempt, len(sends), sum(update.sent for update in sends))
    return keys, handle, answers


def _job(
    sent: _Sent,
    number: int,
    key: int | None,
    ambient: Any,
    seed: int,
    capture: Capture | None,
    doubtful: tuple[int, ...],
    sends: list[Update],
) -> Job:
    chunk = sent.chunk

    def prepare(seat: Seat, mail: Mail) -> ForwardRequest:
        mail.beside.extend(sent.mail.beside)
        mail.size += sent.mail.size
        update = chunk.master.update_from(seat.held.get(chunk.master.id, 0))
        seat.held[chunk.master.id] = chunk.master.revision
        message = None
        if update is not None:
            sends.append(update)
            message = update.placed(mail)
        names = capture.names if capture is not None else ()
        return ForwardRequest(
            chunk.master.id, message, key, number, chunk.where, sent.inputs, ambient, seed, number == 0, names,
            doubtful, seat.forget(),
        )  # fmt: skip

    return Job(chunk.seat, "forward", prepare)


def _note_held(sent: Sequence[_Sent], answers: Sequence[Answer]) -> None:
    """A replica that could not adopt its state has none of it: the next call sends everything."""
    for (chunk, *_), answer in zip(sent, answers, strict=True):
        if not answer.reply.revision:
            chunk.seat.held.pop(chunk.master.id, None)


def _outputs(
    call: bridge.Call, token: Tensor | None, handle: bridge.Handle, chunks: Sequence[Chunk], answers: Sequence[Answer]
) -> list[Any]:
    unpacked = [
        codec.unpack(answer.reply.value, answer.mail, chunk.master.device) if answer.reply.value else []
        for chunk, answer in zip(chunks, answers, strict=True)
    ]
    if token is not None:
        live = [[(k, t.requires_grad_(False)) for k, t in enumerate(row) if t.requires_grad] for row in unpacked]
        joined = bridge.join(call, token, handle, live)
        for row, numbered, tensors in zip(unpacked, live, joined, strict=True):
            for (k, _), tensor in zip(numbered, tensors, strict=True):
                row[k] = tensor
    values = [codec.load(a.reply.value, row) for a, row in zip(answers, unpacked, strict=True) if a.reply.value]
    capture = capturing.get()
    if capture is not None:
        capture.parts = [value.captured for value in values]
    return [value.output if isinstance(value, Produced) else value for value in values]
