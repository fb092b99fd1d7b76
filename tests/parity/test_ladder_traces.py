"""A captured model is recorded for all lengths of `data.pad.to` before the first step: no step waits for a new record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.captured_jobs import graph_of
from helpers.ragged import Masked, Reader, next_word
from torch import Tensor, nn

from raypar.errors import ConfigError, ModelError
from raypar.job import DataConfig, Job, LossConfig, ModelConfig, OptimizerConfig, PadConfig, ValidationConfig
from raypar.model.capture.module_graph import traces_of
from raypar.model.capture.trace_cache import MOST_TRACES, TraceCache
from raypar.plan import ParallelPlan
from raypar.planner.plan_report import processors_of_prediction
from raypar.worker.data.padding import Padding
from raypar.worker.data.trial_batches_of_padded_lengths import LadderShapes, lengthened
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.process_warm_up import warm_up_process
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.trace_batch_shapes_ahead import trace_ladder
from raypar.worker.worker_core import WorkerCore

pytestmark = pytest.mark.part(5)

LADDER = (4, 6, 9)


class Choosing(Reader):
    """As models of `transformers` it looks in Python whether the mask is full, and computes something else then."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids)
        padding = None if bool(mask.all()) else mask == 0
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return self.head(x)


class Two(nn.Module):
    """Reads sources and targets, each with lengths of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, source: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.embed(source).mean(1, keepdim=True)
        for block in self.blocks:
            x = x + block(x).cumsum(1)
        return self.head(x)


class Pairs(Masked):
    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {"source": [1] * (1 + index * 3 % 8), "ids": sample["ids"], "labels": sample["labels"]}


def job(name: str, model: Any = Reader, data: Any = Masked, **more: Any) -> Job:
    return Job(
        name=name,
        seed=3,
        steps=6,
        batch_size=10,
        microbatches=4,
        model=ModelConfig(function=model),
        loss=LossConfig(function=next_word),
        data=DataConfig(function=data, target="labels", pad=PadConfig(to=LADDER)),
        optimizer=OptimizerConfig(function="torch.optim:SGD", args={"lr": 1e-2}),
        **more,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the model trained, of each trace that was made."""
    found: list[bool] = []
    trace = TraceCache._trace

    def counted(self: TraceCache, fields: Any, *, training: bool) -> Any:
        found.append(training)
        return trace(self, fields, training=training)

    monkeypatch.setattr(TraceCache, "_trace", counted)
    yield found


@pytest.mark.ci
@pytest.mark.parametrize(
    ("model", "data"), [pytest.param(Reader, Masked, marks=pytest.mark.full), (Choosing, Masked), (Two, Pairs)]
)
def test_no_step_and_no_validation_makes_a_trace(model: Any, data: Any, made: list[bool]):
    spec = job("ahead", model, data, validation=ValidationConfig(function=data))
    graph = make_layer_graph(spec)
    with OneProcessRun(spec, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        before = len(made)
        for step in range(spec.steps):
            run.step(step)
            run.validate(step)
        assert len(made) == before, "a step has traced the model"
    with OneProcessRun(spec, ParallelPlan.mesh(pp=1, layers=len(graph.layers)), "1f1b", graph=graph) as run:
        run.step(0)
        assert len(made) == before, "a new plan has traced the model"
    lengths, sizes = len(LADDER), 2  # 2 or 3 samples
    shapes = lengths * sizes if model is not Two else lengths * lengths * sizes
    assert before >= 2 * shapes * (2 if model is Choosing else 1)


@pytest.mark.ci
def test_a_worker_that_joins_has_all_traces_before_it_gets_a_plan(made: list[bool]):
    spec = job("joining", Choosing, validation=ValidationConfig(function=Masked))
    core = WorkerCore(spec)
    warm_up_process(core, data=True)
    assert made.count(True) >= 2 * 6 and made.count(False) >= 2 * 6
    before = len(made)
    plan = ParallelPlan.mesh(pp=2, layers=len(core.graph.layers))
    with OneProcessRun(spec, plan, "1f1b", graph=core.graph) as run:
        run.step(0)
        run.validate(1)
    assert len(made) == before


@pytest.mark.ci
def test_traces_made_ahead_leave_room_for_others():
    spec = job("room")
    graph = make_layer_graph(spec)
    cache = traces_of(graph)
    assert cache is not None
    trace_ladder(spec, graph, spec.batching, training=True)
    assert cache._room == MOST_TRACES + 6 - 1  # the first batch had one of the shapes
    trace_ladder(spec, graph, spec.batching, training=True)
    assert cache._room == MOST_TRACES + 6 - 1


def test_a_trace_ahead_that_fails_takes_no_room(monkeypatch: pytest.MonkeyPatch):
    cache = traces_of(make_layer_graph(job("room")))
    assert cache is not None

    def fails(*given: Any, **named: Any) -> Any:
        raise ModelError("it cannot be traced", cure="none")

    monkeypatch.setattr(cache, "trace_of", fails)
    with pytest.raises(ModelError):
        cache.trace_ahead(cache.first_batch, training=True)
    assert cache._room == MOST_TRACES


def test_batches_of_all_shapes_are_made_of_the_first_microbatch():
    padding = Padding(PadConfig(to=(2, 4)), "labels")
    first = {
        "ids": torch.tensor([[5, 6, 7], [8, 0, 0]]),
        "labels": torch.tensor([[6, 7, 8], [9, -100, -100]]),
        "n": torch.ones(2),
    }
    shapes = LadderShapes(padding, {"ids": (3, 1), "labels": (3, 1)})
    assert shapes.groups == [["ids", "labels"]]
    found = list(shapes.batches(first, [3]))
    assert [list(one["ids"].shape) for one in found] == [[3, 2], [3, 2], [3, 4], [3, 4]]
    full, ragged = found[2:]
    assert full["ids"].tolist() == [[5, 6, 7, 5], [8, 8, 8, 8], [5, 6, 7, 5]] and full["n"].shape == (3,)
    assert ragged["ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0], [5, 6, 7, 0]]
    assert ragged["labels"].tolist()[0] == [6, 7, 8, -100]
    assert list(LadderShapes(Padding(PadConfig(to=tuple(range(1, 99))), "y"), {"ids": (1,)}).batches(first, [1])) == []


def test_fields_of_other_lengths_have_lengths_of_their_own():
    padding = Padding(PadConfig(to=(2, 4)), "labels")
    first = {"a": torch.ones(2, 4), "b": torch.ones(2, 4)}
    found = list(LadderShapes(padding, {"a": (3, 4), "b": (4, 4)}).batches(first, [2]))
    assert {(one["a"].shape[1], one["b"].shape[1]) for one in found} == {(2, 2), (2, 4), (4, 2), (4, 4)}


class Positions(Reader):
    """Has no place for more than 6 words, which it finds out in Python."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if ids.shape[1] > 6:
            raise IndexError("7 words")
        return super().forward(ids, mask)


@pytest.mark.ci
def test_a_length_that_the_model_refuses_is_said_before_the_run():
    """Samples of the first microbatches are shorter; the values of a batch made up for a shape may be to blame: no error."""

    def short() -> Any:
        return [Masked()[index] for index in (0, 7, 14, 21, 1, 8, 15) if len(Masked()[index]["ids"]) <= 6] * 4

    longer = ValidationConfig(function=short, pad=PadConfig(to=(6, 8)))
    found = preflight(job("too-long", Positions, short, validation=longer))
    line, of_validation = [line for line in found.notes if "recorded ahead" in line]
    assert "recorded ahead for ids [2, 8], mask [2, 8]" in of_validation
    assert "could not be recorded ahead for ids [2, 9], mask [2, 9]: the forward of Positions, given ids [2, 9]" in line


def test_the_largest_shape_of_the_ladder_is_made_of_any_batch():
    padding = Padding(PadConfig(to=(4, 8), fields=("x", "labels")), "labels")
    batch = {"x": torch.ones(2, 3), "y": torch.ones(2, 3), "labels": torch.ones(2, 4, dtype=torch.int64)}
    found = lengthened(batch, padding)
    assert [list(value.shape) for value in found.values()] == [[2, 8], [2, 3], [2, 8]]
    assert found["labels"][0].tolist() == [1] * 4 + [-100] * 4 and found["x"][0].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert lengthened(batch, None) == batch
    assert lengthened(batch, Padding(PadConfig(multiple=8), "labels"), 9)["x"].shape == (2, 16)


@pytest.mark.ci
def test_the_planner_measures_the_largest_shape_of_the_ladder_and_says_so():
    spec, whole = job("measured"), job("whole")
    spec = spec.replace(data=spec.data.replace(pad=PadConfig(to=(9, 64))))
    whole = whole.replace(data=whole.data.replace(pad=PadConfig(to=(64,))))
    found, at_most = (profile_job(each, workers=2, graph=graph_of(each)) for each in (spec, whole))
    assert [each.activation_bytes for each in found.layers] == [each.activation_bytes for each in at_most.layers]
    assert found.kept == at_most.kept and found.lengths == "microbatches of length 64"
    assert processors_of_prediction(None, 2, found.lengths) == "a processor for each worker, microbatches of length 64"


def test_a_ladder_beyond_what_the_model_takes_is_refused_when_it_is_measured():
    spec = job("beyond", Limited)
    spec = spec.replace(data=spec.data.replace(pad=PadConfig(to=(4, 6, 9, 20))))
    with pytest.raises(
        ConfigError, match=r"data.pad.to ends with 20, and the model does not take .*ids \[2, 20\].*index out of range"
    ):
        profile_job(spec, workers=2, graph=graph_of(spec))


class Limited(Reader):
    """Has embeddings for 9 places, as GPT-2 has for 1,024."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(9, 16)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, src_key_padding_mask=mask == 0)
        return self.head(x)
