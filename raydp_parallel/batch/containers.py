"""What counts as a container, what it holds, and how another one like it is made; and the types
that bring rules of their own for splitting and joining (pytorch#52597).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import operator
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence


class ContainerKind(Enum):
    """How a value is treated."""

    TENSOR = "tensor"
    PACKED = "packed sequence"
    MAPPING = "mapping"
    SEQUENCE = "sequence"
    FIELDS = "dataclass"
    ITERABLE = "iterable"
    NONE = "None"
    LEAF = "leaf"


def kind_of(value: object) -> ContainerKind:
    """The kind of a value; the order matters, since HF's ModelOutput is a dict and a dataclass."""
    if isinstance(value, torch.Tensor):
        return ContainerKind.TENSOR
    # a namedtuple too, but its fields do not split one by one (pytorch#31422)
    if isinstance(value, PackedSequence):
        return ContainerKind.PACKED
    if isinstance(value, (dict, UserDict)):
        return ContainerKind.MAPPING
    if isinstance(value, (list, tuple)):
        return ContainerKind.SEQUENCE
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ContainerKind.FIELDS
    return ContainerKind.NONE if value is None else ContainerKind.LEAF


def is_namedtuple(value: object) -> TypeGuard[Any]:
    """Whether a value's class was made by ``namedtuple``, seen as upstream sees it."""
    return isinstance(value, tuple) and hasattr(value, "_asdict") and hasattr(value, "_fields")


def iterates_over_tensors(value: object) -> bool:
    """Whether a value's class iterates over its parts, as transformers' caches do, and tensors are
    among them.

    Iterators, such as generators, are excluded: they can be iterated over only once.
    """
    if (
        isinstance(value, type)
        or not hasattr(type(value), "__iter__")
        or hasattr(type(value), "__next__")
    ):
        return False
    if isinstance(value, (str, bytes, bytearray, range)):
        return False
    try:
        return any(map(_has_tensor, value))  # type: ignore[call-overload]  # it has `__iter__`
    except Exception:  # what a class of the user's own does when it is iterated over
        return False


def _has_tensor(value: object) -> bool:
    kind = kind_of(value)
    return kind is ContainerKind.TENSOR or any(map(_has_tensor, contents(value, kind).values()))


def contents(value: Any, kind: ContainerKind) -> dict[Any, Any]:
    """What a container holds, by key, by position or by field name; empty for a leaf."""
    if kind is ContainerKind.MAPPING:
        return {key: value[key] for key in value}
    if kind in (ContainerKind.SEQUENCE, ContainerKind.ITERABLE):
        return dict(enumerate(value))
    if kind is ContainerKind.FIELDS:
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def step(kind: ContainerKind, key: Any) -> str:
    """How the path to a part reads: ``[0]``, ``['mask']`` or ``.mask``."""
    return f".{key}" if kind is ContainerKind.FIELDS else f"[{key!r}]"


def mapping_like(like: Any, items: Sequence[tuple[Any, Any]]) -> Any:
    """A mapping of the same class with other items.

    Upstream calls the class with the items. Where that fails or yields another mapping
    (defaultdict, Counter, a constructor of the user's own), a copy is emptied and filled.
    """
    if isinstance(like, UserDict):
        return _user_dict_like(like, items)
    if type(like) is dict:
        return dict(items)
    made = _called_with(like, items) if items else None
    return _refilled(like, items) if made is None else made


def _user_dict_like(like: UserDict[Any, Any], items: Iterable[tuple[Any, Any]]) -> Any:
    made = copy.copy(like)  # transformers' BatchEncoding has attributes beside its data
    made.data = dict(items)
    return made


def _called_with(like: Any, items: Sequence[tuple[Any, Any]]) -> Any:
    try:
        made = type(like)(iter(items))
        return made if list(made) == [key for key, _ in items] else None
    except Exception:  # a constructor of the user's own may fail in any way when it meets our items
        return None


def _refilled(like: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    made = copy.copy(like)
    made.clear()
    for key, part in items:  # not update(): Counter's adds, and HF's ModelOutput forbids it
        made[key] = part
    return made


def sequence_like(like: Any, parts: Sequence[Any]) -> Any:
    """A sequence of the same class with other parts."""
    if is_namedtuple(like):
        return like._make(parts)
    if type(like) in (list, tuple):
        return type(like)(parts)
    if isinstance(like, tuple):
        return _tuple_like(like, parts)
    made = copy.copy(like)  # keeps a deque's maxlen and attributes of a list's subclass
    made.clear()
    made.extend(parts)
    return made


def _tuple_like(like: Any, parts: Sequence[Any]) -> Any:
    try:
        made = type(like)(parts)
        if len(made) == len(parts) and all(map(operator.is_, made, parts)):
            return made
    except Exception:  # as in _called_with
        pass
    made = tuple.__new__(type(like), parts)
    made.__dict__.update(getattr(like, "__dict__", {}))
    return made


def fields_like(like: Any, parts: Iterable[tuple[str, Any]]) -> Any:
    """A dataclass instance with other fields; what is no field stays as it is."""
    made = copy.copy(like)
    for name, part in parts:
        object.__setattr__(made, name, part)  # a frozen one refuses setattr
    return made


def container_like(like: Any, kind: ContainerKind, parts: dict[Any, Any]) -> Any:
    """A container like another with other contents."""
    if kind is ContainerKind.MAPPING:
        return mapping_like(like, list(parts.items()))
    if kind is ContainerKind.FIELDS:
        return fields_like(like, parts.items())
    if kind is ContainerKind.ITERABLE:
        return type(like)([*parts.values()])
    return sequence_like(like, list(parts.values()))


Splitter = Callable[..., Sequence[Any]]
Joiner = Callable[[Sequence[Any], torch.device, int], Any]


@dataclass(frozen=True)
class _Rules:
    """How one class is split and joined.

    Attributes:
        scatter: ``(value, chunks, dim)`` to at most ``chunks`` values.
        gather: ``(values, target_device, dim)`` to one value.
    """

    scatter: Splitter
    gather: Joiner


registered: dict[type, _Rules] = {}
"""The rules of the classes that `register_batch_type` was told."""


class BatchTypeHandle:
    """What `register_batch_type` returns: ends the registration, by `remove` or at the end of a
    ``with``.
    """

    def __init__(self, cls: type, rules: _Rules) -> None:
        self._cls = cls
        self._rules = rules

    def remove(self) -> None:
        """Forget the rules; calling it again does nothing."""
        if registered.get(self._cls) is self._rules:
            del registered[self._cls]

    def __enter__(self) -> BatchTypeHandle:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def register_batch_type(cls: type, *, scatter: Splitter, gather: Joiner) -> BatchTypeHandle:
    """Register how values of a class are split and joined; the rules hold for subclasses too, and
    take precedence over all others.

    A class of your own can have ``__scatter__(self, chunks, dim)`` and a classmethod
    ``__gather__(cls, parts, target_device, dim)`` instead.

    ::

        class Ragged:
            def __init__(self, rows):
                self.rows = rows

        def split(value, chunks, dim, sizes):
            rest = iter(value.rows)
            counts = sizes(len(value.rows))
            return [Ragged([next(rest) for _ in range(count)]) for count in counts]

        def join(values, target_device, dim):
            return Ragged([row for value in values for row in value.rows])

        with register_batch_type(Ragged, scatter=split, gather=join):
            parts = scatter(Ragged([[1], [2, 3], [4]]), ["cpu", "cpu"])
        assert [part.rows for part in parts] == [[[1], [2, 3]], [[4]]]

    Args:
        cls: The class.
        scatter: ``(value, chunks, dim)`` to a sequence of at most ``chunks`` values, in the order
            of the rows. Split as ``torch.chunk`` does, so that the number of chunks agrees with
            that of the other arguments. A rule with a parameter named ``sizes`` is given a function
            from the value's number of rows to the rows of each chunk, and so works with
            ``Options(chunk_weights=...)``, too.
        gather: ``(values, target_device, dim)`` to one value, of what the replicas returned in the
            order of chunks.

    Returns:
        A handle; its ``remove()`` ends the registration, and it works in a ``with`` too.

    Raises:
        ValueError: The class is registered already.
        TypeError: ``cls`` is not a class, or a rule is not callable.
    """
    if not isinstance(cls, type) or not callable(scatter) or not callable(gather):
        raise TypeError(
            f"expected a class and two callables, got {cls!r}, "
            f"scatter={scatter!r}, gather={gather!r}"
        )
    if cls in registered:
        raise ValueError(f"{cls.__qualname__} is registered already: remove() its handle first")
    rules = _Rules(scatter, gather)
    registered[cls] = rules
    return BatchTypeHandle(cls, rules)


def splitter_of(value: object) -> Callable[..., Sequence[Any]] | None:
    """The rule that splits a value, called with ``(chunks, dim)``, and with ``sizes`` if it
    `takes_sizes`; None if its class has none.
    """
    rules = _rules_of(type(value))
    own = getattr(type(value), "__scatter__", None) if rules is None else rules.scatter
    return None if own is None else partial(own, value)


def takes_sizes(rule: Callable[..., Any]) -> bool:
    """Whether a rule that splits has a parameter for the sizes of chunks."""
    try:
        return "sizes" in inspect.signature(rule).parameters
    except (TypeError, ValueError):  # of a builtin
        return False


def joiner_of(value: object) -> Joiner | None:
    """The rule that joins values of this value's class; None if the class has none."""
    rules = _rules_of(type(value))
    return getattr(type(value), "__gather__", None) if rules is None else rules.gather


def _rules_of(cls: type) -> _Rules | None:
    if not registered:  # the common case: do not walk the bases of every leaf
        return None
    return next((registered[base] for base in cls.__mro__ if base in registered), None)
