"""What two replicas of one machine let each other read in place: all sums, or what the other one owns alone."""

import torch

from raypar.comm.buffer_pool import CPU
from raypar.comm.gradient_buckets import OwnerLayout, bucket_layouts


def test_each_shares_what_the_other_one_owns_alone():
    shapes = [(torch.Size((64, 3)), torch.float32), (torch.Size((32,)), torch.float32)]
    owners = [[[(0, 128)], [(128, 192)]], [[], [(0, 32)]]]
    (whole,) = bucket_layouts(shapes, 1 << 20, CPU)
    (owned,) = bucket_layouts(shapes, 1 << 20, CPU, owners)
    assert [whole.nbytes_shared_by(replica) for replica in range(2)] == [4 * 224] * 2
    assert isinstance(owned, OwnerLayout) and owned.segments == ((0, 128), (128, 224))
    assert [owned.nbytes_shared_by(replica) for replica in range(2)] == [4 * 96, 4 * 128]
    assert owned.places == (((1, 128, 0, 32),), ((0, 0, 0, 128), (1, 160, 128, 192))), "last layer first"
