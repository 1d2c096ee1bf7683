"""Nested values to messages and back: a pickled skeleton, and the tensors' bytes beside it.

```
 encode:  value ──► skeleton, tensors (values) ──► specs, bytes (tensors) ──► a parcel      decode: the other way
```

Each tensor travels once, so that one that stands in two places of a value does so on the other side.
"""

from raydp_parallel.codec.parcels import Plot, decode, encode, encode_again, plot, row, tensors_in, unpack
from raydp_parallel.codec.tensors import (
    DTYPE_NAMES,
    DTYPES,
    alike,
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
    "Plot",
    "alike",
    "compact",
    "decode",
    "encode",
    "encode_again",
    "in_rows",
    "is_row",
    "load",
    "load_class",
    "pack_class",
    "plot",
    "row",
    "spec_of",
    "tensors_in",
    "unpack",
    "unsendable",
    "write",
]
