"""Nested values to messages and back: a pickled skeleton, and the tensors' bytes beside it.

```
 encode:  value ──► skeleton, tensors (values) ──► specs, bytes (tensors) ──► a parcel      decode: the other way
```

Each tensor travels once, so that one that stands in two places of a value does so on the other side.
"""

from raydp_parallel.codec.parcels import decode, encode, encode_again, row, tensors_in, unpack
from raydp_parallel.codec.pickler import Pickler, stream_name
from raydp_parallel.codec.tensors import (
    DTYPE_NAMES,
    DTYPES,
    compact,
    load_class,
    pack_class,
    spec_of,
    write,
)
from raydp_parallel.codec.values import in_rows, is_row, load, unsendable

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
    "unsendable",
    "write",
]
