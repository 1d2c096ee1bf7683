"""An optimizer of torch that makes its step slice by slice.

Torch's optimizers for CPUs run through all elements of a parameter once for each operation, so a
large parameter, its gradient and its state come from memory and go back there ten times in a step.
Those that compute each element for itself give the same bits if they get a parameter in slices
that stay in the cache, in a third of the time.

[Note: where the state is]
Each slice is a parameter of its own to an optimizer of the same class. What that keeps of a slice
is, after the first `SlicedOptimizer.join`, a view of what the whole optimizer has of the parameter.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from raydp_parallel import devices
from raydp_parallel.replica.kept_sums import TermSum

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
