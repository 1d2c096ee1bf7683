"""Scatter and gather of nested values: pure functions in the driver, with torch's own autograd."""

from raydp_parallel.batch.by_reference import numbered as numbered
from raydp_parallel.batch.by_reference import resolved as resolved
from raydp_parallel.batch.containers import Function as Function
from raydp_parallel.batch.containers import Keywords as Keywords
from raydp_parallel.batch.containers import mapped as mapped
from raydp_parallel.batch.containers import register_batch_type as register_batch_type
from raydp_parallel.batch.containers import registered as registered
from raydp_parallel.batch.containers import split_by_rule as split_by_rule
from raydp_parallel.batch.containers import tensors_in as tensors_in
from raydp_parallel.batch.joining import gather as gather
from raydp_parallel.batch.joining import output_place as output_place
from raydp_parallel.batch.splitting import scatter as scatter
from raydp_parallel.batch.splitting import scatter_kwargs as scatter_kwargs
from raydp_parallel.batch.splitting import sizes as sizes
