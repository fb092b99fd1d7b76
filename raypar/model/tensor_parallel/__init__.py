"""Tensor parallelism: layers whose parameters and values are cut over shards.

The bits of a sharded run depend on the number of shards, the styles, and whether the sequence is cut, beside what the contract
of `raypar/NUMERICS.md` says of all runs. The rules (`tests/helpers/same_shards.py` carries them out in plain PyTorch):

1. Shard t of T has heads, features or ids [floor(t n / T), floor((t+1) n / T)); of [q, k, v] or gate and up in one matrix that
   part of each; key heads as its query heads need them. A parameter is made whole, by its name, and cut.
2. Sums over shards follow the tree of `plan/addition_tree.py`. A row layer's bias is added after the sum. The gradient of a
   value that several layers of a module read (q, k, v; gate and up) is summed over them on each shard as autograd does, then
   over shards.
3. Dropout on a part multiplies by that part of the mask of the whole value, drawn from the generator as for the whole value.
4. Gradients that are parts of a sum over shards (`worker.stage.stage_shard.sum_partial_gradients`) are summed over shards once
   a step, each use of a parameter by itself: after the addition over blocks and replicas, before that over uses.
5. Cross-entropy on parts of the vocabulary: `vocabulary_parallel.py`.
"""

# Importing them fills the table of operations of `sharded_value.ShardedValue`.
from raypar.model.tensor_parallel import batch_norm as batch_norm
from raypar.model.tensor_parallel import channel_functions as channel_functions
from raypar.model.tensor_parallel import sample_functions as sample_functions
from raypar.model.tensor_parallel import sharded_value_torch_functions as sharded_value_torch_functions
from raypar.model.tensor_parallel import spatial_functions as spatial_functions
from raypar.model.tensor_parallel import vocabulary_parallel as vocabulary_parallel
