"""A gradient that lies in the replicas until the program uses it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

_ZERO = torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
_PAST = {
    *(Tensor.__repr__, Tensor.__reduce_ex__, Tensor.__deepcopy__),
    *(Tensor.numpy, Tensor.tolist, Tensor.data_ptr),
}
"""Methods of torch that reach for memory past its dispatcher."""


class RemoteGrad(Tensor):
    """Stands in ``parameter.grad`` for the sum of what the replicas keep. The first operation on it
    fetches that.

    Attributes:
        source: Has the value: its ``fetch`` lets this one, and perhaps others, `arrive`.
        number: The parameter's number there.
        touched: True if the program may have written to the value.
        zeroed: True if it is zero, whatever the replicas keep.
    """

    source: Any
    number: int
    _value: Tensor | None
    touched: bool
    zeroed: bool

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
        self._value, self.touched, self.zeroed = None, False, False

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
        if self._value is None:
            if self.zeroed:
                size, stride, at = self.size(), self.stride(), self.device
                self._value = torch.empty_strided(size, stride, dtype=self.dtype, device=at).zero_()
            else:
                self.source.fetch(self)
        assert self._value is not None
        return self._value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give the value to methods that know no dispatcher."""
        if func in _PAST:
            return func(args[0].value(), *args[1:], **(kwargs or {}))
        return nn.Parameter.__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operation on values."""
        schema = func._schema
        own = [one for one in _pytree.tree_leaves((args, kwargs)) if isinstance(one, RemoteGrad)]
        if func in _ZERO:
            for one in own:
                one._value, one.zeroed = None, True
            for t in _pytree.tree_leaves(args[0]):
                if not isinstance(t, RemoteGrad):
                    t.zero_()
            return args[0] if schema.returns else None

        def value(one: Any) -> Any:
            return one.value() if isinstance(one, RemoteGrad) else one

        found = func(*_pytree.tree_map(value, args), **_pytree.tree_map(value, kwargs or {}))
        if schema.is_mutable or any(one.alias_info is not None for one in schema.returns):
            for one in own:  # or a view, that the program may write to
                one.touched, one.zeroed = True, False
        return args[0] if schema.is_mutable and schema.returns else found
