"""Random numbers that follow from a row's number in the batch, so that they do not depend on how
the batch is split (``Options(rng="per_sample")``, pytorch#70447).

All chunks of a call begin with the same seed. Each random operation draws one number from torch's
generator, the same in all chunks, and then runs once for each row, with a seed that follows from
that number and the row's number in the batch. As the state of torch's generator is all that there
is, a checkpoint that restores it finds the same numbers again.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raydp_parallel import devices

_BITS = (1 << 64) - 1

_RECURRENT = ("aten::_cudnn_rnn", "aten::miopen_rnn")


def _seed(number: int, row: int) -> int:
    """A seed for a row: the mixing of SplitMix64, as torch's generator uses the low bits only."""
    mixed = (number + (row + 1) * 0x9E3779B97F4A7C15) & _BITS
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
    return (mixed ^ (mixed >> 31)) >> 1


class RowRandom(TorchDispatchMode):
    """Runs random operations row by row.

    Where the first dimension is not the chunk's rows, an operation runs once, with a seed that is
    the same for all chunks, and is warned of.

    Args:
        device: The replica's device.
        first: The number of the chunk's first row in the batch.
        rows: How many rows it has.
    """

    def __init__(self, device: torch.device, first: int, rows: int) -> None:
        super().__init__()
        self._device = device
        self._first = first
        self._rows = rows

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags or _settled(func, args, given):
            return func(*args, **given)
        number = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        with devices.random_kept(self._device):
            arguments = _Arguments(func, args, given)
            if not arguments.belongs_to(self._rows):
                devices.reseed(self._device, _seed(number, -1))
                result = func(*args, **given)
                made = [one for one in _tensors(result) if one.numel() > 1]
                if made:
                    self._warn(
                        func, made[0].size(0) if arguments.first is None else arguments.first
                    )
                return result
            found = []
            for row in range(self._rows):
                devices.reseed(self._device, _seed(number, self._first + row))
                found.append(arguments.run(row))
        return arguments.joined(found)

    def _warn(self, func: Any, first: int) -> None:
        warnings.warn(
            f"rng='per_sample': {func} has the first dimension {first} and the chunk {self._rows} "
            "rows, so its random numbers do not follow from the rows' numbers in the batch, and "
            "may depend on the number of chunks",
            stacklevel=3,
        )


class _Arguments:
    """The arguments of a random operation, and those of one row."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._func = func
        self._args = args
        self._kwargs = kwargs
        names = [argument.name for argument in func._schema.arguments]
        self._size = names.index("size") if "size" in names[: len(args)] else None
        tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]
        self._dims = max((tensor.dim() for tensor in tensors), default=0)
        sizes = {tensor.size(0) for tensor in tensors if tensor.dim() == self._dims > 0}
        if self._size is not None:
            sizes.update([*args[self._size]][:1])
        self.first: int | None = max(sizes, default=None)
        self._rows_in_size = self._size is not None and len(args[self._size]) > 0

    def belongs_to(self, rows: int) -> bool:
        """Whether it makes something for each row of the chunk."""
        known = self._dims > 0 or self._rows_in_size
        return rows > 0 and known and self.first == rows and not self._whole

    @property
    def _whole(self) -> bool:
        """Whether its first dimension is not that of rows: a choice among all, and recurrent nets,
        which have tensors of layers besides.
        """
        name = self._func._schema.name
        return (name == "aten::multinomial" and self._dims == 1) or name in _RECURRENT

    def run(self, row: int) -> Any:
        """The operation for one row."""
        args = [self._part(value, row) for value in self._args]
        if self._size is not None:
            args[self._size] = [1, *self._args[self._size][1:]]
        kwargs = {name: self._part(value, row) for name, value in self._kwargs.items()}
        return self._func(*args, **kwargs)

    def _part(self, value: Any, row: int) -> Any:
        if isinstance(value, Tensor) and value.dim() == self._dims > 0 and value.size(0) > 1:
            return value.narrow(0, row, 1)
        return value

    def joined(self, found: Sequence[Any]) -> Any:
        """The operation's result, from those of the rows."""
        if self._func._schema.name.endswith("_"):
            return self._args[0]  # each row was written in place
        if "out" in self._kwargs:
            return self._kwargs["out"]
        if isinstance(found[0], Tensor):
            return _cat(self._func, found)
        return tuple(_cat(self._func, parts) for parts in zip(*found, strict=True))


def _tensors(result: Any) -> list[Tensor]:
    """The tensors of an operation's result."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


def _cat(func: Any, parts: Sequence[Any]) -> Tensor:
    if not all(isinstance(part, Tensor) and part.dim() and part.size(0) == 1 for part in parts):
        raise NotImplementedError(
            f"rng='per_sample': the results of {func} cannot be made row by row; for attention, "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) chooses operations that can"
        )
    return torch.cat([*parts])


def _settled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws nothing from torch's own generator: it was given another one, or
    drops nothing.
    """
    if kwargs.get("generator") is not None or any(isinstance(a, torch.Generator) for a in args):
        return True
    values = {arg.name: value for arg, value in zip(func._schema.arguments, args, strict=False)}
    values.update(kwargs)
    dropped = next((values[name] for name in ("dropout_p", "dropout") if name in values), None)
    return dropped is not None and float(dropped) == 0.0
