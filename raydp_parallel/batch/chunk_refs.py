"""`ChunkRefs`: an argument of which each chunk's part lies in Ray's object store already."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from raydp_parallel.batch.containers import Function, mapped, on_tensors


class _Numbered:
    """Stands in a message for a reference to an object of Ray's; ``ref`` is its number."""

    def __init__(self, ref: int, prepare: Function | None) -> None:
        self.ref, self.prepare = ref, prepare


class ChunkRefs:
    """An argument that does not pass through this process: one `ray.ObjectRef` for each chunk.
    The chunk's replica gets the object from Ray itself.

    ::

        import ray

        refs = [ray.put(part.clone()) for part in x.split(3)]
        out = model(ChunkRefs(refs))

    There are as many chunks as references; all other arguments have to be split into as many. The
    argument is the object as `ray.get` gives it, with its tensors moved to the replica's device;
    they get no gradient. The references are held until no backward needs them.

    Args:
        refs: The references, in the order of chunks.
        prepare: Makes the argument of the object, in the replica: takes a column of a table, or
            makes a tensor of an array.
    """

    def __init__(self, refs: Iterable[object], prepare: Function | None = None) -> None:
        self.refs = tuple(refs)
        self.prepare = prepare
        if not self.refs:
            raise ValueError("ChunkRefs: give one ray.ObjectRef for each chunk, got none")
        for number, ref in enumerate(self.refs):
            if not (hasattr(ref, "task_id") and hasattr(ref, "binary")):
                raise TypeError(
                    f"ChunkRefs: expected a ray.ObjectRef for each chunk, got {type(ref).__name__} "
                    f"for chunk {number}"
                )
        if prepare is not None and not callable(prepare):
            raise TypeError(
                f"ChunkRefs: prepare must be a function of the object, got {type(prepare).__name__}"
            )

    def __len__(self) -> int:
        return len(self.refs)

    def __repr__(self) -> str:
        return f"ChunkRefs({len(self.refs)} objects)"

    def __scatter__(self, chunks: int, _dim: int) -> list[ChunkRefs]:
        if len(self.refs) > chunks:
            raise ValueError(
                f"ChunkRefs: {len(self.refs)} objects for {chunks} devices: give one for each chunk"
            )
        return [ChunkRefs([ref], self.prepare) for ref in self.refs]

    def __reduce__(self) -> str:
        # Pickling a reference keeps its object for ever; messages have its number instead.
        raise TypeError("a Ray object reference can only be an argument of a call")

    @property
    def ref(self) -> object:
        """The reference for one chunk, or for a call that is not split."""
        if len(self.refs) > 1:
            raise ValueError(
                f"ChunkRefs: {len(self.refs)} objects for a call that is not split: give one"
            )
        return self.refs[0]


def numbered(value: object, numbers: dict[object, int]) -> Any:
    """Put numbers in the places of the references among a chunk's arguments."""
    return _replaced(value, lambda one: _Numbered(numbers[one.ref], one.prepare))


def resolved(value: object, get: Callable[[Any], object], device: torch.device) -> Any:
    """Arguments with the objects that ``get`` gives for their references, on a device. It gives an
    exception for an object that cannot be had.
    """
    objects: dict[object, object] = {}  # two arguments may be parts of one object

    def swap(one: ChunkRefs | _Numbered) -> object:
        if one.ref not in objects:
            objects[one.ref] = get(one.ref)
        found = objects[one.ref]
        if isinstance(found, BaseException):
            raise found
        if one.prepare is not None:
            with warnings.catch_warnings():
                # Nothing writes to it: what is still the object's own memory is copied.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                found = one.prepare(found)
        return on_tensors(found, lambda t: _own(t, device))

    return _replaced(value, swap)


def _replaced(value: object, swap: Function) -> object:
    refs = ChunkRefs, _Numbered
    return mapped(value, lambda part: swap(part) if isinstance(part, refs) else part)


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device that the module may write to. One on an array's memory is copied: that
    is Ray's, which other processes see and a replay needs.
    """
    found = tensor.detach().to(device)
    strided = found.layout is torch.strided and not found.is_nested
    foreign = strided and not found.untyped_storage().resizable()
    return found.clone() if foreign else found
