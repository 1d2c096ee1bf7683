"""The optimizer of one model in a replica, and the parameters that it trains.

It follows the driver's record, entry by entry, each once. So all replicas that have made the same
entries hold the same bits, and a replica that joins later begins with what another one has made.

[Note: sums in memory]
Gradients may lie in memory which several replicas of a machine read: each chunk's where its replica
left them, and each replica adds them up for itself, in the order of chunks. So no replica waits for
another one, and a replica that died has left its gradients behind. The driver keeps that memory
until all replicas have said that they made the step. Nothing is added before it is used: an
optimizer that works slice by slice adds up one slice at a time, which stays in the cache.

[Note: slices]
Torch's optimizers for CPUs run through all elements of a parameter once for each operation, so a
large parameter, its gradient and its state come from memory and go back there ten times in a step.
Those that compute each element for itself give the same bits if they get a parameter in slices
that stay in the cache, in a third of the time.

[Note: where the state is]
Each slice is a parameter of its own to an optimizer of the same class. What that keeps of a slice
is, after the first `SlicedOptimizer.join`, a view of what the whole optimizer has of the parameter.
"""

from __future__ import annotations

import functools
import numbers
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, optim

from raydp_parallel import devices
from raydp_parallel.devices.ranges import MemoryRange
from raydp_parallel.replica import exceptions
from raydp_parallel.state.optimizer_state import options_of, pack_state, put_state
from raydp_parallel.state.replica_module import ReplicaModule
from raydp_parallel.transport import codec
from raydp_parallel.transport.codec import DTYPES
from raydp_parallel.transport.links import Attachments, ReadAttachments
from raydp_parallel.transport.messages import (
    GradientNorm,
    GradientTerms,
    SumRow,
    TrainingClip,
    TrainingHandover,
    TrainingNews,
    TrainingSnapshot,
    TrainingStart,
    TrainingStep,
    TrainingSum,
)


@functools.lru_cache(maxsize=16)
def _rows(layout: bytes) -> tuple[tuple[SumRow, bool], ...]:
    """The rows of a layout, which is the same in each step, and whether each is contiguous."""
    rows = [SumRow(*row) for row in pickle.loads(layout)]
    return tuple([(row, _contiguous(row)) for row in rows])


def _contiguous(row: SumRow) -> bool:
    like = torch.empty(row.shape, device="meta")
    return like.as_strided(row.shape, row.stride).is_contiguous()


class KeptSum(Sequence[Tensor]):
    """The sums of one backward, in the order of its rows.

    Args:
        layout: Pickled `SumRow`s.
        chunks: Where the gradients of each chunk lie. They are read and never written.
    """

    def __init__(self, layout: bytes, chunks: Sequence[MemoryRange]) -> None:
        rows = _rows(layout)
        self._rows = [row for row, _ in rows]
        self._contiguous = [contiguous for _, contiguous in rows]
        self._chunks = [devices.view(chunk) if chunk.size else None for chunk in chunks]
        self._added: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | Sequence[Tensor]:
        """A sum, in memory of this process, which is kept."""
        if isinstance(row, slice):
            return [self[number] for number in range(len(self))[row]]
        if not 0 <= row < len(self):
            raise IndexError(row)
        if row not in self._added:
            spec = self._rows[row]
            flat = torch.empty(spec.size, dtype=DTYPES[spec.dtype], device="cpu")
            self.part(row, 0, spec.size, flat)
            self._added[row] = flat.as_strided(spec.shape, spec.stride)
        return self._added[row]

    def in_a_run(self, row: int) -> bool:
        """Whether a row's elements lie in their own order."""
        return self._contiguous[row]

    def part(self, row: int, begin: int, end: int, into: Tensor) -> None:
        """Add up some elements of a row, in the order in which they lie."""
        spec = self._rows[row]
        if row in self._added:
            kept = self._added[row].as_strided((spec.size,), (1,))
            into.copy_(kept[begin:end])
            return
        first, *others = [self._window(spec, at, begin, end) for at in range(len(spec.places))]
        if not others:
            into.copy_(first)
            return
        torch.add(first, others[0], out=into)
        for other in others[1:]:
            into.add_(other)

    def _window(self, spec: SumRow, number: int, begin: int, end: int) -> Tensor:
        """Some elements of one chunk's gradient, where they lie."""
        chunk, offset = spec.places[number]
        dtype, whole = DTYPES[spec.dtype], self._chunks[chunk]
        assert whole is not None
        item = dtype.itemsize
        return whole[offset + begin * item : offset + end * item].view(dtype)


class TermSum:
    """A gradient that is a sum of terms which the replica keeps. See `GradientTerms`.

    Args:
        found: The terms.
        sums: What the replica keeps, by key.
    """

    def __init__(self, found: GradientTerms, sums: dict[int, Sequence[Tensor | None]]) -> None:
        self._zeros = found.zeros
        self._terms = [(sums[key], row) for key, row in found.terms]

    def whole(self) -> Tensor | None:
        """The gradient; None if it is zeros without any terms."""
        total: Tensor | None = None
        for sums, row in self._terms:
            term = sums[row]
            assert term is not None
            if total is None and len(self._terms) == 1 and not self._zeros:
                return term
            if total is None:
                total = torch.zeros_like(term) if self._zeros else term.clone()
                if not self._zeros:
                    continue
            total.add_(term)
        return total

    @property
    def in_slices(self) -> bool:
        """Whether `part` can be used."""
        return all(
            sums.in_a_run(row) if isinstance(sums, KeptSum) else _is_run(sums[row])
            for sums, row in self._terms
        )

    def part(self, begin: int, end: int, into: Tensor) -> None:
        """Add up some elements, in the order in which they lie."""
        if self._zeros or not self._terms:
            into.zero_()
        spare: Tensor | None = None
        for number, (sums, row) in enumerate(self._terms):
            if number == 0 and not self._zeros:
                _take(sums, row, (begin, end), into)
                continue
            spare = torch.empty_like(into) if spare is None else spare
            _take(sums, row, (begin, end), spare)
            into.add_(spare)


def _take(sums: Sequence[Tensor | None], row: int, run: tuple[int, int], into: Tensor) -> None:
    if isinstance(sums, KeptSum):
        sums.part(row, *run, into)
        return
    term = sums[row]
    assert term is not None
    into.copy_(term.view(-1)[run[0] : run[1]])


def _is_run(term: Tensor | None) -> bool:
    return term is not None and term.layout is torch.strided and term.is_contiguous()


_ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
"""Classes that compute each element for itself, and do not write to gradients."""

_OTHERWISE = ("foreach", "fused", "capturable", "differentiable")
"""Options with which they compute in another way."""

SLICE = 1 << 17
"""Elements of a slice."""

_TURN = 4
"""Slices that get their gradients at once: a step costs the host some time, however small."""


class SlicedOptimizer:
    """A step of an optimizer, slice by slice.

    Args:
        whole: The optimizer, over whole parameters. Its state is here until `join`.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self._bases: dict[tuple[Tensor, Any], Tensor] = {}
        self._slices: dict[Tensor, list[Tensor]] = {}
        groups = []
        for group in whole.param_groups:
            for parameter in group["params"]:
                flat = parameter.detach().view(-1) if _is_large(parameter) else None
                parts = [parameter.detach()] if flat is None else [*flat.split(SLICE)]
                self._slices[parameter] = [part.requires_grad_() for part in parts]
            slices = [part for parameter in group["params"] for part in self._slices[parameter]]
            groups.append({**group, "params": slices})
        self._optimizer = type(whole)(groups)
        for parameter, parts in self._slices.items():
            if parameter in whole.state:
                self._split(parameter, parts, whole.state.pop(parameter))
        self._turns = [*self._planned()]
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._slices]

    @property
    def moved(self) -> bool:
        """Whether a parameter lies in other memory than its slices."""
        return self._addresses_now() != self._addresses

    @staticmethod
    def fits(optimizer: Any, grads: Sequence[Any]) -> bool:
        """Whether an optimizer's step with some gradients, `TermSum` or tensors by parameter, can
        be made in slices, and a parameter is large enough.
        """
        if type(optimizer) not in _ELEMENTWISE:
            return False
        groups = optimizer.param_groups
        if any(group.get(option) for group in groups for option in _OTHERWISE):
            return False
        # With others a step may fail halfway, and shall come as far as in the driver's process.
        if not all(_is_plain(group.get(name)) for group in groups for name in optimizer.defaults):
            return False
        parameters = [p for group in groups for p in group["params"]]
        if not any(map(_is_large, parameters)) or len({*parameters}) < len(parameters):
            return False
        return all(map(_fits, parameters, grads))

    def _split(self, parameter: Tensor, parts: Sequence[Tensor], values: dict[Any, Any]) -> None:
        """Give slices their parts of what the optimizer kept of a parameter."""
        for number, part in enumerate(parts):
            self._optimizer.state[part] = {
                name: self._part(parameter, name, value, number) for name, value in values.items()
            }

    def _part(self, parameter: Tensor, name: Any, value: Any, number: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if len(self._slices[parameter]) == 1:
            return value
        if value.shape != parameter.shape:
            return value.clone()  # a count of steps, and the like: each slice counts its own
        self._bases[parameter, name] = value = value.contiguous()
        return value.view(-1)[number * SLICE : (number + 1) * SLICE]

    def join(self) -> None:
        """Give the whole optimizer what is kept of its parameters. Where a parameter's first step
        has failed in between, that is nothing: some of its slices have no state.
        """
        state = self._optimizer.state
        for parameter, parts in self._slices.items():
            kept = [state[part] for part in parts if part in state]
            whole = len(kept) == len(parts) and all(one.keys() == kept[0].keys() for one in kept)
            if whole:
                self._whole.state[parameter] = {
                    name: self._joined(parameter, name, [one[name] for one in kept])
                    for name in kept[0]
                }

    def _joined(self, parameter: Tensor, name: Any, values: list[Any]) -> Any:
        first = values[0]
        parts = self._slices[parameter]
        if len(parts) == 1 or not isinstance(first, Tensor) or first.shape != parts[0].shape:
            return first
        base = self._bases.get((parameter, name))
        if base is not None and all(
            one.data_ptr() == base.data_ptr() + number * SLICE * base.element_size()
            for number, one in enumerate(values)
        ):
            return base
        return torch.cat(values).view(parameter.shape)

    def _planned(self) -> Iterator[list[tuple[int, int, Tensor]]]:
        """What is stepped at once: the numbers of parameters, and of their slices."""
        turn: list[tuple[int, int, Tensor]] = []
        size = 0
        for at, parts in enumerate(self._slices.values()):
            for number, part in enumerate(parts):
                if turn and size + part.numel() > _TURN * SLICE:
                    yield turn
                    turn, size = [], 0
                turn.append((at, number, part))
                size += part.numel()
        if turn:
            yield turn

    def step(self, grads: Sequence[TermSum | Tensor | None]) -> None:
        """Make a step with the gradients of all parameters."""
        groups = self._optimizer.param_groups
        all_slices = [group["params"] for group in groups]
        group_of = {id(part): at for at, parts in enumerate(all_slices) for part in parts}
        for group, whole in zip(groups, self._whole.param_groups, strict=True):
            group.update({name: value for name, value in whole.items() if name != "params"})
        try:
            for turn in self._turns:
                for group in groups:
                    group["params"] = []
                for at, number, part in turn:
                    grad = grads[at]
                    if grad is not None:
                        part.grad = _slice_of(grad, part, number)
                        groups[group_of[id(part)]]["params"].append(part)
                self._optimizer.step()
                for _, _, part in turn:
                    part.grad = None
        finally:
            for group, parts in zip(groups, all_slices, strict=True):
                group["params"] = parts
                for part in parts:
                    part.grad = None


def _slice_of(grad: TermSum | Tensor, part: Tensor, number: int) -> Tensor:
    """The part of a gradient for a slice."""
    begin = number * SLICE
    end = begin + part.numel()
    if isinstance(grad, Tensor):
        return grad.view(-1)[begin:end].view(part.shape)
    found = torch.empty(part.numel(), dtype=part.dtype, device=part.device)
    grad.part(begin, end, found)
    return found.view(part.shape)


def _is_plain(option: Any) -> bool:
    """Whether an option is a number, a tensor or None, or some of these."""
    if isinstance(option, (tuple, list)):
        return all(map(_is_plain, option))
    return option is None or isinstance(option, (numbers.Real, Tensor))


def _is_large(parameter: Tensor) -> bool:
    return parameter.numel() >= 2 * SLICE


def _fits(parameter: Tensor, grad: Any) -> bool:
    plain = (
        devices.is_cpu(parameter.device)
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and not parameter.is_complex()
    )
    if not plain or grad is None:
        return plain
    if isinstance(grad, TermSum):
        return grad.in_slices
    return grad.layout is torch.strided and grad.is_contiguous() and type(grad) is Tensor


class ReplicaTraining:
    """An optimizer, and the parameters that it trains.

    Args:
        device: Their device.
        sums: The gradients that the replica keeps, by key.

    Attributes:
        number: The last entry of the driver's record that was made; 0 before the first.
        failed: The last one that raised an exception, and counts as made; 0 if none did.
    """

    def __init__(self, device: torch.device, sums: dict[int, Sequence[Tensor | None]]) -> None:
        self.number = self.failed = 0
        self._sums = sums
        self._device = device
        self._optimizer: Any = None
        self._sliced: SlicedOptimizer | None = None
        self._slots: Sequence[int] = ()

    def follow(self, replica_module: ReplicaModule, news: TrainingNews | None) -> None:
        """Give the parameters' contents to the tensors that the module has now, if they are
        others: its structure was sent anew.
        """
        if not self.number or (news is not None and news.anew):
            return  # a start follows, with all contents
        now = replica_module.tensors()
        replica_module.own(self._slots)
        for group, at, slot in self._places():
            old, new = group["params"][at], now[slot]
            if new is not old:
                self._join()
                with torch.no_grad():
                    new.copy_(old)
                group["params"][at] = new
                if old in self._optimizer.state:
                    self._optimizer.state[new] = self._optimizer.state.pop(old)
        replica_module.settle()

    def _places(self) -> Iterator[tuple[dict[str, Any], int, int]]:
        """For each parameter its group, its number there, and its slot."""
        slots = iter(self._slots)
        for group in self._optimizer.param_groups:
            for at in range(len(group["params"])):
                yield group, at, next(slots)

    def catch_up(
        self, replica_module: ReplicaModule, news: TrainingNews, attachments: Attachments
    ) -> None:
        """Make the entries that were not made yet.

        One that raises an exception counts as made, as far as it came: in the driver's process a
        step that fails leaves what it had changed, too.
        """
        shared = ReadAttachments(attachments.link, attachments.beside)
        for at, entry in enumerate(news.entries):
            begins = news.anew and at == 0
            if entry.number <= self.number and not begins:
                continue
            if entry.number != self.number + 1 and not begins:
                raise RuntimeError(
                    f"the optimizer of this replica has made {self.number} entries of its record, "
                    f"and was sent number {entry.number}"
                )
            value: Any = None
            try:
                value = entry.value
                if isinstance(value, TrainingSum):
                    chunks = [shared.open(packet) for packet in value.packets]
                    self._sums[value.key] = KeptSum(value.layout, chunks)
                elif isinstance(value, TrainingHandover):
                    value = self._taken_over(value, shared)
                    self._make(value, replica_module)
                else:
                    value, _ = codec.decode(value, shared, self._device)
                    self._make(value, replica_module)
            except BaseException as error:
                if begins:
                    raise
                self.number = self.failed = entry.number
                raise exceptions.OfOptimizer(entry.number, _explained(value)) from error
            finally:
                replica_module.settle()
            self.number = entry.number

    def _taken_over(self, handover: TrainingHandover, attachments: Attachments) -> TrainingStart:
        """A start with what another replica has."""
        start, _ = codec.decode(handover.start, attachments, self._device)
        snapshot = handover.snapshot
        if handover.key is not None:
            (whole,) = self._sums.pop(handover.key)
            assert whole is not None
            snapshot = snapshot._replace(packet=attachments.place(whole.numpy()))
        found, _ = codec.decode(snapshot, attachments, self._device)
        return TrainingStart(start.kind, start.keywords, found[0], start.slots, *found[1:])

    def _make(self, value: Any, replica_module: ReplicaModule) -> None:
        if isinstance(value, TrainingStart):
            self.number = self.failed = 0
            self._begin(value, replica_module)
        elif isinstance(value, TrainingClip):
            self._sums[value.key] = self._clipped(value)
        else:
            self._step(value)

    def _begin(self, start: TrainingStart, replica_module: ReplicaModule) -> None:
        """Make the optimizer, and fill the parameters."""
        now = replica_module.tensors()
        self._slots = [slot for slots in start.slots for slot in slots]
        groups = [
            {**options, "params": [now[slot] for slot in slots]}
            for options, slots in zip(start.options, start.slots, strict=True)
        ]
        self._sliced = None
        self._optimizer = start.kind(groups, **start.keywords)
        for group, options in zip(self._optimizer.param_groups, start.options, strict=True):
            group.update(options)  # a constructor may have set them
        replica_module.own(self._slots)
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), start.weights, strict=True):
                parameter.copy_(value)
        put_state(self._optimizer, start.state, start.common)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _join(self) -> None:
        """Let the optimizer have the state of its parameters as a whole."""
        if self._sliced is not None:
            self._sliced.join()
            self._sliced = None

    def _step(self, step: TrainingStep) -> None:
        for group, options in zip(self._optimizer.param_groups, step.options, strict=True):
            group.update(options)
        parameters = self._parameters()
        terms = [
            TermSum(grad, self._sums) if isinstance(grad, GradientTerms) else grad
            for grad in step.grads
        ]
        if SlicedOptimizer.fits(self._optimizer, terms):
            with torch.inference_mode(False), torch.enable_grad():
                if self._sliced is not None and self._sliced.moved:
                    self._join()
                if self._sliced is None:
                    self._sliced = SlicedOptimizer(self._optimizer)
                try:
                    self._sliced.step(terms)
                except BaseException:
                    self._join()  # so that all slices of a parameter count the same steps
                    raise
            return
        self._join()
        threads = torch.get_num_threads()
        devices.use_threads(self._device, step.threads)
        try:
            for parameter, grad in zip(parameters, terms, strict=True):
                found = grad.whole() if isinstance(grad, TermSum) else grad
                if found is None and grad is not None:
                    found = torch.zeros_like(parameter)
                parameter.grad = found
            with (
                devices.drawing_from(self._device, step.seed),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                self._optimizer.step()
        finally:
            # Backward adds up gradients in the leaves.
            for parameter in parameters:
                parameter.grad = None
            devices.use_threads(self._device, threads)

    def _clipped(self, clip: TrainingClip) -> Sequence[Tensor]:
        """Gradients with a norm, or with values, that are not too large, by parameter."""
        parameters = self._parameters()
        grads = [grad.clone() for grad in self._gradients(clip.grads)]
        chosen = [p for p, one in zip(parameters, clip.grads, strict=True) if one is not None]
        for parameter, grad in zip(chosen, grads, strict=True):
            parameter.grad = grad
        try:
            if clip.value is not None:
                torch.nn.utils.clip_grad_value_(chosen, clip.value)
            elif clip.max_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(chosen, clip.max_norm, clip.norm)
        finally:
            for parameter in chosen:
                parameter.grad = None
        left = iter(grads)
        none = torch.empty(0, device=self._device)
        return [none if one is None else next(left) for one in clip.grads]

    def _gradients(self, found: Sequence[GradientTerms | None]) -> list[Tensor]:
        """The gradients of the parameters that have one."""
        grads = []
        for parameter, one in zip(self._parameters(), found, strict=True):
            if one is not None:
                grad = TermSum(one, self._sums).whole()
                grads.append(torch.zeros_like(parameter) if grad is None else grad)
        return [grad.detach() for grad in grads]

    def answer(self, wanted: str | GradientNorm) -> Any:
        """What a `TrainingRequest` asks for."""
        if isinstance(wanted, GradientNorm):
            threads = torch.get_num_threads()
            devices.use_threads(self._device, wanted.threads)
            try:
                grads = self._gradients(wanted.grads)
                return (torch.nn.utils.get_total_norm(grads, wanted.norm_type),)
            finally:
                devices.use_threads(self._device, threads)
        return self._snapshot()

    def _snapshot(self) -> TrainingSnapshot:
        """The options, the parameters and the optimizer's state of now."""
        self._join()
        weights = tuple([parameter.detach() for parameter in self._parameters()])
        options = options_of(self._optimizer.param_groups)
        return TrainingSnapshot(options, weights, *pack_state(self._optimizer))


def _explained(value: Any) -> str:
    """What to say of an entry of the record that raised an exception."""
    what = f"step {value.number}" if isinstance(value, TrainingStep) else "a change of gradients"
    return (
        f"This is {what} of model.optimizer(), which replicas make with the next call to them. No "
        "earlier step is lost. Weights and state of the optimizer that it had changed before it "
        "failed stay changed, as in the driver's process; model.sync() fetches them"
    )
