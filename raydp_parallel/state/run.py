"""The contents of a model's tensors as they were last sent, in one run of memory.

Changed contents are copied there once, however many replicas there are: those of this machine map
the run, or copy it from there to their GPU. Later contents are compared with it, too.

[Note: who reads a run]
Replicas read it when they take an update over, which is before their answer. So it may be written
to again once all answers are there: see `Executor.update`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from raydp_parallel.devices import memory
from raydp_parallel.wire.messages import RunSpec
from raydp_parallel.wire.windows import ALIGN, Layout, Window, specs_of

SMALL = 1 << 16
"""Bytes below which tensors are compared by a copy of them all."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Range = tuple[int, int]


def bits(t: Tensor) -> Tensor:
    """Show a plain tensor's bytes, of which NaNs equal themselves."""
    t = t.detach()
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view(_BITS[t.element_size()])


class StateRun:
    """Contents of plain tensors of one device.

    Args:
        key: The revision at which it is laid out.
        tensors: The tensors, by slot.
        before: The contents that replicas have already, by slot: the program may have changed the
            tensor since, which is still to be found.

    Attributes:
        revision: The revision that it has the contents of.
        spec: Its layout, as replicas are told.
        memory: Its bytes, on the tensors' device.
        views: The contents, by slot.
    """

    def __init__(
        self, key: int, tensors: Mapping[int, Tensor], before: Mapping[int, Tensor]
    ) -> None:
        small = [n for n, t in tensors.items() if t.nbytes < SMALL]
        slots = (*small, *[n for n, t in tensors.items() if t.nbytes >= SMALL])
        cuts = (0, len(small)), (len(small), len(slots))
        layout = Layout(specs_of([tensors[n] for n in slots]), cuts=cuts)
        device = next(iter(tensors.values())).device
        self._window: Window | None = None
        if device.type == "cpu":
            self._window = Window(layout.size)
            self.memory = self._window.memory[: layout.size]
        else:
            self.memory = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        self.spec = RunSpec(key, slots, layout.specs, cuts)
        self.views = dict(zip(slots, layout.views(self.memory), strict=True))
        self._begins = dict(zip(slots, layout.offsets, strict=True))
        self._small, self._large = small, slots[len(small) :]
        self._row = layout.rows[0][1]  # of the small ones, with which the run begins
        self._now: list[Tensor] = []
        self._copy = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._late: list[Range] = []  # what the window of a GPU's run lacks
        self.revision = key
        memory.copy_row([*self.views.values()], [before.get(n, tensors[n]) for n in slots])

    def fits(self, tensors: Mapping[int, Tensor]) -> bool:
        """Tell if tensors lie here in the same layout."""
        same = tensors.keys() == self.views.keys()
        return same and specs_of([tensors[n] for n in self.spec.slots]) == [*self.spec.specs]

    def take(self, slots: Iterable[int], tensors: Mapping[int, Tensor], revision: int) -> None:
        """Take over the contents that changed until a revision."""
        chosen = [*slots]
        memory.copy_row([self.views[n] for n in chosen], [tensors[n] for n in chosen])
        self.revision = revision
        if self._window is not None and self.memory.device.type != "cpu":
            self._late += self.ranges(chosen)

    def ranges(self, slots: Iterable[int]) -> list[Range]:
        """Return where the contents of some slots lie, those that adjoin as one."""
        found: list[Range] = []
        for begin, n in sorted([(self._begins[n], n) for n in slots]):
            end = begin + -(-self.views[n].nbytes // ALIGN) * ALIGN
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            if end > begin:
                found.append((begin, end))
        return found

    def window(self) -> Window:
        """Return the run in memory that replicas of this machine share, whose tensors may lie on a
        GPU.
        """
        if self._window is None:
            self._window = Window(self.memory.numel())
            self._late = [(0, self.memory.numel())]
        for begin, end in self._late:
            memory.copy_down(self.memory, self._window, begin, end)
        self._late = []
        return self._window

    def edited(self, tensors: Mapping[int, Tensor]) -> list[int]:
        """Return the slots with other contents than the run has."""
        if self._small and not self._now:
            self._copy = torch.zeros_like(self.memory[: self._row.size])
            self._now = self._row.views(self._copy)
        memory.copy_row(self._now, [tensors[n] for n in self._small])
        words = self._copy.view(torch.int64), self.memory[: self._row.size].view(torch.int64)
        rows = [words, *[(bits(tensors[n]), bits(self.views[n])) for n in self._large]]
        small, *large = _alike(rows)
        found = [n for n, same in zip(self._large, large, strict=True) if not same]
        if not small:
            pairs = zip(self._now, [self.views[n] for n in self._small], strict=True)
            alike = _alike([(bits(now), bits(then)) for now, then in pairs])
            found += [n for n, same in zip(self._small, alike, strict=True) if not same]
        return found


def _alike(rows: list[tuple[Tensor, Tensor]]) -> list[bool]:
    """Compare pairs of tensors of the same shape; the host waits for a GPU once."""
    if rows and rows[0][0].device.type == "cpu":
        return [torch.equal(*row) for row in rows]
    unlike = torch.stack([(one != other).any() for one, other in rows])
    return [not one for one in unlike.tolist()]
