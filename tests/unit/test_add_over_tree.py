"""The additions of a sum over ranks: those of the tree, whoever adds, and nothing of the own part is changed (rule 11)."""

import pytest
import torch
from helpers.transport_cases import noise, over_tree

from raypar.comm.collectives import add_over_tree


@pytest.mark.parametrize(
    "dtype, factor", [(torch.float32, 1.0), (torch.float64, 1.0), (torch.bfloat16, 1.0), (torch.float16, 0.1)]
)
@pytest.mark.parametrize("size", range(1, 10))
def test_every_rank_has_the_sum_of_the_tree_and_its_own_part_unless_the_sum_is_to_be_there(size, dtype, factor):
    given = [(noise(rank, 100) * factor).to(dtype) for rank in range(size)]
    want = over_tree(given)
    for own in range(size):
        parts, out = [part.clone() for part in given], torch.empty(100, dtype=dtype)
        add_over_tree(parts, own, out)
        assert torch.equal(out, want) and torch.equal(parts[own], given[own])
        parts = [part.clone() for part in given]
        add_over_tree(parts, own, parts[own])
        assert torch.equal(parts[own], want)


def test_four_numbers_are_added_in_pairs_and_short_ones_are_rounded_once():
    parts = [torch.tensor([x]) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]  # one at a time each would be lost
    add_over_tree([part.clone() for part in parts], 0, out := torch.empty(1))
    assert out.item() == 1.0 + 2.0**-23
    short = [torch.tensor([x], dtype=torch.bfloat16) for x in (1.0, 2.0**-9, 2.0**-9, 2.0**-9)]
    add_over_tree(short, 0, found := torch.empty(1, dtype=torch.bfloat16))
    assert found.item() == 1.0 + 2.0**-7
