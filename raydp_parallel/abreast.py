"""Answers side by side: replicas write what will be joined into one run of the driver's memory.

  replica 0 ──► |  its chunk  |  its chunk  | ◄── replica 1      whoever joins the two has nothing to copy

Where a chunk has to lie depends on how large those before it are. That is guessed: as large as when inputs were last
as large. A replica whose answer is another than was guessed sends it in memory of its own, as it would without a guess.

What was joined keeps all of the memory, with the other tensors of the answer. So tensors that are less than half of it
are joined by a copy: of a loss and logits, who keeps the loss does not keep the logits.

[Note: who may still write]
The memory is lent to the replicas with the call, as other memory is, and used for something else when all of them have
said that they are done with it. Of one that is taken for dead nobody will hear that: then it is used for nothing else.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from raydp_parallel import codec, devices
from raydp_parallel.jobs import Answer
from raydp_parallel.links import Found, Mail, Packet, Slice, aligned
from raydp_parallel.messages import Site, TensorSpec

_MOST = 16
"""So many tensors of an answer are worth the words."""

_KINDS = 16
"""Of so many kinds of call a model's answers are remembered."""

Rows = tuple[tuple[TensorSpec, ...], ...]
"""For each chunk the tensors of its answer."""


class Layout(NamedTuple):
    """Where the tensors of all chunks lie.

    Attributes:
        rows: The tensors, each with where it begins.
        runs: Where each run begins, and its bytes; one for each tensor of an answer.
        size: All bytes.
    """

    rows: Rows
    runs: tuple[tuple[int, int], ...]
    size: int


class Ground:
    """Memory of this process for the answers of one call.

    Args:
        layout: Where they are to lie.
    """

    def __init__(self, layout: Layout) -> None:
        self.packet: Packet | None = None
        self._layout = layout
        self._mail: Mail | None = None
        self._runs: list[devices.Run] = []

    def site(self, number: int, mail: Mail) -> Site | None:
        """What to tell a chunk's replica; None if it cannot reach this process's memory."""
        if self._mail is None:
            self._mail, self.packet = mail, mail.link.lend(self._layout.size)
        if self.packet is None or mail.link is not self._mail.link:
            return None
        return Site(mail.place(self.packet), self._layout.rows[number])

    def read(self, specs: Sequence[TensorSpec]) -> list[Tensor]:
        """The tensors that a replica wrote here, in their places."""
        if not self._runs and self._mail is not None:
            memory = self._mail.link.open(self.packet)
            self._runs = [devices.Run(memory.part(begin, size), memory.size) for begin, size in self._layout.runs]
        starts = [begin for begin, _ in self._layout.runs]
        found = []
        for spec in specs:
            number = max(n for n, begin in enumerate(starts) if begin <= spec.offset)
            local = spec._replace(offset=spec.offset - starts[number])
            found.append(self._runs[number].tensor(local, codec.DTYPES[spec.dtype]))
        return found


_layouts: weakref.WeakKeyDictionary[Any, dict[Hashable, Layout]] = weakref.WeakKeyDictionary()
"""What large answers were, by model and kind of call; the last ones of each model."""


def ground(model: Any, call: Hashable) -> Ground | None:
    """Memory for the answers of a call, if their sizes can be guessed.

    Args:
        model: The model.
        call: What answers' sizes depend on, as far as can be told: they are guessed to be those of the last such call.
    """
    known = _layouts.get(model)
    layout = known.get(call) if known else None
    return Ground(layout) if layout is not None else None


def large(answers: Sequence[Answer]) -> bool:
    """Whether it pays to say where such answers are wanted."""
    lends = answers[0].mail.link.lends
    return lends is not None and sum([answer.reply.size for answer in answers]) >= lends


def note(model: Any, call: Hashable, answers: Sequence[Answer], given: Ground | None) -> None:
    """Open answers, and guess the next ones of such a call by them."""
    if given is not None:
        for answer in answers:
            answer.mail.given = given
    if not large(answers):
        return
    known = _layouts.setdefault(model, {})
    last = known.pop(call, None)
    rows = tuple(answer.reply.value.specs if answer.reply.value is not None else () for answer in answers)
    if last is None or len(rows) != len(last.rows) or not all(map(codec.alike, rows, last.rows)):
        last = _laid(rows) if all(map(_is_shared, answers)) else None
    if last is not None:
        known[call] = last
        for oldest in [*known][:-_KINDS]:
            known.pop(oldest, None)  # unless another thread did


def _is_shared(answer: Answer) -> bool:
    """Whether a replica's memory and this process's are each other's to see."""
    value = answer.reply.value
    packet = answer.mail.find(value.packet) if value is not None else b""
    return isinstance(packet, Slice) or (isinstance(packet, Found) and not packet.on_device)


def _laid(rows: Rows) -> Layout | None:
    """Each tensor of the first chunk, and behind it those of the other chunks; None if they do not fit together."""
    if len(rows) < 2 or not 0 < len(rows[0]) <= _MOST or len({*map(len, rows)}) > 1:
        return None
    begin, runs, columns = 0, [], []
    for column in zip(*rows, strict=True):
        if not all(map(_is_plain, column)) or len({(spec.dtype, spec.shape[1:]) for spec in column}) > 1:
            return None
        column, end = [*column], begin
        for chunk, spec in enumerate(column):
            column[chunk] = spec._replace(offset=end, requires_grad=False)
            end += math.prod(spec.shape) * codec.DTYPES[spec.dtype].itemsize
        runs.append((begin, end - begin))
        columns.append(column)
        begin = aligned(end)
    return Layout(tuple(zip(*columns, strict=True)), tuple(runs), begin)


def _is_plain(spec: TensorSpec) -> bool:
    """Whether it is a tensor of some rows, one behind the other."""
    if spec.layout != "strided" or spec.cls is not None or 0 in spec.shape:
        return False
    expected = [math.prod(spec.shape[at + 1 :]) for at in range(len(spec.shape))]
    return all(
        size == 1 or stride == want for size, stride, want in zip(spec.shape, spec.stride, expected, strict=True)
    )
