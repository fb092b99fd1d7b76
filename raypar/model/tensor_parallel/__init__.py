"""Tensor parallelism: layers whose parameters and values are cut over the shards of a seat (DESIGN 4.11)."""

# Both fill the table of what `value.Sharded` can do.
from raypar.model.tensor_parallel import cross_entropy as cross_entropy
from raypar.model.tensor_parallel import operations as operations
