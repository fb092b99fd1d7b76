"""Rows that are computed once for all workers that read: each gets all, in order, also after what computes them is gone."""

from __future__ import annotations

import copy
import pickle
import sys
import time
import types
from collections.abc import Generator, Iterator
from typing import Any

import pyarrow
import pytest
import ray
import torch
from ray.exceptions import ActorUnavailableError, RayActorError
from test_ray_rows import Dataset

import raypar
from raypar.actors import ray_row_stream
from raypar.actors.ray_row_stream import RayRowActor, RayRowStream
from raypar.data import shared_rows
from raypar.data.ray_rows import blocks_in_order
from raypar.data.shared_rows import FedRowIterator, FedRows, RowFeed, RowsLostError
from raypar.errors import DataError, InputError
from raypar.job import DataConfig, ValidationConfig
from raypar.launch.forward_run import make_forward_job
from raypar.launch.predict_run import make_prediction_job
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.stream_loader import _line_about_skipping
from raypar.worker.data.stream_reader import StreamReader
from raypar.worker.data.stream_source import StreamSource

SAMPLES = [{"x": [i / 7, 1.0], "y": [i % 3 / 3], "name": f"{i}"} for i in range(50)]


class Fed:
    """A data set whose rows a feed hands out; `lose` them when these rows are asked for."""

    raypar_thread_safe = True
    num_shards = 1

    def __init__(self, lose: tuple[int, ...] = ()) -> None:
        self.lose, self.passes, self.given = list(lose), 0, 0
        self.feed = RowFeed(self.rows)

    def rows(self) -> Generator[pyarrow.Table]:
        self.passes += 1
        for block in blocks_in_order(Dataset(SAMPLES, 7)):
            self.given += 1
            yield block

    def read(self, row: int, *, with_content: bool) -> FedRows:
        if self.lose and row >= self.lose[0]:
            self.lose.pop(0)
            self.feed.close()
            self.feed = RowFeed(self.rows)
            raise RowsLostError("the actor is gone", cure="none")
        return self.feed.read(row, with_content=with_content)

    def __iter__(self) -> FedRowIterator:
        return FedRowIterator(self.read, lambda: "the actor")


class Plain:
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


def reader(dataset: Any, window: int) -> StreamReader:
    return StreamReader(StreamSource(DataConfig(function=lambda: dataset, streams=1), 0, 1, 7), 7, window)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "CHUNK_BYTES", 100)
    monkeypatch.setattr(shared_rows, "ANSWER_S", 0.05)


def test_rows_are_those_of_the_data_set_from_any_place_on_and_after_losses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_rows, "KEPT_BYTES", 1000)
    for window in (1, 4):
        plain = reader(Plain(), window)
        plain.seek(0)
        want = [plain.read() for _ in range(120)]
        for start, lose in ((0, ()), (0, (0, 9, 9, 40, 3)), (37, ()), (38, (20, 45)), (61, ()), (103, (0, 30))):
            fed = reader(Fed(lose), window)
            fed.seek(start)
            assert [fed.read() for _ in range(start, 120)] == want[start:], (window, start, lose)
            fed.seek(17)
            assert fed.read() == want[17]


def test_skipping_reads_no_row_and_says_how_far_it_is():
    fed = Fed()
    found = reader(fed, 4)
    found.source.read = None  # type: ignore[assignment,method-assign]
    found.seek(44)
    assert found.skipped == 44


def test_readers_share_a_pass_which_waits_for_them_and_gives_up_what_is_long_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_rows, "AHEAD_BYTES", 1000)
    monkeypatch.setattr(shared_rows, "KEPT_BYTES", 1000)
    fed = Fed()
    readers = [reader(fed, 1) for _ in range(3)]
    for one in readers:
        one.source._made.original = fed  # type: ignore[assignment]
        monkeypatch.setattr(copy, "deepcopy", lambda value: value)
        one.seek(0)
    assert [one.read()[1] for one in readers] == SAMPLES[:1] * 3
    time.sleep(0.1)
    assert fed.passes == 1 and fed.given < 5, "back pressure"
    assert [[one.read()[1] for _ in range(49)] for one in readers[:2]] == [SAMPLES[1:]] * 2
    assert fed.passes <= 2
    assert readers[2].read()[1] == SAMPLES[1] and fed.passes <= 3


def test_a_pass_that_ends_does_not_take_the_order_from_one_that_begins(monkeypatch: pytest.MonkeyPatch):
    given = Dataset(SAMPLES, 7)
    library = types.SimpleNamespace(Dataset=types.SimpleNamespace(deserialize_lineage=lambda lineage: given))
    monkeypatch.setitem(sys.modules, "ray.data", library)
    monkeypatch.setattr(ray, "data", library, raising=False)
    RayRowActor(b"")
    first, second = blocks_in_order(given), blocks_in_order(given)
    for one in (first, second):
        next(one)
    first.close()
    assert given.context.execution_options.preserve_order is True


def test_rows_that_do_not_come_are_an_error_that_names_the_actor_and_what_computing_raises_is_told(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(shared_rows, "SILENT_S", 1.4)

    def stuck() -> Generator[pyarrow.Table]:
        yield pyarrow.Table.from_pylist(SAMPLES[:7])
        time.sleep(5)

    def broken() -> Generator[pyarrow.Table]:
        yield pyarrow.Table.from_pylist(SAMPLES[:7])
        raise KeyError("column z")

    rows = FedRowIterator(RowFeed(stuck).read, lambda: "the actor rows-1")
    with pytest.raises(DataError, match=r"the actor rows-1 has computed 7 rows, and none for 1 s; row 7 is waited for\n  c"):
        list(rows)
    with pytest.raises(KeyError, match="column z"):
        list(FedRowIterator(RowFeed(broken).read, lambda: ""))


def test_a_reader_whose_pass_is_given_up_for_others_waits_for_the_new_one_and_for_ever_new_ones_it_does_not(
    monkeypatch: pytest.MonkeyPatch,
):
    """`has computed 40 rows, and none for 120 s`, while the new pass was computing them."""
    monkeypatch.setattr(shared_rows, "SILENT_S", 0.3)
    content = shared_rows._as_bytes(pyarrow.Table.from_pylist(SAMPLES[45:46]))

    def answers(*reached: int) -> FedRowIterator:
        given = iter([*(FedRows(one, False) for one in reached), FedRows(46, False, 45, content)])

        def read(row: int, *, with_content: bool) -> FedRows:
            time.sleep(0.02)
            return next(given)

        rows = FedRowIterator(read, lambda: "the actor rows-1")
        rows._row = 45
        return rows

    assert next(answers(40, *range(3, 40))) == SAMPLES[45]
    said = r"the actor rows-1 has begun 6 times anew, for readers at other places; row 45 is waited for\n  cure"
    with pytest.raises(DataError, match=said):
        next(answers(*[40, 3] * 20))


def job(data: Any, **more: Any) -> Any:
    settings: dict[str, Any] = {"loss": torch.nn.functional.mse_loss, "steps": 1, "batch_size": 4, "microbatches": 2}
    return raypar.Trainer(model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 1)), data=data, **settings, **more).job


class OfFiles(Dataset):
    """One that other processes can compute."""

    files = True


def test_a_data_set_is_a_stream_where_that_is_asked_for_or_it_is_too_large(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RayRowStream, "_read", lambda self, row, with_content: Fed().read(row, with_content=with_content))
    for form in ({"streams": 1}, {"shuffle_window": 3}):
        given = OfFiles(SAMPLES, 7)
        found = resolve_streams(job({"function": given, **form}))
        assert found.job.data.streams == 1 and isinstance(found.job.data.call(), RayRowStream) and given.given == 0
    monkeypatch.setattr("raypar.data.ray_rows.MOST_BYTES", 200)
    found = resolve_streams(job(OfFiles(SAMPLES, 7)))
    assert found.job.data.streams == 1 and "an actor computes its rows in order" in found.notes[0]
    assert (
        found.job.data.contract_text == "Given(value=RayRowStream(x: list<item: double>, y: list<item: double>, name: string))"
    )
    with pytest.raises(InputError, match=r"data\.streams is 2, and data set RayRowStream has 1 shard"):
        resolve_streams(job({"function": OfFiles(SAMPLES, 7), "streams": 2}))
    monkeypatch.setattr(OfFiles, "files", False)
    with pytest.raises(InputError, match=r"nobody could compute its rows again after a failure\n  cure: write it once by"):
        job({"function": OfFiles(SAMPLES, 7), "streams": 1})


def test_a_job_whose_rows_ray_data_computes_while_it_runs_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OfFiles, "files", True)
    given = {"function": OfFiles(SAMPLES, 7), "streams": 1}
    stream, reads_ray_data_as_stream = job(given), raypar.actors.ray_row_stream.reads_ray_data_as_stream
    assert reads_ray_data_as_stream(stream) and not reads_ray_data_as_stream(job(SAMPLES))
    validated = job(SAMPLES).replace(validation=ValidationConfig.model_construct(**dict(stream.data), every=1, samples=4))
    assert reads_ray_data_as_stream(validated)
    assert reads_ray_data_as_stream(make_prediction_job(make_forward_job(validated, 0, validated.validation), 4, None))


def test_the_line_about_rows_that_are_skipped_fits_ray_data():
    rows, plain, keeping = RayRowStream(b"", "x: int", too_large=False), Plain(), KeepsPlace()
    lines = []
    for made in (rows, plain, keeping):
        source = StreamSource(DataConfig(function=lambda made=made: made, streams=1), 0, 1, 7)
        source._dataset = made
        lines.append(_line_about_skipping(12, 3.0, [source]))
    assert all(line.startswith("12 samples of a stream were read again to find its place, in 3.0 s; ") for line in lines)
    assert "write_parquet" in lines[0] and "state_dict" not in lines[0]
    assert "the data set has no state_dict" in lines[1] and "did not lead there" in lines[2]


class KeepsPlace(Plain):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_each_run_has_an_actor_of_its_own_and_copies_in_a_process_share_it():
    one = RayRowStream(b"", "x: double", too_large=False)
    assert copy.deepcopy(one)._name == one._name != pickle.loads(pickle.dumps(one))._name
    assert repr(pickle.loads(pickle.dumps(one))) == "RayRowStream(x: double)"


def test_an_actor_whose_node_may_be_lost_is_asked_until_ray_knows_it(monkeypatch: pytest.MonkeyPatch):
    """It takes Ray longer to give up a node than five attempts."""
    answers: list[Any] = [ActorUnavailableError("reset by peer", None)] * 30 + [RayActorError(), FedRows(7, False, 0, b"rows")]
    started = []

    def get(_: object, timeout: float) -> FedRows:
        if isinstance(answers[0], Exception):
            raise answers.pop(0)
        return answers.pop(0)

    def start(self: RayRowStream) -> Any:
        started.append(self)
        return types.SimpleNamespace(read=types.SimpleNamespace(remote=lambda row, with_content: None))

    monkeypatch.setattr(ray_row_stream.ray, "get", get)
    monkeypatch.setattr(ray_row_stream, "UNREACHABLE_PAUSE_S", 0.0)
    monkeypatch.setattr(RayRowStream, "_start", start)
    stream = RayRowStream(b"", "x: double", too_large=False)
    with pytest.raises(RowsLostError):
        stream._read(3, with_content=True)
    assert len(answers) == 1 and len(started) == 1
    assert stream._read(3, with_content=True).content == b"rows" and len(started) == 2
    monkeypatch.setattr(ray_row_stream, "SILENT_S", 0.05)
    answers[:] = [ActorUnavailableError("reset by peer", None)] * 10**6
    with pytest.raises(DataError, match=r"could not be reached for 0 s: .*reset by peer.*\n  cure: look at the network"):
        stream._read(3, with_content=True)
