"""Digests of the values that a job's functions hold: which values count, and what a resumed run says of a change."""

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from raypar import Trainer
from raypar.actors.ray_row_stream import RayRowStream
from raypar.launch import launch_run
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.trainer_arguments import Given
from raypar.launch.user_code_digests import describe_code_change
from raypar.launch.user_value_digests import ITEMS, WHOLE_BYTES, value_digests_of_job


def warmup(steps: Any) -> Callable[[int], float]:
    return lambda step: step / float(steps)


def scaled(output: Any, target: Any, scale: float = 1.0) -> Any:
    return scale * (output - target).square().mean()


class Weighted(nn.Module):
    """A loss whose settings are neither numbers of its own nor buffers."""

    def __init__(self, weights: list[float], smoothing: float) -> None:
        super().__init__()
        self.weights, self.inner = weights, nn.CrossEntropyLoss(label_smoothing=smoothing)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> Any:
        return self.inner(output, target) * self.weights[0]


class Slotted:
    """An object without a dict, and with nothing in its text."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def method(self, step: int) -> float:
        return 1.0


class Held(Slotted):
    """One with a dict, and itself inside."""

    def __init__(self, value: Any) -> None:
        super().__init__(0)
        self.value, self.inside = value, [self]


def linear(value: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    nn.init.constant_(made.bias, 0.0)
    return made


def data(value: float, count: int = 8) -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.full((count, 4), value), torch.zeros(count))


def given(**changes: Any) -> dict[str, str]:
    base = {"model": nn.Linear, "loss": scaled, "data": Held, "steps": 1, "batch_size": 4, "microbatches": 2}
    return value_digests_of_job(Trainer(**{**base, **changes}).job)


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "closure": lambda v: {"lr_schedule": warmup(v)},
    "method": lambda v: {"lr_schedule": Slotted(v).method},
    "partial": lambda v: {"lr_schedule": functools.partial(scaled, target=warmup(v))},
    "loss module": lambda v: {"loss": Weighted([1.0, v], 0.1)},
    "module in a loss module": lambda v: {"loss": Weighted([1.0], v / 10)},
    "argument": lambda v: {"data": (Held, {"value": Held(v)})},
    "slots": lambda v: {"data": (Held, {"value": {"a": [Slotted(v)]}})},
    "weights of an argument": lambda v: {"data": (Held, {"value": linear(v)})},
    "array": lambda v: {"data": (Held, {"value": Slotted(numpy.full(3, v))})},
    "dtype": lambda v: {"data": (Held, {"value": Slotted(torch.float32 if v == 1 else torch.float64)})},
    "default": lambda v: {"loss": lambda output, target, by=v: output * by},
    "tensors of a data set": lambda v: {"data": data(v)},
    "large tensors of a data set": lambda v: {"data": data(v, WHOLE_BYTES // 8)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_function_holds_counts(name: str):
    then, same, other = (given(**CHANGES[name](value)) for value in (1, 1, 2))
    (key,) = CHANGES[name](1)
    assert then == same and describe_code_change(then, same) is None
    line = describe_code_change(then, other)
    assert line is not None
    assert line.startswith(
        f"values that the job's functions hold have changed since the checkpoint: values of {key}; the run goes"
    )


@pytest.mark.parametrize("then, now", [
    ({"data": (Held, {"value": (1, 2.0)})}, {"data": (Held, {"value": [1.0, 2]})}),
    ({"data": (Held, {"value": {"a": 1, "b": 2}})}, {"data": (Held, {"value": {"b": 2, "a": 1}})}),
    ({"model": nn.Sequential(linear(1), nn.ReLU())}, {"model": nn.Sequential(linear(2), nn.ReLU())}),
    ({"loss": "torch.nn.functional:mse_loss"}, {"loss": nn.functional.mse_loss}),
    ({"data": (Held, {"value": torch.Generator().manual_seed(1)})}, {"data": (Held, {"value": torch.Generator()})}),
], ids=["types", "order", "weights of the model", "name of a function", "generator"])  # fmt: skip
def test_what_decides_no_results_does_not_count(then: dict[str, Any], now: dict[str, Any]):
    assert given(**then) == given(**now)


def test_a_checkpoint_without_these_digests_tells_no_change():
    now = given()
    assert describe_code_change({"a.py": "1"}, {"a.py": "1"} | now) is None
    assert describe_code_change({"a.py": "1"} | now, {"a.py": "1"} | given(lr_schedule=warmup(1))) is None


def test_the_random_name_of_an_actor_of_ray_data_is_no_value_also_where_raypar_is_no_installed_package():
    one, other = (given(data=Given(RayRowStream(b"", "x: double", too_large=False))) for _ in range(2))
    assert one == other


def test_a_repr_that_raises_is_no_error():
    class Raises(dict[str, Any]):
        def items(self) -> Any:
            raise ValueError("no items")

    assert given(data=(Held, {"value": [Raises(a=1)]})) == given(data=(Held, {"value": [Raises(a=2)]}))


class Counted(list[Any]):
    """A data set that counts how many of its samples are looked at."""

    looked_at = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.looked_at += 1
        return super().__getitem__(index)


def test_of_a_long_list_of_samples_some_count_and_its_length(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Counted, "looked_at", 0)
    samples = Counted({"x": float(number)} for number in range(20_000))
    before = given(data=samples)
    assert 0 < Counted.looked_at <= 2 * ITEMS
    samples[-1] = {"x": -1.0}
    assert given(data=samples) != before
    samples[-1] = {"x": 19_999.0}
    assert given(data=samples) == before != given(data=Counted(samples[:-1]))
    mapping = {number: float(number) for number in range(20_000)}
    assert given(loss=functools.partial(scaled, scale=mapping)) != given(
        loss=functools.partial(scaled, scale={**mapping, -1: 0.0})
    )


def test_values_are_read_before_anything_calls_the_users_code(monkeypatch: pytest.MonkeyPatch):
    """A data set that keeps what it has read would differ at each resume, by the samples that the checks have read."""
    called: list[str] = []

    class End(Exception):
        """The checks are not made here."""

    def checks(job: Any, now_checking: Any) -> None:
        called.append("checks")
        raise End

    monkeypatch.setattr(launch_run, "contract_fields", lambda options: called.append("values"))
    monkeypatch.setattr("raypar.worker.job_preflight.preflight", checks)
    job = Trainer(model=nn.Linear, loss=scaled, data=Held, steps=1, batch_size=4, microbatches=2).job
    with pytest.raises(End):
        launch_run._check_and_plan(None, LaunchOptions(job, make_folder=lambda chosen: None), lambda event: None)  # type: ignore[arg-type, return-value]
    assert called == ["values", "checks"]
