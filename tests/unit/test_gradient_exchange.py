"""How replicas exchange gradients: one choice, of the plan's runs of blocks and of where a bucket lies."""

import pytest

from raypar.plan.addition_tree import covering_nodes, fold_tree
from raypar.plan.gradient_exchange import HALVING_HOST_BYTES, gradient_exchange
from raypar.plan.microbatches import contiguous_part


def subtrees(replicas, blocks):
    return [covering_nodes(contiguous_part(r, replicas, blocks), blocks) for r in range(replicas)]


def by_halving(sums):
    while len(sums) > 1:
        sums = [f"({lower}+{upper})" for lower, upper in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


@pytest.mark.parametrize("replicas", range(2, 18))
@pytest.mark.parametrize("blocks", [*range(1, 18), 32, 48])
def test_replicas_halve_where_that_adds_over_the_tree(replicas, blocks):
    nodes = subtrees(replicas, blocks)
    found = gradient_exchange(nodes, None)
    wanted = replicas.bit_count() == 1 and blocks >= replicas and blocks % replicas == 0 and blocks.bit_count() == 1
    assert (found != "owners") == wanted
    if wanted:
        assert found == ("swap" if replicas == 2 else "halving")
        names = {node: str(number) for number, (node,) in enumerate(nodes)}
        tree = fold_tree(names, (0, blocks), lambda left, right: f"({left}+{right})")
        assert by_halving(list(names.values())) == tree


@pytest.mark.parametrize("runs", [((0, 1), (1, 2), (2, 4)), ((0, 2), (2, 3), (3, 4), (4, 8)), ((0, 1), (1, 2), (2, 4), (4, 8))])
def test_subtrees_of_several_sizes_have_owners(runs):
    assert gradient_exchange([(node,) for node in runs], None) == "owners"


def test_large_buckets_of_the_host_have_owners():
    assert gradient_exchange(subtrees(4, 4), HALVING_HOST_BYTES) == "halving"
    assert gradient_exchange(subtrees(4, 4), HALVING_HOST_BYTES + 1) == "owners"
    assert gradient_exchange(subtrees(2, 4), HALVING_HOST_BYTES + 1) == "swap"
