"""Copies that share memory until somebody writes."""

import numpy as np
import torch

from raypar.torch_compat.lazy_copies import lazy_copy


def test_a_copy_shares_memory_until_one_of_the_two_is_written_to():
    one = torch.arange(4.0)
    other, third = lazy_copy(one), lazy_copy(one)
    assert all(torch._C._is_cow_tensor(each) for each in (one, other, third))
    other.add_(1.0)
    one.mul_(2.0)
    assert one.tolist() == [0.0, 2.0, 4.0, 6.0]
    assert other.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert third.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_memory_of_others_is_copied_at_once():
    array = np.ones(3, dtype=np.float32)
    lazy_copy(torch.from_numpy(array)).add_(1.0)
    assert array.tolist() == [1.0, 1.0, 1.0]
