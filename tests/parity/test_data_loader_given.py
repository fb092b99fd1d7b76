"""A `DataLoader` in the place of a data set is taken apart: its parts are keys of the job, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ragged
from helpers.captured_jobs import check_run, graph_of
from helpers.ragged import Masked, Reader, Sentences, next_word
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

import raypar
from raypar.errors import RayparError
from raypar.job import Job
from raypar.plan import ParallelPlan
from raypar.worker.data.stream_loader import read_stream_microbatches
from raypar.worker.job_preflight import preflight


def trainer(data: Any, **more: Any) -> raypar.Trainer:
    return raypar.Trainer(
        **{
            "name": "given",
            "model": Reader,
            "loss": next_word,
            "data": data,
            "optimizer": ("torch.optim:SGD", {"lr": 0.1}),
            "steps": 2,
            "batch_size": 8,
            "microbatches": 4,
        }
        | more
    )


def section(loader: DataLoader[Any], **keys: Any) -> dict[str, Any]:
    return {"function": loader, "target": "labels", **keys}


@pytest.mark.ci
def test_a_loader_trains_as_its_parts_do():
    loader = DataLoader(Sentences(), batch_size=8, collate_fn=ragged.noisy, drop_last=True, pin_memory=False)
    job = trainer(section(loader)).job
    plain = trainer(
        {"function": Sentences, "target": "labels", "collate": ragged.noisy, "shuffle": False, "drop_last": True}
    ).job
    assert job.data.replace(function=Sentences) == plain.data and job.data.function() is loader.dataset
    check_run(job, ParallelPlan.mesh(pp=2, dp=2, layers=len(graph_of(job).layers)), "1f1b")


def test_what_the_loader_says_is_in_the_job():
    data = Masked()
    data_of = lambda loader, **keys: trainer(section(loader, **keys)).job.data  # noqa: E731
    assert (data_of(DataLoader(data, 8)).shuffle, data_of(DataLoader(data, 8, shuffle=True)).shuffle) == (False, True)
    assert (data_of(DataLoader(data, 8)).drop_last, data_of(DataLoader(data, 8, drop_last=True)).drop_last) == (False, True)
    assert data_of(DataLoader(data, 8)).collate is None and data_of(DataLoader(data, None)).collate is None
    assert data_of(DataLoader(data, 8, num_workers=3)).processes == 3
    own = {"processes": 0, "shuffle": "indexed", "pad": {"multiple": 4}}
    kept = data_of(DataLoader(data, 8, num_workers=3, collate_fn=ragged.longest), **own)
    assert (kept.processes, kept.shuffle, kept.collate) == (0, "indexed", None)
    validated = trainer(
        section(DataLoader(data, 8)), validation=DataLoader(data, 3, shuffle=True, collate_fn=ragged.longest)
    ).job
    assert validated.validation is not None and validated.validation.collate is not None


@pytest.mark.ci
def test_its_sampler_is_that_of_the_job():
    weighted = WeightedRandomSampler([1.0] * 23, 16)
    job = trainer(section(DataLoader(Masked(), 8, sampler=weighted), pad={})).job
    assert job.data.sampler is not None and preflight(job).samples == 23
    few = trainer(
        section(DataLoader(Masked(), 8, sampler=torch.utils.data.RandomSampler(Masked(), num_samples=16)), pad={})
    ).job
    assert few.data.sampler is not None
    kept = trainer(section(DataLoader(Masked(), 8, sampler=weighted), shuffle=False)).job.data
    assert (kept.sampler, kept.shuffle) == (None, False)
    with pytest.raises(RayparError, match="validation is a DataLoader with its own sampler, a WeightedRandomSampler"):
        trainer(Masked(), validation=DataLoader(Masked(), 8, sampler=weighted))


class Stream(torch.utils.data.IterableDataset[Any]):
    """Divides itself over the streams that read it."""

    def __iter__(self) -> Any:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        return (Sentences()[index] for index in range(info.id, len(Sentences()), info.num_workers))


@pytest.mark.ci
def test_a_loader_of_an_iterable_data_set_trains_as_its_parts_do():
    loader = DataLoader(Stream(), batch_size=8, collate_fn=ragged.longest, num_workers=3, pin_memory=False)
    job = preflight(trainer(section(loader)).job).job
    assert (job.data.streams, job.data.processes, job.data.shuffle) == (4, 0, False)
    plain = trainer({"function": Stream, "target": "labels", "collate": ragged.longest, "streams": 4, "shuffle": False}).job
    assert job.data.replace(function=Stream) == plain.data
    read = [read_stream_microbatches(spec, ("ids", "labels"), [(1, 0), (1, 3)]) for spec in (job, plain)]
    assert [one.digest for one in read[0]] == [one.digest for one in read[1]]
    windows = trainer(section(loader, shuffle_window=5)).job.data
    assert (windows.shuffle, windows.shuffle_window) == (True, 5)
    validated = trainer(section(DataLoader(Masked(), 8)), validation=DataLoader(Stream(), 3)).job
    assert validated.validation is not None
    returned = {"function": lambda: loader, "target": "labels", "collate": ragged.longest}
    assert preflight(trainer(returned).job).job.data.streams == 4
    with pytest.raises(RayparError, match=r"with the collate_fn longest\n  cure: name it in the job"):
        preflight(trainer({"function": lambda: loader, "target": "labels"}).job)


LOADERS = {
    "another size": (
        lambda: DataLoader(Masked(), 4),
        r"data is a DataLoader with batch_size 4, and the job's batch_size is 8\n  cure: give it batch",
    ),
    "a batch sampler": (lambda: DataLoader(Masked(), batch_sampler=[[0, 1], [2, 3]]), r"its own batch_sampler, a list, which"),
    "a generator": (
        lambda: DataLoader(Masked(), 8, shuffle=True, generator=torch.Generator()),
        r"its own generator, which .*\n  cure: leave it out: the order follows from `seed`",
    ),
    "worker_init_fn": (lambda: DataLoader(Masked(), 8, worker_init_fn=print), r"its own worker_init_fn, which"),
    "batches of a stream": (lambda: DataLoader(Stream(), None), r"with batch_size=None, so that the data set gives batches"),
    "the last batch of a stream": (
        lambda: DataLoader(Stream(), 8, drop_last=True),
        r"its own drop_last, which .*\n  cure: leave",
    ),
    "a generator of a stream": (lambda: DataLoader(Stream(), 8, generator=torch.Generator()), r"with its own generator, which"),
    "worker_init_fn of a stream": (
        lambda: DataLoader(Stream(), 8, worker_init_fn=print),
        r"(?s)its own worker_init_fn, .*get_worker",
    ),
    "another size of a stream": (lambda: DataLoader(Stream(), 4), r"with batch_size 4, and the job's batch_size is 8"),
}


@pytest.mark.parametrize(("make", "says"), LOADERS.values(), ids=LOADERS)
def test_what_no_key_stands_for_is_refused_by_name(make: Any, says: str):
    with pytest.raises(RayparError, match=says):
        trainer(section(make()))


def test_a_batch_sampler_as_pytorch_makes_it_is_taken():
    loader = DataLoader(Masked(), batch_sampler=BatchSampler(SequentialSampler(Masked()), 8, True))
    with pytest.raises(RayparError, match="batch_size"):
        trainer(section(loader), batch_size=12)


FUNCTIONS = {
    "shuffles not": (
        lambda: DataLoader(Sentences(), 8, collate_fn=ragged.longest),
        {"collate": ragged.longest},
        r"the function .* returned a DataLoader that does not shuffle, and data.shuffle is true",
    ),
    "collates": (
        lambda: DataLoader(Sentences(), 8, True, collate_fn=ragged.longest),
        {},
        r"with the collate_fn longest\n  cure: name it in the job, data.collate: module:longest",
    ),
    "drops": (
        lambda: DataLoader(Masked(), 8, True, drop_last=True),
        {"pad": {}},
        r"with drop_last=True, and data.drop_last is false",
    ),
    "another size": (
        lambda: DataLoader(Masked(), 4, True),
        {"pad": {}},
        r"is a DataLoader with batch_size 4, and the job's batch_size is 8",
    ),
    "a sampler": (
        lambda: DataLoader(Masked(), 4, sampler=SubsetRandomSampler(range(4))),
        {"pad": {}},
        r"with its own sampler, a SubsetRandomSampler",
    ),
}


@pytest.mark.parametrize(("function", "keys", "says"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_may_return_a_loader_that_says_what_the_job_says(function: Any, keys: dict[str, Any], says: str):
    with pytest.raises(RayparError, match=says):
        preflight(trainer({"function": function, "target": "labels", **keys}).job)


def agreeing() -> DataLoader[Any]:
    return DataLoader(Sentences(), 8, collate_fn=ragged.longest, num_workers=2)


@pytest.mark.ci
def test_and_its_data_set_is_trained_on():
    job: Job = trainer(
        {"function": agreeing, "target": "labels", "collate": ragged.longest, "shuffle": False},
        validation={"function": agreeing, "target": "labels"},
    ).job
    assert preflight(job).samples == preflight(job).validation_samples == 23


def test_a_validation_that_would_leave_samples_out_is_refused():
    with pytest.raises(
        RayparError, match="validation is a DataLoader with drop_last=True, and a validation reads every sample in order"
    ):
        trainer(Masked(), validation=DataLoader(Masked(), 8, drop_last=True))
