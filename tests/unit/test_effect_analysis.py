"""What is neither seeded nor checked: code that is proved to draw no random numbers and to change no state of the process."""

import random
import types
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import effects
from torch import Tensor, nn

from examples import gpt
from jobs.bench import metrics, predict
from raypar.job import DataConfig, Job, LossConfig, MetricConfig, ModelConfig, OptimizerConfig, ValidationConfig
from raypar.plan import ParallelPlan
from raypar.worker.data.sample_number_field import NumberedSamples
from raypar.worker.metrics.metric import make_metric
from raypar.worker.process import effect_free_functions as known
from raypar.worker.process.effect_analysis import has_no_effects, reads_without_effects
from raypar.worker.run_in_one_process import OneProcessRun

# -- the proof ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", effects.WITHOUT, ids=lambda kind: kind.__name__)
def test_a_module_that_computes_with_data_alone_is_proved(kind, training):
    assert has_no_effects(kind().train(training))


@pytest.mark.parametrize("kind", effects.IN_TRAINING_ONLY, ids=lambda kind: kind.__name__)
def test_dropout_is_proved_in_evaluation_only(kind):
    assert not has_no_effects(kind().train()) and has_no_effects(kind().eval())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", effects.WITH, ids=lambda kind: kind.__name__)
def test_what_draws_or_changes_state_or_is_not_known_is_not_proved(kind, training):
    assert not has_no_effects(kind().train(training))


def test_the_quickstarts_model_data_loss_and_metrics_are_proved():
    data = gpt.text()
    assert all(map(has_no_effects, [*gpt.layers(depth=2), gpt.loss, metrics.accuracy, metrics.top_five, predict.last_token]))
    assert reads_without_effects(data)


def test_code_whose_source_has_changed_is_not_proved():
    function = effects.right
    other = types.FunctionType(effects.noisy.__code__.replace(co_firstlineno=function.__code__.co_firstlineno), vars(effects))
    assert has_no_effects(function) and not has_no_effects(other)


def test_a_hook_on_all_modules_is_called_by_each():
    module = effects.Base()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *given: random.random())
    try:
        assert not has_no_effects(module)
    finally:
        handle.remove()
    assert has_no_effects(module)


def test_a_function_that_somebody_has_put_in_the_place_of_pytorchs_is_not_known(monkeypatch):
    module = effects.Base()
    monkeypatch.setattr(F, "gelu", effects.wrapped(F.gelu))
    assert not has_no_effects(module)


@pytest.mark.parametrize(
    "names, owner", [(known.TORCH_FUNCTIONS, torch), (known.NN_FUNCTIONS, F), (known.TENSOR_METHODS, Tensor)]
)
def test_no_operation_that_is_known_draws_random_numbers(names, owner):
    for name in names:
        assert callable(getattr(owner, name))
        packet = getattr(torch.ops.aten, name, None)
        tags = [] if packet is None else [tag for of in packet.overloads() for tag in getattr(packet, of).tags]
        assert torch.Tag.nondeterministic_seeded not in tags, name


def test_samples_are_proved_by_the_data_sets_getitem():
    read = {kind.__name__: reads_without_effects(kind()) for kind in (effects.Rows, effects.NoisyRows, effects.LeakingRows)}
    assert read == {"Rows": True, "NoisyRows": False, "LeakingRows": False}
    assert not reads_without_effects(effects.TransformedRows(lambda x: x * random.random()))
    numbered = [NumberedSamples(DataConfig(function=kind))().raypar_effect_free for kind in (effects.Rows, effects.NoisyRows)]
    assert numbered == [True, False]
    assert not reads_without_effects(effects.TransformedRows(random.random)) and not reads_without_effects([1, 2])


def test_a_metric_is_proved_if_all_its_code_is():
    made = {
        name: make_metric(name, MetricConfig(function=f"helpers.effects:{name}"))
        for name in ("right", "noisy", "Total", "NoisyMerge", "NoisyCopy", "NoisyFinish")
    }
    assert [name for name, metric in made.items() if metric.effect_free] == ["right", "Total"]


# -- what is seeded and checked ----------------------------------------------------------------------------------------------

MICROBATCHES = 2


def run_counted(
    kind: type[nn.Module], monkeypatch, data=effects.Rows, metric="right", steps: int = 1
) -> tuple[Counter, Counter]:
    """What was checked in a run by name, in its steps and in its validation."""
    job = Job(
        seed=1,
        steps=steps,
        batch_size=4,
        microbatches=MICROBATCHES,
        model=ModelConfig(function=lambda: effects.two_layers(kind)),
        loss=LossConfig(function=nn.functional.mse_loss),
        data=DataConfig(function=data),
        validation=ValidationConfig(function=data, samples=4),
        optimizer=OptimizerConfig(function=torch.optim.SGD, args={"lr": 0.01}),
        metrics={"metric": MetricConfig(function=f"helpers.effects:{metric}")},
        metrics_every=1,
    )
    counts: list[Counter] = []
    with OneProcessRun(job, ParallelPlan.mesh(layers=3), "1f1b") as run:
        check = run.guard.check
        monkeypatch.setattr(run.guard, "check", lambda caller, **how: counts[-1].update([caller]) or check(caller, **how))
        for part in (lambda: [run.step(step) for step in range(steps)], lambda: run.validate(steps)):
            counts.append(Counter())
            part()
    return counts[0], counts[1]


def test_what_is_proved_is_not_checked_but_for_the_last_layer_before_a_loss(monkeypatch):
    trained, validated = run_counted(effects.Base, monkeypatch)
    for counts in (trained, validated):
        assert counts["layer 'head'"] == MICROBATCHES and counts["the loss"] == MICROBATCHES
        assert not counts["layer 'first'"] + counts["layer 'second'"]
        assert not counts["metric 'metric'"] + counts["the data set's __getitem__"]


@pytest.mark.parametrize("kind", [*effects.IN_TRAINING_ONLY, effects.Python, effects.Hook, effects.OwnFunction, effects.Later])
def test_a_layer_that_is_not_proved_is_checked_in_its_mode_and_others_are_not(kind, monkeypatch):
    trained, validated = run_counted(kind, monkeypatch)
    assert trained["layer 'second'"] == MICROBATCHES and not trained["layer 'first'"]
    assert validated["layer 'second'"] == (0 if kind in effects.IN_TRAINING_ONLY else MICROBATCHES)


def test_samples_and_metrics_that_are_not_proved_are_checked(monkeypatch):
    trained, _ = run_counted(effects.Base, monkeypatch, effects.NoisyRows, "noisy")
    assert trained["metric 'metric'"] == MICROBATCHES + 1  # and once when it is computed
    assert trained["the data set's __getitem__"] >= 4


def test_a_tensor_subclass_from_the_data_set_makes_its_layer_seeded_and_checked_again():
    from raypar.comm.buffer_pool import CPU
    from raypar.model.graph import Graph, Layer
    from raypar.worker.process.seed_generators import make_seeder
    from raypar.worker.process.torch_state_guard import TorchStateGuard
    from raypar.worker.stage.layer_call import LayerCall, validation_pass_context
    from raypar.worker.stage.layer_tensors import StageTensors
    from raypar.worker.stage.stage_coordinate_in_errors import StageCoordinate

    layer, seeds, seed = Layer("a", effects.Base, ("x",), ("y",)), [], make_seeder(CPU)
    weights = StageTensors(Graph((layer,), output="y"), (layer,), {"a": effects.Base()}).of_layer(0)
    call = LayerCall(
        layer,
        coordinate=StageCoordinate(0, 0, None, "a"),
        seed_generators=lambda number: seeds.append(number) or seed(number),
        guard=TorchStateGuard(torch.get_num_threads()),
    )
    free = validation_pass_context(1, 0, 0, ["a"], effect_free=frozenset(["a"]))
    with torch.no_grad():
        call(free, weights, [torch.ones(2, effects.SIZE)])
        assert not seeds
        call(free, weights, [torch.ones(2, effects.SIZE).as_subclass(effects.Subclass)])
    assert seeds == [free.seeds["a"]]


# -- the bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [effects.Base, *effects.IN_TRAINING_ONLY, effects.Python, effects.OwnFunction])
@pytest.mark.parametrize("data", [effects.Rows, effects.NoisyRows])
def test_a_run_has_the_bits_that_it_has_where_everything_is_seeded(kind, data, monkeypatch):
    def found() -> tuple[object, ...]:
        job = Job(
            seed=3,
            steps=2,
            batch_size=4,
            microbatches=MICROBATCHES,
            model=ModelConfig(function=lambda: effects.two_layers(kind)),
            loss=LossConfig(function=nn.functional.mse_loss),
            data=DataConfig(function=data),
            validation=ValidationConfig(function=data, samples=4),
            optimizer=OptimizerConfig(function=torch.optim.SGD, args={"lr": 0.01}),
            metrics={
                name: MetricConfig(function=f"helpers.effects:{name}") for name in ("right", "noisy", "Total", "NoisyFinish")
            },
            metrics_every=1,
        )
        with OneProcessRun(job, ParallelPlan.mesh(layers=3), "1f1b") as run:
            steps = [(run.step(step)[0].loss, dict(run.metrics)) for step in range(2)]
            return *steps, run.validate(2), {name: copies[0].tolist() for name, copies in run.parameters().items()}

    quick = found()
    for place in ("stage.stage.has_no_effects", "metrics.metric.has_no_effects", "data.sample_reader.reads_without_effects"):
        monkeypatch.setattr(f"raypar.worker.{place}", lambda *given: False)
    assert repr(found()) == repr(quick)
