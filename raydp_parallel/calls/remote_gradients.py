"""Gradients that lie in the replicas until they are used.

[Note: what a remote gradient is]
`RemoteGradient` stands in for the gradient of a parameter of the master. Its value is a sum of
terms, each of which is one backward's sum over chunks, kept by the replicas; adding another one, as
torch does in an accumulated backward, adds a term. A step names the terms, and no value travels.
Any other use of it fetches the value, computed as torch would have: the terms are added in order.
A value that was changed travels with the step. What may have been changed is found by its version,
and by any way to its memory that was given away.

[Note: two kinds of terms]
A `GradientSum` is kept by each replica as a whole, so a step can name it. `HeldGradients`, which
`DataParallel.no_sync` leaves behind, are the parts of the chunks: a step gets their sum as a value.

[Note: terms that a backward takes along]
The replicas add a backward's gradients to what they hold, so what torch then adds to ``.grad``
includes what ``.grad`` stands for already. Between the two anything may happen: a hook raises an
exception, another thread adds or looks. So the terms are lent (`Loan`), and it is the addition to
this parameter in this pass of torch's engine that takes their place. Whatever looks before, or
after a pass that ended without it, finds the terms as they were.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from raydp_parallel.cluster.replica_slots import ReplicaSlot, when_freed
from raydp_parallel.devices.ranges import Attachment
from raydp_parallel.errors import StateChanged
from raydp_parallel.transport.messages import GradientTerms

log = logging.getLogger("raydp_parallel")

_aten = torch.ops.aten
_DONE: Any = object()
"""The result of an operation that gives none, and needs no values."""


@contextlib.contextmanager
def ordinarily() -> Iterator[None]:
    """Make ordinary tensors in the block, without a graph, whatever mode the program is in: they
    are used outside of it, too.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class SharedGradients(NamedTuple):
    """Gradients of chunks that lie where all replicas can read them.

    Attributes:
        layout: See `TrainingSum`.
        packets: The packet of each chunk.
    """

    layout: bytes
    packets: Sequence[Attachment]


class SummedRows(Protocol):
    """Gradients in replicas, summed over chunks, by row."""

    def row(self, number: int) -> Tensor:
        """The gradient of a row."""
        ...


class GradientSum:
    """The gradients of one backward, summed over chunks, which replicas keep under a key.

    Args:
        key: The key.
        slots: The slots of these replicas.
        fetch: Fetches the gradients of all rows.
        shared: The summands, if the replicas are yet to add them up.

    Attributes:
        key: The key.
        shared: See above.
        entered: Whether the replicas are told, or were, to add them up.
    """

    def __init__(
        self,
        key: int,
        slots: Sequence[ReplicaSlot],
        fetch: Callable[[GradientSum], Sequence[Tensor]],
        shared: SharedGradients | None = None,
    ) -> None:
        self.key = key
        self.shared = shared
        self.entered = False
        self._holders = {slot: slot.incarnation for slot in slots}
        self._fetch = fetch
        self._found: Sequence[Tensor] | None = None
        when_freed(self, functools.partial(_drop_sum, key, self._holders))

    def on(self, slot: ReplicaSlot) -> bool:
        """Whether the replica in a slot has it."""
        return slot.ready and self._holders.get(slot) == slot.incarnation

    def lose(self, slot: ReplicaSlot) -> None:
        """Note that the replica in a slot may not have it."""
        self._holders.pop(slot, None)

    def slots(self) -> list[ReplicaSlot]:
        """The slots with replicas that have it."""
        return [slot for slot in self._holders if self.on(slot)]

    def row(self, number: int) -> Tensor:
        """The gradient of a row."""
        if self._found is None:
            with ordinarily():
                self._found = self._fetch(self)
        return self._found[number]


def _drop_sum(key: int, holders: Mapping[ReplicaSlot, int]) -> None:
    for slot, incarnation in holders.items():
        slot.drop_graph(key, incarnation)


class Term(NamedTuple):
    """One summand of a gradient.

    Attributes:
        sums: The sums that it is one of.
        row: Which of them it is.
    """

    sums: SummedRows
    row: int


def changed_within() -> StateChanged:
    """The error if a gradient is no longer what a backward took along."""
    return StateChanged(
        "backward: a gradient that no_sync() accumulated was changed while a backward ran that "
        "added to it, so that it is wrong now; set the gradients to zero, and accumulate again"
    )


class LocalRow:
    """A gradient of this process among those in replicas.

    Args:
        value: The gradient, in memory of its own.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def row(self, number: int) -> Tensor:
        """The gradient."""
        return self._value


class Loan:
    """Terms that a running backward takes along, so that what it brings includes them.

    Args:
        task: Torch's number of its pass.
        end: What torch calls at the end of the pass, and has no longer than that.
        again: Gives the terms back, once the replicas have answered.

    Attributes:
        back: The terms, if they were given back.
        repaid: Whether what the backward brought has taken their place.
    """

    def __init__(
        self, task: int, end: Callable[[], None], again: Callable[[Loan], Sequence[Term]]
    ) -> None:
        self.back: tuple[Term, ...] | None = None
        self.repaid = False
        self._task = task
        self._end = weakref.ref(end)
        self._again = again

    @property
    def runs(self) -> bool:
        """Whether the pass may still bring something."""
        return not self.repaid and self._end() is not None

    def give_back(self) -> Sequence[Term]:
        """The terms, which something uses before the pass brings them, or in place of that."""
        self.back = tuple(self._again(self))
        return self.back

    def brought(self, to: Tensor) -> bool:
        """Whether what is being added to a gradient is what the pass brings."""
        if torch._C._current_graph_task_id() != self._task:
            return False
        variable = getattr(torch._C._current_autograd_node(), "variable", None)
        return variable is not None and variable.grad is to


class GradientState:
    """What a remote gradient, and all that show the same memory, have in common.

    Args:
        terms: Its summands.
        zeros: Whether they are added to zeros: ``x + 0`` has other bits than ``x`` where x is -0.
        blank: Memory without contents, of a tensor that is filled next; None if there are any.
        base: What the terms are added to in place, in memory of this process; None for nothing.

    Attributes:
        lock: Held while its terms change, or their sum is made. Torch keeps additions apart, but
            not `lend`.
        loan: What a backward takes along of its terms; None if that is nothing.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        zeros: bool = False,
        blank: Callable[[], Tensor] | None = None,
        base: Tensor | None = None,
    ) -> None:
        self._terms = tuple(terms)
        self.zeros = zeros
        self.blank = blank
        self.base = base
        self.lock = threading.RLock()
        self.loan: Loan | None = None
        self._value: Tensor | None = None
        self._version = 0
        self._given_away = False

    @property
    def terms(self) -> tuple[Term, ...]:
        """Its summands."""
        loan = self.loan
        if loan is not None:
            with self.lock:
                if self.loan is loan and loan.back is None:
                    self._terms = (*loan.give_back(), *self._terms)
                    self._value = None
                if self.loan is loan and not loan.runs:
                    self.loan = None
        return self._terms

    @property
    def count(self) -> int:
        """How many summands it has that are not lent."""
        return len(self._terms)

    @property
    def empty(self) -> bool:
        """Whether it is the sum of nothing, to which nothing need be added."""
        there = self._terms or self.zeros or self.blank is not None or self.base is not None
        return not there and self._value is None and not self._given_away

    def lend(self, loan: Loan) -> None:
        """Note that a backward takes all terms along."""
        with self.lock:
            self._terms, self._value, self.loan = (), None, loan

    def repay(self) -> None:
        """Note that what the backward brought is about to be added, which includes what it took
        along.

        Raises:
            StateChanged: That was changed meanwhile.
        """
        loan, self.loan = self.loan, None
        assert loan is not None
        loan.repaid = True
        if loan.back is None:
            return
        count = len(loan.back)
        if not self.untouched_terms or self._terms[:count] != loan.back:
            raise changed_within()
        self._terms, self._value = self._terms[count:], None

    def value(self, like: Tensor) -> Tensor:
        """The gradient itself, in memory of this process."""
        with self.lock:
            if self._value is None or self.loan is not None:
                _ = self.terms  # what was lent is part of it
            if self._value is None:
                with ordinarily():
                    value = self._made(like)
                self._value, self._version = value, value._version
            return self._value

    def _made(self, like: Tensor) -> Tensor:
        # All that may fail comes first: adding twice would be wrong.
        rows = [term.sums.row(term.row).to(like.device) for term in self.terms]
        if self.base is not None:
            value, self._terms = self.base, ()
        elif self.blank is not None:
            value = self.blank()
            self._given_away = True
        elif self.zeros or not rows:
            value = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            value = value.as_strided(like.shape, like.stride()) if value.numel() else value
        else:
            value = torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device
            )
            value.copy_(rows.pop(0))
        for row in rows:
            value.add_(row)
        return value

    @property
    def untouched(self) -> bool:
        """Whether it is still the sum of its terms."""
        return self.base is None and self.untouched_terms

    @property
    def untouched_terms(self) -> bool:
        """Whether it is, but for what they are added to, which lies in memory of its own."""
        if self.base is not None:
            return True
        if self.blank is not None or self._given_away:
            return False
        return self._value is None or self._value._version == self._version

    def replace(self, value: Tensor) -> None:
        """Take other contents, which are not the sum of any terms."""
        self._terms, self.zeros, self.blank, self.base = (), False, None, None
        self._value, self._version, self._given_away = value, value._version, True
        self.loan = None

    def settle(self) -> tuple[Term, ...]:
        """If this process has the value already, add other terms to that from now on. Returns the
        terms.
        """
        _ = self.terms  # those of a backward that brought nothing
        if self._value is not None:
            self._terms, self.zeros, self.blank, self.base = (), False, None, self._value
        return self._terms

    def give_away(self) -> None:
        """Note that other code can change it unnoticed."""
        self._given_away = True

    def add(self, other: GradientState) -> None:
        """Add a gradient that is one term."""
        self.put(other.terms)

    def put(self, terms: Sequence[Term]) -> None:
        """Add some terms."""
        with self.lock:
            self._terms += tuple(terms)
            self._value = None

    def become(self, terms: Sequence[Term], zeros: bool) -> None:
        """Take over another gradient."""
        with self.lock:
            self._terms, self.zeros, self.blank, self.base = tuple(terms), zeros, None, None
            self._value, self._given_away, self.loan = None, False, None

    def forget_terms(self) -> Tensor | None:
        """Let go of what is added to memory of this process, because that is overwritten; returns
        the memory, None if there is none.
        """
        with self.lock:
            if self.base is not None:
                self._terms, self._value, self.loan = (), None, None
            return self.base

    @property
    def has_value(self) -> bool:
        """Whether this process has its value already."""
        return self._value is not None

    def settled(self, like: Tensor) -> Tensor | None:
        """The gradient itself, if this process has all of it and no backward takes any of it along;
        the memory is that of this state from now on, so that what is added to either is added to
        both. The caller holds the lock.
        """
        if self.loan is not None and self.loan.runs:
            return None
        if any(not isinstance(term.sums, LocalRow) for term in self.terms):
            return None
        value = self.value(like)
        self.replace(value)
        return value

    def message(self) -> GradientTerms:
        """What a step says of it."""
        terms = [(one.sums.key, one.row) for one in self.terms if isinstance(one.sums, GradientSum)]
        return GradientTerms(self.zeros, tuple(terms))


class RemoteGradient(torch.Tensor):
    """A gradient that lies in the replicas. Use it as any tensor.

    Args:
        like: A tensor of its shape, strides, dtype and device.
        state: What it shares with tensors that show the same memory.
    """

    state: GradientState

    @staticmethod
    def __new__(cls, like: Tensor, state: GradientState) -> RemoteGradient:
        """A tensor without memory of its own."""
        if isinstance(like, RemoteGradient):
            strides = like.stride()
        else:
            strides = torch.empty_like(like, device="meta").stride()
        made: RemoteGradient = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=strides, dtype=like.dtype, device=like.device
        )
        made.state = state
        # An error, and no crash, for code that asks torch itself for the address.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    # What it computes, it computes by its operations below.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def fetched(self) -> Tensor:
        """The gradient itself, because something uses it."""
        if any(isinstance(term.sums, GradientSum) for term in self.state.terms):
            _say_once()
        return self.state.value(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's names no class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation: lazily where it is known, else with the fetched values."""
        kwargs = kwargs or {}
        lazy = _LAZY.get(func)
        if lazy is not None and (made := lazy(args, kwargs)) is not None:
            return None if made is _DONE else made
        found = [one for one in tree_leaves((args, kwargs)) if isinstance(one, RemoteGradient)]
        out = func(*tree_map(_fetched, args), **tree_map(_fetched, kwargs))
        aliased = [one for one in func._schema.returns if one.alias_info is not None]
        if func._schema.is_mutable or aliased:
            for one in found:
                one.state.give_away()  # it was written to, or a view of its memory was given
        if aliased and all(one.alias_info.is_write for one in aliased) and isinstance(out, Tensor):
            return next((one for one in found if one.state.value(one) is out), out)
        return out

    @property
    def data(self) -> Tensor:
        """The same gradient."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape:
            raise RuntimeError(
                f"grad.data: expected a tensor of shape {tuple(self.shape)}; assign to .grad "
                "instead"
            )
        found = local(value.detach())
        if value.dtype != self.dtype or value.device != self.device:
            # As `Module.double` does: it has set the parameter's data already.
            made = RemoteGradient(found, self.state)
            Tensor.data.__set__(self, made)  # type: ignore[attr-defined]  # no stub has it
        self.state.replace(found)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's takes contents
        return repr(self._open())

    def _open(self) -> Tensor:
        """The gradient, for code that gets at its memory."""
        value = self.fetched()
        self.state.give_away()
        return value

    def _shown(self) -> Tensor:
        """A view of it for something that keeps that: it counts as a user of the memory."""
        return self._open()[...]

    def numpy(self, **how: Any) -> Any:
        """Its values as an array."""
        return self._shown().numpy(**how)

    def __array__(self, *how: Any, **more: Any) -> Any:
        return self._shown().__array__(*how, **more)

    def tolist(self) -> Any:
        """Its values as lists."""
        return self._open().tolist()

    def data_ptr(self) -> int:
        """The address of its values."""
        return self._open().data_ptr()

    def untyped_storage(self) -> Any:
        """The memory of its values."""
        return self._open().untyped_storage()

    def __dlpack__(self, *how: Any, **more: Any) -> Any:
        return self._shown().__dlpack__(*how, **more)

    def apply_(self, function: Any) -> Tensor:
        """Replace each of its values by what a function gives for it."""
        self._open().apply_(function)
        return self

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.fetched().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.fetched().clone().__reduce_ex__(protocol)


@functools.cache
def _say_once() -> None:
    """Warn once per process: training goes on, slower than it could."""
    log.warning(
        "gradients that lie in the replicas are used in this process, so they are fetched, which "
        "takes time in each step. Of the optimizer's own methods clip_grad_norm_(), "
        "clip_grad_value_() and grad_norm() run in the replicas. This is said once"
    )


def _fetched(one: Any) -> Any:
    """The value of a remote gradient, and all else as it is."""
    return one.fetched() if isinstance(one, RemoteGradient) else one


def lies_remote(grad: Any) -> bool:
    """Whether a gradient lies in the replicas, as it was summed there, so that steps can name
    it.
    """
    return _lies(grad) and all(isinstance(one.sums, GradientSum) for one in grad.state.terms)


def _lies(grad: Any) -> bool:
    """Whether a gradient is the sum of terms that nothing has fetched and changed."""
    return isinstance(grad, RemoteGradient) and grad.state.untouched


def local(grad: Tensor) -> Tensor:
    """A gradient in memory of this process."""
    return grad.state.value(grad) if isinstance(grad, RemoteGradient) else grad


def fetch_gradients(parameters: Iterable[Tensor]) -> None:
    """Give parameters gradients in memory of this process, because their dtype is to change."""
    for parameter in parameters:
        if isinstance(parameter.grad, RemoteGradient):
            parameter.grad = local(parameter.grad)


def _detach(args: Any, _kwargs: Any) -> Tensor:
    return RemoteGradient(args[0], args[0].state)


def _clone(args: Any, kwargs: Any) -> Tensor | None:
    if not _lies(args[0]) or kwargs.get("memory_format") not in (None, torch.preserve_format):
        return None
    return RemoteGradient(args[0], GradientState(args[0].state.terms, args[0].state.zeros))


def _addable(args: Any, kwargs: Any) -> bool:
    """Whether a sum of two gradients is that of their terms, in order."""
    one, other = args[0], args[1]
    based = isinstance(one, RemoteGradient) and one.state.base is not None
    both = (based or _lies(one)) and _lies(other) and one.shape == other.shape
    return bool(
        both
        and kwargs.get("alpha", 1) == 1
        and one.dtype == other.dtype
        and ((len(other.state.terms) == 1 and not other.state.zeros) or _adds_nothing(one, other))
    )


def _adds_nothing(one: Any, other: Any) -> bool:
    """Whether zeros are added to what began as zeros, and has no -0 therefore."""
    return bool(one.state.zeros and other.state.zeros and not other.state.terms)


def _add_in_place(args: Any, kwargs: Any) -> Tensor | None:
    one, other = args[0], args[1]
    if not isinstance(one, RemoteGradient):
        return None
    state = one.state
    with state.lock:  # to the end: a backward of another thread could take it along in between
        brought = state.loan is not None and state.loan.brought(one)
        if brought:
            state.repay()
        if _addable(args, kwargs):
            state.add(other.state)
            return one
        if type(other) is Tensor and _alike(one, other) and not kwargs:
            if brought and state.empty:
                state.replace(other.detach().clone())
                return one
            if (state.loan is not None or (brought and state.count)) and state.untouched_terms:
                # Two backwards at once: what was lent stays lent, what lies elsewhere stays there.
                state.put([Term(LocalRow(other.detach().clone()), 0)])
                return one
        one.fetched().add_(_fetched(other), **kwargs)
        state.give_away()
    return one


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether one can take the contents of the other as they are."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and one.device == other.device
        and other.layout is torch.strided
    )


def _add(args: Any, kwargs: Any) -> Tensor | None:
    if not _addable(args, kwargs) or args[0].state.base is not None:
        return None
    one, other = args[0].state, args[1].state
    return RemoteGradient(args[0], GradientState((*one.terms, *other.terms), one.zeros))


def _zero(args: Any, _kwargs: Any) -> Tensor | None:
    one = args[0]
    if _lies(one):
        one.state.become((), zeros=True)
        return one  # type: ignore[no-any-return]
    base = one.state.forget_terms() if isinstance(one, RemoteGradient) else None
    if base is None:
        return None
    base.zero_()
    return one  # type: ignore[no-any-return]


def _zero_each(args: Any, _kwargs: Any) -> Any:
    for one in args[0]:
        if _zero((one,), {}) is None:
            one.zero_()
    return _DONE


def _new_blank(args: Any, kwargs: Any) -> Tensor | None:
    """Torch copies a gradient into new memory where it may not keep the tensor itself."""
    one, size, stride, *others = args
    strange = {name for name, value in kwargs.items() if value is not None} - {"layout"}
    if others or tuple(size) != tuple(one.shape) or not strange <= {"dtype", "device"}:
        return None
    if kwargs.get("dtype") not in (None, one.dtype) or kwargs.get("device") not in (
        None,
        one.device,
    ):
        return None
    if tuple(stride) != tuple(one.stride()):
        return None

    def blank() -> Tensor:
        return torch.empty_strided(size, stride, dtype=one.dtype, device=one.device)

    return RemoteGradient(one, GradientState((), blank=blank))


def _copy(args: Any, _kwargs: Any) -> Tensor | None:
    one, other = args[0], args[1]
    if not isinstance(one, RemoteGradient):
        return None
    if not _lies(other):
        return _overwrite(one, _fetched(other))
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return None
    if one.state.blank is None and not one.state.untouched:
        return None
    one.state.become(other.state.terms, other.state.zeros)
    return one


def _overwrite(one: RemoteGradient, other: Tensor) -> Tensor | None:
    """What is overwritten is not fetched: it may be lost, and this is a way out."""
    state = one.state
    base = state.forget_terms()
    if base is not None:
        base.copy_(other)
        return one
    if not state.untouched or state.has_value:
        return None
    found = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device)
    state.replace(found.copy_(other))
    return one


_LAZY: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.detach.default: _detach,
    _aten.clone.default: _clone,
    _aten.add_.Tensor: _add_in_place,
    _aten.add.Tensor: _add,
    _aten.zero_.default: _zero,
    _aten._foreach_zero_.default: _zero_each,
    _aten.new_empty_strided.default: _new_blank,
    _aten.copy_.default: _copy,
}
"""Operations that need no values."""
