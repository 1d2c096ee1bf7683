"""`ChunkRefs`: an argument of which each chunk's part lies in Ray's object store already."""

from __future__ import annotations

from collections.abc import Iterable

from raydp_parallel.batch import Function
from raydp_parallel.batch.by_reference import ByReference


class ChunkRefs(ByReference):
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
        super().__init__(refs, prepare)
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
