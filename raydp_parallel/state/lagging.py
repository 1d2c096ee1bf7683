"""Parameters whose values are still in the replicas that train them.

Meanwhile they are of a class of their own, whose ``__torch_function__`` torch calls before it uses
them: that fetches the values of all, which are ordinary parameters again from then on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

Function = Callable[..., object]
Args = tuple[object, ...]
Named = dict[str, object] | None
"""A function of torch's, and its arguments."""

PLAINLY: Any = nn.Parameter.__torch_function__
"""Calls a function so that it sees parameters as ordinary ones, and fetches nothing."""

_PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout", "is_leaf", "requires_grad", "grad", "nbytes"),
    *("is_cpu", "is_cuda", "is_meta", "is_nested", "is_quantized", "is_sparse", "itemsize"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "grad_fn"),
)
_GRAD = inspect.getattr_static(Tensor, "grad")
BLIND = {
    *[getattr(Tensor, name).__get__ for name in _PROPERTIES],
    *(_GRAD.__set__, _GRAD.__delete__),
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.element_size),
}
"""Functions that look at no values: what a training loop uses between steps must fetch nothing."""


class Owner(Protocol):
    """Trains parameters elsewhere, and has their values."""

    def pull(self) -> None:
        """Bring the values: its parameters are ordinary ones from then on."""

    def fetch_departing(self, tags: Collection[int]) -> None:
        """Bring all that it has of parameters that leave."""


class Lagging(nn.Parameter):
    """A parameter that fetches its values when they are used. Each owner has a class of its own.

    Attributes:
        owner: Has the values.
    """

    owner: Owner

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an ordinary parameter, where one is copied."""
        return nn.Parameter(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Iterable[type], args: Args = (), kwargs: Named = None
    ) -> object:
        """Fetch the values, unless a function does not look at them."""
        if func in BLIND:
            return PLAINLY(func, types, args, kwargs or {})
        for kind in types:
            if issubclass(kind, Lagging):
                kind.owner.pull()
        if any([isinstance(one, Lagging) for one in args]):  # it left by `swap_tensors`
            return PLAINLY(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))
