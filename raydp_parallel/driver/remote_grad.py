"""A gradient that lies in the replicas until the program uses it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raydp_parallel.batch.containers import mapped
from raydp_parallel.devices.memory import is_used
from raydp_parallel.state.lagging import BLIND, Args, Function, Named
from raydp_parallel.wire.codec import StandIn

_OPERATOR = type(torch.ops.aten.zero_)
_SET_DATA = inspect.getattr_static(Tensor, "data").__set__


@functools.cache
def _is_dispatched(func: Callable[..., object]) -> bool:
    """Tell if a function looks at no memory, or is an operator, which torch's dispatcher sees. All
    others, such as ``numpy`` and ``share_memory_``, may reach for memory that a stand-in lacks.
    """
    return func in BLIND or isinstance(getattr(torch.ops.aten, func.__name__, None), _OPERATOR)


@dataclass(eq=False)
class Stand:
    """Knowledge of the gradient for which a `RemoteGrad` stands. Others watch its end, which torch
    forbids for tensors that are swapped.
    """

    fetch: Fetch  # lets this one, and perhaps others, have the value
    known: Tensor | None = None  # the value, once it was fetched
    touched: bool = False  # the program may have written to the value
    zeroed: bool = False  # it is zero, whatever the replicas keep


Fetch = Callable[[Stand], Tensor]


class RemoteGrad(StandIn):
    """Stands in ``parameter.grad`` for the sum of what the replicas keep. The first operation on it
    fetches that.
    """

    stand: Stand

    def __new__(cls, like: Tensor, fetch: Fetch) -> RemoteGrad:
        """Make one for a parameter."""
        made: RemoteGrad = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.stand = Stand(fetch)
        return made

    def value(self) -> Tensor:
        """Return the value, as an ordinary tensor."""
        stand = self.stand
        if stand.known is None and stand.zeroed:
            plain = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            stand.known = torch.zeros_like(plain, device=self.device)
        return stand.fetch(stand) if stand.known is None else stand.known

    def writable(self) -> Tensor:
        """Return the value in its memory, to keep it and to write there."""
        value = self.value()
        self.stand.touched, self.stand.zeroed = True, False
        return value.detach()

    def _clear(self) -> None:
        """Be zero: in place, where the program has the memory, and sees and writes what comes."""
        known = self.stand.known
        if known is not None and is_used(known):
            known.zero_()
        else:
            self.stand.known, self.stand.zeroed = None, True

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Args = (), kwargs: Named = None
    ) -> object:
        """Give the value to functions that know no dispatcher."""
        if _is_dispatched(func):
            return nn.Parameter.__torch_function__(func, types, args, kwargs or {})
        values, named = mapped((args, kwargs or {}), RemoteGrad, cls.writable)
        found = func(*values, **named)
        if func == _SET_DATA and isinstance(args[0], RemoteGrad):  # also of another dtype
            args[0].stand.known = values[0]
            nn.Parameter.__torch_function__(func, types, (args[0], values[0]))
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: object = None
    ) -> object:
        """Run an operation on values."""
        if func.overloadpacket.__name__.endswith("zero_"):  # also of a row
            row = args[0] if isinstance(args[0], list) else [args[0]]
            for one in row:
                one._clear() if isinstance(one, RemoteGrad) else one.zero_()
            return None if row is args[0] else args[0]
        written = func._schema.is_mutable
        change = cls.writable if written or func.is_view else cls.value
        values, named = mapped((args, kwargs or {}), RemoteGrad, change)
        found = func(*values, **named)
        return args[0] if written and func._schema.returns else found
