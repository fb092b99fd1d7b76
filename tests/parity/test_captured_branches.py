"""Models whose blocks have parallel branches, captured: to the last bit the plain module, cut before every layer."""

from collections.abc import Callable

import pytest
import torch
from helpers.branching_networks import (
    Blocks,
    Checkpointed,
    GoogLeNetBlock,
    InceptionE,
    Mixture,
    NASNetCell,
    OnlyInTraining,
    ResNeXtBlock,
    Towers,
)
from helpers.captured_stages import capture, differences, evaluate_stages, make_stages, run_plain, run_stages
from helpers.model_zoo import noise, sum_of_squares
from torch import Tensor, nn

pytestmark = pytest.mark.part(6)

BLOCKS = {
    "inception": InceptionE,
    "inception with dropout": lambda: InceptionE(0.1),
    "googlenet": GoogLeNetBlock,
    "resnext": ResNeXtBlock,
    "nasnet": NASNetCell,
    "mixture": Mixture,
    "stacked mixture": lambda: Mixture(stacks=True),
    "checkpointed": Checkpointed,
    "another order in evaluation": OnlyInTraining,
}


def check(make: Callable[[], nn.Module], batches: list[dict[str, Tensor]]) -> None:
    """Compare training and evaluation with the plain module, cut before every layer."""
    torch.manual_seed(0)
    plain = make().train()
    captured = capture(plain, batches[0])
    stages = make_stages(captured, plain, range(1, len(captured.layers)))
    for batch in batches:
        found = run_stages(captured, stages, batch, sum_of_squares, seeded=True)
        assert differences(found, run_plain(captured, plain, batch, sum_of_squares, seeded=True)) == []
    buffers = dict(plain.named_buffers())
    for module in (plain, *(module for stage in stages for module in stage.modules)):
        module.eval()
    for stage in stages:
        for name, buffer in stage.buffers.items():
            assert torch.equal(buffer, buffers[name])
    for batch in batches:
        with torch.no_grad():
            (found_output,) = evaluate_stages(captured, stages, batch)
            assert torch.equal(found_output, plain(**batch))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_model_of_branches_cut_before_every_layer_is_the_plain_module(name: str):
    check(lambda: Blocks(BLOCKS[name]), [{"x": noise(seed, 2, 3, 8, 8)} for seed in (1, 2)] + [{"x": noise(3, 3, 3, 6, 6)}])


def test_branches_of_the_model_itself_are_those_of_the_plain_module():
    check(Towers, [{"x": noise(1, 2, 8)}, {"x": noise(2, 3, 8)}])
