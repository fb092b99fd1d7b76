"""The keys of `precision: {parameters: bf16, master: float32}`: what goes together, what is refused, what is said of it."""

import pytest

from raypar.actors.worker_and_generation_events import training_facts
from raypar.errors import ConfigError
from raypar.job import PrecisionConfig
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.plan.loss_scale import LossScaling
from raypar.worker.layer_precisions import autocast_of, gradient_dtype_of, layer_precision_of, parameter_dtype_of

SMALL = """
name: small
steps: 3
batch_size: 8
microbatches: 4
model: m:layers
loss: m:loss
data: m:text
optimizer: {function: "torch.optim:SGD", args: {lr: 3e-4}}
"""
ON = ["precision.parameters=bf16", "precision.master=float32"]


def test_it_is_in_the_contract_and_said_in_words_where_it_is_set_only():
    plain, on = parse_job(SMALL), parse_job(SMALL, ON)
    assert on.precision == PrecisionConfig(parameters="bf16", master="float32")
    wanted = {"precision": {"parameters": "bf16", "master": "float32"}}
    assert contract_of_job(on) == contract_of_job(plain) | wanted
    assert contract_of_job(parse_job(SMALL, [*ON, "precision.gradients=float32"])) == contract_of_job(on)
    assert contract_of_job(parse_job(SMALL, ["precision.gradients=float32"])) == contract_of_job(plain)
    assert training_facts(contract_of_job(on))["precision"] == "bf16 (parameters)"
    assert "bf16 copies of the parameters" in (on.precision_in_words or "") and plain.precision_in_words is None


def test_so_is_that_gradients_are_added_in_bfloat16():
    on = parse_job(SMALL, [*ON, "precision.gradients=bf16"])
    added = {"precision": {"parameters": "bf16", "master": "float32", "gradients": "bf16"}}
    assert contract_of_job(on) == contract_of_job(parse_job(SMALL)) | added
    assert training_facts(contract_of_job(on))["precision"] == "bf16 (parameters, gradients)"
    assert str(gradient_dtype_of(on.precision)) == "torch.bfloat16"
    assert gradient_dtype_of(parse_job(SMALL, ON).precision) is None
    assert "their gradients are added in it; the parameters are float32" in (on.precision_in_words or "")


def test_it_is_no_autocast():
    on, mixed = parse_job(SMALL, ON).precision, parse_job(SMALL, ["precision.compute=bf16"]).precision
    assert autocast_of(on) is None and parameter_dtype_of(mixed) is None
    assert str(parameter_dtype_of(on)) == "torch.bfloat16" and layer_precision_of(on) is layer_precision_of(mixed)


def test_float16_is_said_with_how_its_loss_is_scaled():
    on = parse_job(SMALL, ["precision.compute=fp16"])
    assert contract_of_job(on) == contract_of_job(parse_job(SMALL)) | {"precision": {"compute": "fp16"}}
    assert on.loss_scaling == LossScaling(first=16, growth=1, backoff=1, interval=2000)
    assert "compute in fp16 (torch.autocast), the loss is scaled" in (on.precision_in_words or "")
    set_ = [
        "precision.loss_scale.init_scale=0.25",
        "precision.loss_scale.growth_factor=4",
        "precision.loss_scale.growth_interval=3",
    ]
    own = parse_job(SMALL, ["precision.parameters=fp16", "precision.master=float32", *set_])
    assert own.loss_scaling == LossScaling(first=-2, growth=2, backoff=1, interval=3)
    scale = {"init_scale": 0.25, "growth_factor": 4.0, "growth_interval": 3}
    assert contract_of_job(own)["precision"] == {"parameters": "fp16", "master": "float32", "loss_scale": scale}
    assert parse_job(SMALL, ["precision.compute=bf16"]).loss_scaling is parse_job(SMALL).loss_scaling is None


REFUSED = {
    ("precision.parameters=bf16",): (
        "precision.parameters is bf16, and precision.master is not set: without float32 masters an update of less than 1/512 "
        "of a parameter would be rounded away",
        "set precision.master: float32",
    ),
    ("precision.parameters=fp16",): ("an update of less than 1/4096 of a parameter would be", "set precision.master: float32"),
    ("precision.master=float32",): ("precision.master is float32, and precision.parameters, of which", "or leave master out"),
    (*ON, "precision.compute=bf16"): ("precision.compute and precision.parameters are both set", "leave one of them out"),
    (*ON, "dtype=float64"): (
        "precision.master is float32, but dtype, that of the parameters themselves, is float64",
        "set dtype: float32, or leave precision out",
    ),
    ("precision.gradients=bf16",): (
        "precision.gradients is bf16, and precision.parameters is not set: what layers compute with is float32, and so are its "
        "gradients",
        "set precision.parameters: bf16 and precision.master: float32, or leave gradients out",
    ),
    ("precision.compute=bf16", "precision.gradients=bf16"): (
        "precision.gradients is bf16, and precision.parameters is not",
        "",
    ),
    (*ON, "precision.gradients=fp16"): (
        "precision.gradients is fp16, and precision.parameters is bf16, whose gradients are added in it or in float32",
        "set precision.parameters: fp16 and precision.master: float32, or leave gradients out",
    ),
    (*ON, "precision.gradients=bfloat16"): ("precision.gradients: expected 'float32', 'bf16' or 'fp16', got 'bfloat16'", ""),
    ("precision.parameters=float16", "precision.master=float32"): (
        "precision.parameters: expected 'bf16' or 'fp16', got 'float16'",
        'it is {"parameters": "bf16", "master": "float32"} or {"parameters": "fp16", "master": "float32"}, and',
    ),
    ("precision.compute=fp16", "dtype=float64"): (
        "precision.compute is fp16, but dtype is float64, which autocast leaves as it is",
        "set dtype: float32, or leave precision out",
    ),
    ("precision.compute=bf16", "precision.loss_scale.init_scale=1024"): (
        "precision.loss_scale is set, and nothing is computed in float16: other gradients need no scale",
        "set precision.compute: fp16, or leave loss_scale out",
    ),
    ("precision.compute=fp16", "precision.loss_scale.init_scale=1000"): (
        "precision.loss_scale.init_scale: expected a power of two (65536, 2, 0.5, ...) from 2^-24 to 2^127, got 1000 (int)",
        "correct --set precision.loss_scale.init_scale",
    ),
    ("precision.compute=fp16", "precision.loss_scale.backoff_factor=1"): (
        "precision.loss_scale.backoff_factor: expected less than 1, got 1 (int)",
        "",
    ),
    ("precision.compute=fp16", "precision.loss_scale.hysteresis=2"): (
        "unknown key precision.loss_scale.hysteresis",
        "float16 is precision.compute: fp16, with a loss that is scaled as precision.loss_scale says",
    ),
    ("precision.parameters=bfloat16", "precision.master=float32"): (
        "precision.parameters: expected 'bf16' or 'fp16', got 'bfloat16'",
        'for mixed precision it is {"parameters": "bf16", "master": "float32"} or {"parameters": "fp16", "master": "float32"}',
    ),
    ("precision.parameters=bf16", "precision.master=bf16"): ("precision.master: expected 'float32', got 'bf16'", ""),
}


@pytest.mark.parametrize("given", REFUSED, ids=" ".join)
def test_what_does_not_go_together_is_refused_with_the_reason(given):
    what, cure = REFUSED[given]
    with pytest.raises(ConfigError) as caught:
        parse_job(SMALL, list(given))
    assert what in caught.value.what and cure in caught.value.cure
