"""`ChunkRefs`: an argument of which each chunk's part lies in Ray's object store already."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from raydp_parallel.batch.containers import ContainerKind, container_like, contents, kind_of
from raydp_parallel.transport.messages import ChunkRef


class ChunkRefs:
    """An argument that does not pass through this process: one `ray.ObjectRef` for each chunk.
    The chunk's replica gets the object from Ray itself.

    ::

        import ray

        refs = [ray.put(part.clone()) for part in x.split(3)]
        out = model(ChunkRefs(refs))

    There are as many chunks as references, so give one for each device, or fewer; all other
    arguments have to be split into as many. The argument is the object as `ray.get` gives it, with
    its tensors moved to the replica's device; they get no gradient. The references are held until
    no backward needs them.

    Args:
        refs: The references, in the order of chunks.
        prepare: Makes the argument of the object, in the replica: takes a column of a table, or
            makes a tensor of an array. What it gives is an input without a gradient, and tensors
            that it closes over get none.

    Raises:
        TypeError: One is no reference, or ``prepare`` no function.
        ValueError: There is none.
    """

    def __init__(self, refs: Iterable[Any], prepare: Callable[[Any], Any] | None = None) -> None:
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

    def __scatter__(self, chunks: int, _dim: int) -> list[ChunkRef]:
        if len(self.refs) > chunks:
            raise ValueError(
                f"ChunkRefs: {len(self.refs)} objects for {chunks} devices: give one for each "
                "chunk, of which there is one for each device"
            )
        return [ChunkRef(ref, self.prepare) for ref in self.refs]

    def __reduce__(self) -> Any:
        return _itself, (self.alone(),)  # a call that is not split has all arguments as they are

    def alone(self) -> ChunkRef:
        """The reference for a call that is not split.

        Raises:
            ValueError: There are several.
        """
        if len(self.refs) > 1:
            raise ValueError(
                f"ChunkRefs: {len(self.refs)} objects for a call that is not split: give one"
            )
        return ChunkRef(self.refs[0], self.prepare)


def _itself(value: Any) -> Any:
    return value


def resolved(value: Any, get: Callable[[Any], Any], device: torch.device) -> Any:
    """Arguments with the objects that their references stand for.

    Args:
        value: The arguments.
        get: Gives an object for what a `ChunkRef` has as its reference.
        device: Where the objects' tensors go.
    """
    objects: dict[Any, Any] = {}  # two arguments may be parts of one object

    def take(part: ChunkRef | ChunkRefs) -> Any:
        one = part.alone() if isinstance(part, ChunkRefs) else part
        if one.ref not in objects:
            objects[one.ref] = get(one.ref)
        found = objects[one.ref]
        if one.prepare is not None:
            with warnings.catch_warnings():
                # Nothing writes to it: what is still the object's own memory is copied.
                warnings.filterwarnings("ignore", "The given NumPy array is not writable")
                found = one.prepare(found)
        return _replaced(found, torch.Tensor, lambda tensor: _own(tensor, device))

    return _replaced(value, (ChunkRef, ChunkRefs), take)


def _own(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on the device that the module may write to. One on an array's memory is copied: that
    is Ray's, which other processes see and a replay needs.
    """
    found = tensor.detach().to(device)
    strided = found.layout is torch.strided and not found.is_nested
    foreign = strided and not found.untyped_storage().resizable()
    return found.clone() if foreign else found


def holds_refs(value: Any) -> bool:
    """Whether there are references among the arguments."""
    if isinstance(value, (ChunkRef, ChunkRefs)):
        return True
    return any(map(holds_refs, contents(value, kind_of(value)).values()))


def preparations(value: Any) -> list[Callable[[Any], Any]]:
    """What prepares the objects of the references among the arguments."""
    if isinstance(value, (ChunkRef, ChunkRefs)):
        return [] if value.prepare is None else [value.prepare]
    parts = contents(value, kind_of(value)).values()
    return [function for part in parts for function in preparations(part)]


def _replaced(value: Any, kind: type | tuple[type, ...], swap: Callable[[Any], Any]) -> Any:
    """A nested value in which all values of a kind are exchanged."""
    if isinstance(value, kind):
        return swap(value)
    container = kind_of(value)
    if container is ContainerKind.PACKED:
        return value
    parts = contents(value, container)
    found = {key: _replaced(part, kind, swap) for key, part in parts.items()}
    if all(found[key] is part for key, part in parts.items()):
        return value
    return container_like(value, container, found)
