"""Nested values to messages and back: a pickled skeleton, and the tensors' bytes beside it.

```
 encode:  value ──► skeleton, tensors (values) ──► specs, bytes (tensors) ──► a parcel
```

Each tensor is sent once, so that a tensor that occurs in two places of a value does so on the other
side too.
"""

from raydp_parallel.transport.codec.parcels import (
    decode,
    encode,
    encode_again,
    row,
    tensors_in,
    unpack,
)
from raydp_parallel.transport.codec.pickler import Pickler, stream_name
from raydp_parallel.transport.codec.tensor_bytes import (
    DTYPE_NAMES,
    DTYPES,
    compact,
    load_class,
    pack_class,
    spec_of,
    write,
)
from raydp_parallel.transport.codec.values import (
    NotLoaded,
    in_rows,
    is_row,
    load,
    loading,
    unloadable,
    unsendable,
)

__all__ = [
    "DTYPES",
    "DTYPE_NAMES",
    "Pickler",
    "compact",
    "decode",
    "encode",
    "encode_again",
    "in_rows",
    "is_row",
    "load",
    "load_class",
    "pack_class",
    "row",
    "spec_of",
    "stream_name",
    "tensors_in",
    "unpack",
    "NotLoaded",
    "loading",
    "unloadable",
    "unsendable",
    "write",
]
