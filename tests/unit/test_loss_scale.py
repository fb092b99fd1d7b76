"""The scale of float16's loss: what `torch.amp.GradScaler` makes of the same skipped steps, for any step at once."""

import random

import torch

from raypar.plan.loss_scale import LEAST, MOST, LossScaling, format_loss_scale


def test_every_step_has_the_scale_of_gradscaler_after_the_same_overflows():
    for seed in range(60):
        chance = random.Random(seed)
        scaling = LossScaling(
            chance.randint(-8, 20), chance.randint(1, 3), chance.randint(1, 3), chance.choice((1, 2, 3, 7, 2000))
        )
        scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=2.0**scaling.first,
            growth_factor=2.0**scaling.growth,
            backoff_factor=2.0**-scaling.backoff,
            growth_interval=scaling.interval,
        )
        parameter = torch.nn.Parameter(torch.ones(1))
        optimizer, skipped, wanted = torch.optim.SGD([parameter], lr=0.0), list[int](), list[float]()
        for step in range(60):
            wanted.append(scaler.get_scale())
            overflows = (chance.random() < 0.15 and wanted[-1] > 2.0 ** (LEAST + 3)) or wanted[-1] > 2.0 ** (MOST - 4)
            scaler.scale(parameter.sum()).backward()
            assert parameter.grad is not None
            if overflows:
                skipped.append(step)
                parameter.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            parameter.grad = None
        assert [2.0 ** scaling.exponent(step, skipped) for step in range(60)] == wanted
        assert 2.0 ** scaling.exponent(30, [step for step in skipped if step < 30]) == wanted[30], "later steps say nothing"


def test_it_stays_between_the_smallest_float16_and_the_largest_float32():
    down, up = LossScaling(-22, 1, 5, 2000), LossScaling(120, 5, 1, 1)
    assert [down.exponent(step, range(step)) for step in range(4)] == [-22, LEAST, LEAST, LEAST]
    assert [up.exponent(step, ()) for step in range(4)] == [120, 125, 125, 125], "2^130 is no float32"
    assert up.exponent(10**9, ()) == 125 and LossScaling(16, 1, 1, 2000).exponent(10**9, range(100)) == MOST


def test_as_text():
    assert [format_loss_scale(scale) for scale in (65536.0, 1.0, 0.0625)] == ["2^16", "2^0", "2^-4"]
