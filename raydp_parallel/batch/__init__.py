"""Scatter and gather of nested values: pure functions on the driver, with torch's own autograd.

```
 scatter:  value ──► split every tensor, copy its containers ──► one value per chunk
 gather:   one value per chunk ──► join leaf by leaf ──► one value
                      what a container is, and how it is made again: containers
                      sequences of unequal length: packed         types with their own rules: custom
```
"""

from raydp_parallel.batch.custom_types import BatchTypeHandle, any_registered, register_batch_type
from raydp_parallel.batch.gathering import gather
from raydp_parallel.batch.scattering import rows, scatter, scatter_kwargs

__all__ = [
    "BatchTypeHandle",
    "any_registered",
    "gather",
    "register_batch_type",
    "rows",
    "scatter",
    "scatter_kwargs",
]
