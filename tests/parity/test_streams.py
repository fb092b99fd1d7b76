"""Iterable data: in every layout the samples, and the bits, of one process that reads the streams in turn."""

import functools
import re
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import reference, stream_cases, ugly_models
from torch.utils.data import DataLoader

from raypar.errors import ConfigError, RayparError, UserCodeError
from raypar.job import DataConfig, Job, LrScheduleConfig, MetricConfig, ModelConfig, ValidationConfig
from raypar.job.contract import contract_of_job
from raypar.launch.steps_of_epochs import with_steps_of_epochs
from raypar.model.graph import Graph
from raypar.plan import ParallelPlan
from raypar.worker.checkpoint.check_job_changes import changes_at_resume
from raypar.worker.checkpoint.contract_comparison import list_contract_differences, with_streams_of
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.stream_loader import OpenStreams, StreamLoader, read_stream_microbatches
from raypar.worker.data.stream_reader import StreamReader
from raypar.worker.data.stream_source import MadeDatasets, StreamSource
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import profile_job
from raypar.worker.process.thread_activity import describe_thread_activity, reads_samples
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(5)

STEPS = 5
SOURCES: dict[str, Any] = {
    "divided": stream_cases.Divided,
    "with set_epoch": stream_cases.Plain,
    "generator function": stream_cases.generated,
    "generator function, not divided": stream_cases.whole,
    "divided when it is called": stream_cases.divided_when_called,
    "in an order drawn when it is made": stream_cases.Drawn,
    "divided again when it is read": stream_cases.DividedTwice,
}
PLANS = {
    "1 worker": ParallelPlan.mesh(layers=8),
    "2 replicas": ParallelPlan.mesh(dp=2, layers=8),
    "4 stages": ParallelPlan.mesh(pp=4, layers=8),
    "2 x 2": ParallelPlan.mesh(dp=2, pp=2, layers=8),
    "uneven": ParallelPlan.of([1, 3, 2], layers=8),
    "chunks": ParallelPlan.mesh(pp=2, layers=8, chunks=2),
}


def job(source: Any, *, microbatches: int = 4, model: str = "plain", **data: Any) -> Job:
    made = ugly_models.job(model, microbatches=microbatches, steps=STEPS).replace(data=DataConfig(function=source, **data))
    return resolve_streams(made).job


@functools.cache
def in_one_process(source: Any) -> tuple[Job, Graph, reference.Result]:
    """A job that reads this source, its model, and what one process makes of it: once for all plans."""
    spec = job(source)
    graph = make_layer_graph(spec)
    return spec, graph, reference.train(graph, spec)


def run(spec: Job, plan: ParallelPlan, schedule: str = "1f1b") -> dict[tuple[int, int], Any]:
    """Trains under a plan, compares every bit with one process; (step, microbatch) -> samples that were read."""
    graph = make_layer_graph(spec)
    return compare(spec, graph, reference.train(graph, spec), plan, schedule)


def compare(
    spec: Job, graph: Graph, want: reference.Result, plan: ParallelPlan, schedule: str
) -> dict[tuple[int, int], list[Any]]:
    """See `run`."""
    read: dict[tuple[int, int], list[Any]] = {}
    with OneProcessRun(spec, plan, schedule, graph=graph) as here:
        for step in range(STEPS):
            reports = here.step(step)
            for core in here.cores:
                for microbatch in range(spec.microbatches):
                    if core.loader is not None and (found := core.loader.sample_positions(step, microbatch)):
                        assert read.setdefault((step, microbatch), found) == found
            assert {report.loss for report in reports} == {want.losses[step]}
            assert {report.norm for report in reports} == {want.norms[step]}
        found = here.parameters()
    for name, value in want.parameters.items():
        assert all(torch.equal(copy, value) for copy in found[name]), name
    assert read == want.samples
    return read


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_plan_gives_the_samples_and_bits_of_one_process(source, plan):
    spec, graph, want = in_one_process(source)
    assert spec.data.streams == (1 if source in (stream_cases.Plain, stream_cases.whole) else 4)
    compare(spec, graph, want, plan, "interleaved" if plan is PLANS["chunks"] else "1f1b")


@pytest.mark.parametrize(("streams", "microbatches"), [(1, 3), (2, 3), (3, 7), (5, 5)])
@pytest.mark.parametrize("window", [0, 4])
def test_any_number_of_streams_and_windows(streams, microbatches, window):
    spec = job(stream_cases.Divided, microbatches=microbatches, streams=streams, shuffle_window=window)
    read = run(spec, PLANS["2 x 2"])
    for stream in range(streams):
        given = [place for (_, m), places in sorted(read.items()) if m % streams == stream for place in places]
        first = [index for epoch, index in given if epoch == 0]
        length = len(range(stream, 23, streams))
        if len(given) > length:
            assert sorted(first) == list(range(length))
        assert (first == sorted(first)) == (window == 0 or len(first) < 2)


@pytest.mark.ci
def test_values_that_skip_stages_ties_and_a_counting_loss():
    def tokens() -> Any:
        data = ugly_models.Tokens()
        return (data[index] for index in stream_cases.part(len(data)))

    spec = job(tokens, model="tangled")
    layers = len(make_layer_graph(spec).layers)
    run(spec, ParallelPlan.mesh(dp=2, pp=2, layers=layers, recompute=range(layers)), "1f1b")
    run(spec, ParallelPlan.mesh(pp=3, layers=layers), "zb-h1")


def test_a_stream_is_what_the_worker_of_a_dataloader_gives():
    spec = job(stream_cases.Divided, streams=2, microbatches=2)
    read = read_stream_microbatches(spec, ("id",), [(step, m) for step in range(2) for m in range(2)])
    found = torch.cat([batch.fields["id"] for batch in read])
    loader = DataLoader(stream_cases.Divided(), batch_size=None, num_workers=2)
    by_worker = [row["id"] for row in loader]  # in turn: 0, 1, 0, ...
    sizes = [len(spec.batching.samples(m)) for m in range(2)]
    want = []
    for step in range(2):
        for m in range(2):
            want += by_worker[m::2][step * sizes[m] : (step + 1) * sizes[m]]
    assert found.tolist() == want


def test_only_the_first_stage_reads_a_stream():
    spec = job(stream_cases.Divided)
    with OneProcessRun(spec, PLANS["4 stages"], "1f1b") as here:
        here.step(0)
        assert [core.loader is not None for core in here.cores] == [True, False, False, False]


def test_an_aborted_step_is_not_read_again():
    spec = job(stream_cases.Divided)
    with OneProcessRun(spec, PLANS["1 worker"], "1f1b") as here:
        here.step(0)
        loader = here.cores[0].loader
        before = [loader.get(1, m) for m in range(4)]
        assert all(loader.get(1, m) is before[m] for m in range(4))


def loader_of(spec: Job, streams: OpenStreams) -> StreamLoader:
    return StreamLoader(spec.data, spec.batching, seed=spec.seed, fields=("x", "id"), own=range(4), streams=streams)


CURSORS: dict[str, tuple[Any, bool]] = {
    "a source that keeps its place": (stream_cases.Resuming, True),
    "a source that keeps no place": (stream_cases.Divided, False),
    "a source whose state is not all of it": (stream_cases.Buffered, False),
}


@pytest.mark.parametrize(("source", "fast"), CURSORS.values(), ids=CURSORS)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(("size", "done"), [(1000, 20), (41, 20), (41, 3)])
def test_who_goes_on_reads_the_same_and_with_cursors_little_of_it_twice(source, fast, window, size, done):
    spec = resolve_streams(unresolved(lambda: source(size), streams=2, shuffle_window=window)).job
    first, later = OpenStreams(wants_cursors=True), OpenStreams()
    reading = loader_of(spec, first)
    want = {}
    for step in range(done + 3):
        for microbatch in range(4):
            reading.get(step, microbatch)
            want[step, microbatch] = reading.sample_positions(step, microbatch), reading.digest(step, microbatch)
        reading.read_ahead(step + 1, range(4))  # as workers do while they wait for others
        report = reading.report(step)
        if step == done - 2:
            cursors, epochs = report.cursors, {stream: (mark,) for stream, mark in report.epochs.items()}
    assert bool(cursors) == (source is not stream_cases.Divided)
    later.learn(
        epochs, {k: (tuple(one),) for k, one in cursors.items()}, {(done - 1, m): want[done - 1, m][1] for m in range(4)}
    )
    again = loader_of(spec, later)
    for step in (done, done + 1):
        for microbatch in range(4):
            again.get(step, microbatch)
            assert (again.sample_positions(step, microbatch), again.digest(step, microbatch)) == want[step, microbatch]
    found = again.report(done + 1)
    assert found.again == {(done - 1, m): want[done - 1, m][1] for m in range(4)}
    skipped = max(reader.skipped for reader in later.readers.values())
    if fast:
        assert skipped <= 6 + window
    elif size == 1000:
        assert skipped > 50


def test_who_finds_a_place_by_reading_says_how_far_it_has_come_and_how_long_it_will_take():
    inside, over = threading.Event(), threading.Event()

    def slow() -> Any:
        for index in range(100):
            time.sleep(0.02 if index < 30 else 0)
            if index == 30:
                inside.set()
                over.wait(20)
            yield stream_cases.row(index)

    spec = unresolved(slow, streams=1)
    reader = StreamReader(StreamSource(spec.data, 0, 1, spec.seed), spec.seed)
    thread = threading.Thread(target=reader.seek, args=(60,), daemon=True)
    thread.start()
    assert inside.wait(20) and thread.ident is not None
    told = describe_thread_activity(thread.ident)
    assert reader.skipped == 30 and reads_samples(thread.ident)
    over.set()
    thread.join(20)
    assert re.fullmatch(r"reading sample 30 of stream 0 \(to find its place: 30 of 60, about 1 s left\)", told or ""), told
    assert reader.skipped == 60 and (reader.given, reader.seconds > 0.6) == (60, True)


def test_validation_reads_the_same_samples_in_each_pass():
    data = ValidationConfig(function=stream_cases.Plain, samples=10)
    with_validation = ugly_models.job("plain", steps=STEPS).replace(
        data=DataConfig(function=stream_cases.Divided), validation=data
    )
    spec = resolve_streams(with_validation).job
    assert spec.validation.streams == 1
    losses = set()
    for plan in (PLANS["1 worker"], PLANS["2 x 2"]):
        with OneProcessRun(spec, plan, "1f1b") as here:
            losses |= {here.validate(0), here.validate(0)}
    assert len(losses) == 1


def share_of_small(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A metric that reads a field of the batch that only the first stage needs."""
    return (batch["x"].sum(1) < output.squeeze(-1)).sum(), len(output)


@pytest.mark.ci
def test_metrics_of_a_validation_on_streams_get_the_fields_that_model_and_loss_read():
    spec = ugly_models.job("plain", steps=STEPS).replace(
        data=DataConfig(function=stream_cases.Divided),
        validation=ValidationConfig(function=stream_cases.Plain, samples=10),
        metrics={"small": MetricConfig(function=share_of_small)},
    )
    checked = preflight(spec)
    found = set()
    for plan in (PLANS["1 worker"], PLANS["4 stages"], PLANS["2 x 2"]):
        with OneProcessRun(checked.job, plan, "1f1b") as here:
            here.validate(0)
            found |= {tuple(here.metrics.items())}
    assert len(found) == 1, found


@pytest.mark.ci
def test_metrics_in_training_on_streams():
    spec = ugly_models.job("plain", steps=STEPS).replace(
        data=DataConfig(function=stream_cases.Divided),
        metrics={"small": MetricConfig(function=share_of_small)},
        metrics_every=1,
    )
    checked = preflight(spec)
    found = set()
    for plan in (PLANS["1 worker"], PLANS["4 stages"], PLANS["2 x 2"]):
        with OneProcessRun(checked.job, plan, "1f1b") as here:
            reports = here.step(0)
            found |= {tuple(report.metrics.items()) for report in reports if report.metrics}
    assert len(found) == 1, found


def unresolved(source: Any, **changes: Any) -> Job:
    data = {key: changes.pop(key) for key in ("streams", "shuffle_window", "processes") if key in changes}
    return ugly_models.job("plain", steps=STEPS).replace(data=DataConfig(function=source, **data), **changes)


class Sharded(stream_cases.Divided):
    num_shards = 2


REFUSED: dict[str, tuple[Job, str, str]] = {
    "all samples in each stream": (
        unresolved(stream_cases.Plain, streams=2),
        "streams 0 and 1 of 2 of data set .*Plain begin with the same 4 samples: every sample would be read 2 times",
        "get_worker_info.*set data.streams: 1",
    ),
    "more streams than samples": (
        unresolved(lambda: stream_cases.Divided(2), streams=3),
        "stream 2 of 3 .* has no samples",
        "set data.streams: 2",
    ),
    "more streams than shards": (unresolved(Sharded, streams=4), "data.streams is 4, .* has 2 shards", "set data.streams <= 2"),
    "more streams than microbatches": (
        unresolved(stream_cases.Divided, streams=5),
        "data.streams is 5, and a step has 4 microbatches: stream 4 would never be read",
        "set data.streams <= 4",
    ),
    "no samples": (unresolved(stream_cases.Empty), "stream 0 of 1 .* has no samples", "its path and split"),
    "one iterator": (unresolved(stream_cases.once), "an iterator that is read once", "give the function that makes it"),
    "processes": (unresolved(stream_cases.Divided, processes=2), "data.processes is 2", "leave data.processes out"),
    "streams of a map-style data set": (
        unresolved(ugly_models.Numbers, streams=2),
        "data.streams is 2, and data set .*Numbers is map-style",
        "leave data.streams out",
    ),
    "a window of a map-style data set": (
        unresolved(ugly_models.Numbers, shuffle_window=9),
        "data.shuffle_window is 9",
        "leave",
    ),
    "a validation without an end": (
        unresolved(stream_cases.Divided, validation=ValidationConfig(function=stream_cases.Divided)),
        "nothing says where a pass ends",
        "set validation.samples",
    ),
    "a set": (unresolved(lambda: {1, 2, 3}), "is a set, which cannot be read by sample id", "sorted"),
}


@pytest.mark.parametrize(("spec", "what", "cure"), REFUSED.values(), ids=REFUSED)
def test_what_would_not_be_exact_is_refused_before_the_run(spec, what, cure):
    with pytest.raises(RayparError) as found:
        resolve_streams(spec)
    assert re.search(what, found.value.what) and re.search(cure, found.value.cure), found.value


@pytest.mark.parametrize(("source", "streams"), [(Sharded, 2), (lambda: stream_cases.Divided(3), 2), (stream_cases.whole, 1)])
def test_by_default_as_many_streams_as_the_source_has_parts_and_microbatches_use(source, streams):
    resolved = resolve_streams(unresolved(source))
    assert resolved.job.data.streams == streams
    assert any("read as one stream" in line for line in resolved.notes) == (streams == 1)
    assert any("data.shuffle_window" in line for line in resolved.notes)


def test_an_error_of_the_source_names_stream_and_sample():
    with pytest.raises(UserCodeError, match=r"stream 3 of 4, sample 2 \(epoch 0\): the data set raised .*sample 11 is broken"):
        spec = unresolved(stream_cases.Raises, streams=4)
        resolve_streams(spec)


def test_a_sample_that_cannot_be_collated_names_its_stream():
    def ragged() -> Any:
        return ({"x": torch.zeros(6 + (index == 5)), "y": 0.0} for index in range(9))

    spec = unresolved(ragged, streams=1)
    with pytest.raises(RayparError, match=r"stream 0 of 1: sample 5 \(epoch 0\), field 'x': expected shape \(6,\)"):
        read_stream_microbatches(spec, ("x",), [(0, 0), (0, 1), (0, 2)])


def test_one_object_is_copied_for_each_stream():
    one = stream_cases.Resuming()
    spec = unresolved(lambda: one, streams=4)
    apart = unresolved(stream_cases.Resuming, streams=4)
    places = [(step, m) for step in range(4) for m in range(4)]
    found, want = (read_stream_microbatches(each, ("id",), places) for each in (spec, apart))
    assert [batch.digest for batch in found] == [batch.digest for batch in want]


def test_the_number_of_streams_and_the_window_are_in_the_contract_where_they_are_set():
    plain = contract_of_job(unresolved(ugly_models.Numbers))["data"]
    assert not {"streams", "shuffle_window"} & set(plain)
    made = contract_of_job(job(stream_cases.Divided, shuffle_window=8))["data"]
    assert (made["streams"], made["shuffle_window"]) == (4, 8)


def test_a_job_that_names_no_number_of_streams_is_resumed_with_that_of_its_checkpoint():
    spec = unresolved(stream_cases.Divided)
    manifest: Any = SimpleNamespace(contract=contract_of_job(resolve_streams(spec).job))
    assert list_contract_differences(manifest, spec) == []
    assert with_streams_of(manifest, spec).data.streams == 4
    other = unresolved(stream_cases.Divided, streams=2)
    assert [line.split(" was ")[0] for line in list_contract_differences(manifest, other)] == ["data"]


def test_nor_has_it_other_validation_sets_where_learning_rates_follow_them():
    sets = {"plain": {"function": stream_cases.Plain, "samples": 10}}
    spec = unresolved(stream_cases.Divided).replace(
        validation=ValidationConfig.model_validate({"every": 1, "sets": sets}),
        lr_schedule=LrScheduleConfig(function="torch.optim.lr_scheduler:ReduceLROnPlateau", metric="validation/plain/loss"),
    )
    manifest: Any = SimpleNamespace(contract=contract_of_job(resolve_streams(spec).job), steps_done=3)
    assert list_contract_differences(manifest, spec) == []
    resumed = with_streams_of(manifest, spec)
    assert resumed.validation.sets["plain"].streams == 1 and changes_at_resume(manifest, resumed).lines == ()
    other = spec.replace(validation=spec.validation.replace(every=2))
    assert [line.split(" was ")[0] for line in list_contract_differences(manifest, other)] == ["validation"]


def test_epochs_of_a_stream_are_refused():
    spec = unresolved(stream_cases.Divided, epochs=2.0).replace(steps=None)
    with pytest.raises(ConfigError, match=r"epochs is 2, and data set .*Divided is iterable") as found:
        with_steps_of_epochs(spec, lambda event: None)
    assert "samples x 2 / 11" in found.value.cure


class Captured(torch.nn.Module):
    """A module with a forward of its own, which is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(stream_cases.WIDTH, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.last = torch.nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


@pytest.mark.ci
@pytest.mark.parametrize("window", [0, 5])
def test_a_captured_module_reads_streams(window):
    spec = unresolved(stream_cases.Divided, shuffle_window=window, model=ModelConfig(function=Captured))
    checked = preflight(spec)
    layers = len(checked.graph.layers)
    run(checked.job, ParallelPlan.mesh(dp=2, pp=2, layers=layers))


def test_preflight_and_profile_of_streams():
    spec = ugly_models.job("plain", steps=STEPS).replace(data=DataConfig(function=stream_cases.Divided))
    checked = preflight(spec)
    assert checked.job.data.streams == 4 and checked.graph.handed_on == ("x", "y")
    assert any("neither the model nor the loss reads these fields of the samples: id" in line for line in checked.notes)
    profile = profile_job(checked.job, workers=2, graph=checked.graph)
    crossing = profile.crossing(PLANS["4 stages"])
    assert [(edge.src, edge.dst) for edge in crossing.edges if "y" in edge.values] == [(0, 3)]


def test_before_its_first_sample_a_data_set_is_not_asked_where_it_is():
    """Generators begin when their first sample is asked for: until then a data set tells the place where it was before."""
    spec = unresolved(stream_cases.Resuming, streams=1)
    source = StreamSource(spec.data, 0, 1, spec.seed)
    source.begin(0)
    assert source.state() == ""
    for _ in range(3):
        source.read()
    found = source.state()
    source.begin(0, 3, found)
    assert source.state() == found
    source.begin(1)
    assert source.state() == ""
    source.read()
    assert source.state() == '{"given": 1}'


def test_a_loaded_state_is_not_in_a_data_set_that_is_read_from_its_beginning_afterwards():
    given = stream_cases.Sticky(23)
    for make in (stream_cases.Sticky, lambda: given):
        spec, made = unresolved(make, streams=2), MadeDatasets()
        one, other = (StreamSource(spec.data, stream, 2, spec.seed, made=made) for stream in range(2))
        one.begin(0)
        first = [one.read() for _ in range(3)]
        one.begin(0, 5, '{"given": 9}')
        assert str(one.read()) != str(first[0])
        other.begin(0)
        assert other.read()[0]["x"] is not None
        one.begin(0)
        assert str([one.read() for _ in range(3)]) == str(first)
