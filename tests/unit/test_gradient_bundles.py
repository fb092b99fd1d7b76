"""Bundles of gradients: sums, uses that travel apart, and undefined ones, in the order in which they are added."""

import torch

from raypar.worker.step.gradient_bundles import (
    add_gradient,
    bundle_of_gradients,
    count_uses_apart,
    gradients_of_bundle,
    sums_of_gradients,
)


def tensor(number: float) -> torch.Tensor:
    return torch.full((2, 3), float(number))


def test_a_bundle_has_a_tensor_for_each_value_and_behind_them_the_uses_of_those_that_have_several():
    bundle = bundle_of_gradients([tensor(1), None, (tensor(2), tensor(3)), (), (tensor(4),), (tensor(5), tensor(6), tensor(7))])
    assert [one.dtype for one in bundle[:6]] == 2 * [torch.float32, torch.float32, torch.int64]
    assert count_uses_apart(bundle[:6]) == 5 and len(bundle) == 11
    found = [(value, one.flatten().tolist()[:1]) for value, one in gradients_of_bundle("abcdef", bundle)]
    assert found == [(v, n) for v, n in zip("abccdefff", ([1], [], [2], [3], [], [4], [5], [6], [7]), strict=True)]


def test_several_travel_as_they_lie_in_memory():
    uses = tensor(1).t(), tensor(2)[::2], torch.ones(1, 3).expand(2, 3)
    _, *following = bundle_of_gradients([uses])
    assert [one.stride() for one in following] == [one.stride() for one in uses]


def test_undefined_gradients_are_skipped_and_the_rest_added_in_order():
    nothing, *_ = bundle_of_gradients([None])
    small, large = tensor(1.0), tensor(2.0**24)
    total = None
    for gradient in (nothing, large, small, nothing, small):
        total = add_gradient(total, gradient)
    assert total is not None and torch.equal(total, (large + small) + small) and not torch.equal(total, large + (small + small))
    assert sums_of_gradients({"a": add_gradient(nothing, nothing), "b": total}) == {"a": None, "b": total}
