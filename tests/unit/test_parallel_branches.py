"""Which units a model has whose blocks have parallel branches."""

from collections.abc import Callable

import pytest
import torch
from helpers.branching_networks import (
    Attention,
    AttentionBesideMLP,
    Blocks,
    Bottleneck,
    Checkpointed,
    DenseLayer,
    GatedMLP,
    GoogLeNetBlock,
    InceptionE,
    Mixture,
    NASNetCell,
    OnlyInTraining,
    RepVGGBlock,
    ResNeXtBlock,
    Towers,
)
from helpers.captured_stages import Captured, capture
from torch import nn

BY_CI = pytest.mark.ci


def names_in(captured: Captured, block: str) -> list[str]:
    """The layers of a block, without its name."""
    found = [layer.name for layer in captured.layers]
    return [name.removeprefix(block).removeprefix(".") or "join" for name in found if name.startswith(block)]


def captured(block: Callable[[], nn.Module]) -> Captured:
    return capture(Blocks(block), {"x": torch.ones(2, 3, 6, 6)})


def reads(found: Captured, name: str) -> set[str]:
    """The values that a layer reads, without the batch's."""
    (layer,) = (layer for layer in found.layers if layer.name == name)
    return {value for value in layer.inputs if value != "x"}


@pytest.mark.parametrize(
    "block, branches",
    [
        pytest.param(ResNeXtBlock, ["paths.0", "paths.1", "join", "paths.2", "#2", "paths.3", "#3"], marks=BY_CI),
        pytest.param(NASNetCell, ["left_0", "right_0", "join", "left_1", "right_1", "#2", "left_2", "#3"], marks=BY_CI),
        (Mixture, ["gate", "experts.0", "join", "experts.1", "#2"]),
        pytest.param(lambda: Mixture(stacks=True), ["gate", "experts.0", "experts.1", "join"], marks=BY_CI),
        pytest.param(GoogLeNetBlock, ["one", "three", "five", "pool", "join"], marks=BY_CI),
    ],
)
def test_the_modules_of_parallel_branches_are_units_and_meet_in_a_layer_of_their_own(block, branches: list[str]):
    assert names_in(captured(block), "blocks.1") == branches


def test_branches_of_inception_need_nothing_but_what_the_block_reads():
    found = captured(InceptionE)
    assert names_in(found, "blocks.1") == [
        *("branch1x1", "branch3x3_1", "branch3x3_2a", "branch3x3_2b", "join"),
        *("branch3x3dbl_1", "branch3x3dbl_2", "branch_pool", "#2"),
    ]
    given = reads(found, "blocks.1.branch1x1")
    for first in ("branch3x3_1", "branch3x3dbl_1", "branch_pool"):  # the last begins with a function
        assert reads(found, f"blocks.1.{first}") == given
    ends = ("blocks.1.branch1x1", "blocks.1", "blocks.1.branch3x3dbl_2", "blocks.1.branch_pool")
    assert reads(found, "blocks.1#2") == {f"{name}.out0" for name in ends}


@pytest.mark.ci
def test_random_numbers_where_branches_meet_are_those_of_the_last_branch():
    found = captured(lambda: InceptionE(0.1))
    assert names_in(found, "blocks.1")[-2:] == ["branch3x3dbl_2", "branch_pool"]
    assert "blocks.1.branch3x3dbl_2.out0" in reads(found, "blocks.1.branch_pool")


@pytest.mark.parametrize(
    "block",
    [
        *(Bottleneck, Attention),
        *(pytest.param(one, marks=BY_CI) for one in (DenseLayer, GatedMLP, AttentionBesideMLP, RepVGGBlock)),
        *(pytest.param(one, marks=BY_CI) for one in (Checkpointed, OnlyInTraining)),
    ],
)
def test_blocks_without_branches_stay_whole(block: type[nn.Module]):
    assert [layer.name for layer in captured(block).layers] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]


@pytest.mark.ci
def test_units_that_the_user_names_stay_as_they_are():
    found = capture(Blocks(Mixture), {"x": torch.ones(2, 3, 6, 6)}, units=["blocks.*"])
    assert [layer.name for layer in found.layers] == ["stem", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_branches_of_the_model_itself_meet_in_a_layer_of_their_own():
    found = capture(Towers(), {"x": torch.ones(2, 8)})
    assert [layer.name for layer in found.layers] == ["left", "right", "join", "head"]
    assert reads(found, "right") == set()


@pytest.mark.ci
def test_a_block_with_parameters_and_a_way_to_reset_them_stays_whole():
    class Scaled(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8, 1, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    class Resettable(Scaled):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)

    assert names_in(captured(Scaled), "blocks.1") == names_in(captured(Mixture), "blocks.1")
    assert names_in(captured(Resettable), "blocks.1") == ["join"]
