"""A gradient that lies in the replicas until the program uses it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from raydp_parallel.state.lagging import BLIND
from raydp_parallel.wire.codec import StandIn

_ZERO = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
_OPERATOR = type(torch.ops.aten.zero_)


@functools.cache
def _is_dispatched(func: Any) -> bool:
    """Tell if a function looks at no memory, or is an operator, which torch's dispatcher sees. All
    others, such as ``numpy`` and ``share_memory_``, may reach for memory that a stand-in lacks.
    """
    return func in BLIND or isinstance(getattr(torch.ops.aten, func.__name__, None), _OPERATOR)


class RemoteGrad(StandIn):
    """Stands in ``parameter.grad`` for the sum of what the replicas keep. The first operation on it
    fetches that.
    """

    source: Any  # has the value: its ``fetch`` lets this one, and perhaps others, `arrive`
    number: int  # the parameter's number there
    _value: Tensor | None
    touched: bool  # the program may have written to the value
    lent: bool  # the program may have its memory, where it sees and writes what comes
    zeroed: bool  # it is zero, whatever the replicas keep

    @staticmethod
    def __new__(cls, like: Tensor, source: Any, number: int) -> RemoteGrad:
        """Make one for a parameter."""
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        made.source, made.number = source, number
        made.renew()
        return made

    def renew(self) -> None:
        """Stand for what the replicas keep from now on."""
        self._value, self.touched, self.lent, self.zeroed = None, False, False, False

    def arrive(self, value: Tensor) -> None:
        """Take the value."""
        self._value = value

    @property
    def fetched(self) -> bool:
        """Tell if the value is here."""
        return self._value is not None or self.zeroed

    @property
    def pristine(self) -> bool:
        """Tell if the replicas have the same."""
        return not (self.touched or self.zeroed)

    def value(self) -> Tensor:
        """Return the value, as an ordinary tensor."""
        if self._value is None and self.zeroed:
            size, stride, at = self.size(), self.stride(), self.device
            self._value = torch.empty_strided(size, stride, dtype=self.dtype, device=at).zero_()
        elif self._value is None:
            self.source.fetch(self)
        assert self._value is not None
        return self._value

    def given(self) -> Tensor:
        """Return the value, to keep it and to write there."""
        value = self.value()
        self.touched, self.lent, self.zeroed = True, True, False
        return value

    def clear(self) -> None:
        """Be zero: where it is lent, in place."""
        if self.lent:
            self.value().zero_()
        else:
            self._value, self.zeroed = None, True

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the value to functions that know no dispatcher."""
        if _is_dispatched(func):
            return nn.Parameter.__torch_function__(func, types, args, kwargs or {})
        args, kwargs = _pytree.tree_map_only(cls, cls.given, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on values."""
        schema = func._schema
        own = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, RemoteGrad)]
        if func in _ZERO:
            for one in own:
                one.clear()
            for t in _pytree.tree_leaves(args[0]):
                if not isinstance(t, RemoteGrad):
                    t.zero_()
            return args[0] if schema.returns else None
        values, named = _pytree.tree_map_only(cls, cls.value, (args, kwargs or {}))
        found = func(*values, **named)
        views = [one.alias_info for one in schema.returns if one.alias_info is not None]
        if schema.is_mutable or views:
            for one in own:
                one.touched, one.zeroed = True, False
                one.lent = one.lent or not all(view.is_write for view in views)
        return args[0] if schema.is_mutable and schema.returns else found
