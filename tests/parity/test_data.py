"""Data by sample id: the same bits wherever and whenever a microbatch is read, and one clear error for what is wrong."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import data_cases, ugly_models
from helpers.data_cases import Noisy, Of
from helpers.generations import Generations
from helpers.torch_flesh import TorchJob

from raypar.errors import ConfigError, DataError, UserCodeError
from raypar.job import DataConfig, ValidationConfig
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches
from raypar.plan.seeds import seed_of
from raypar.worker.data.data_process_pool import DataProcesses
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.sample_reader import SampleReader
from raypar.worker.data.user_dataset import dataset_size, make_dataset
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.process.torch_state_guard import TorchStateGuard

pytestmark = pytest.mark.part(4)

ALL = ("x", "noise", "draw", "id")
CUT = Microbatches(3, 0, 7)


def loader(
    dataset: Any, *, fields: tuple[str, ...] = ALL, batching: Microbatches = CUT, seed: int = 4, **spec: Any
) -> MicrobatchLoader:
    options = {key: spec.pop(key) for key in ("readers", "timeout_s", "shared") if key in spec}
    order = SampleOrder(seed, len(dataset))
    described = DataConfig(**{"function": type(dataset), **spec})
    return MicrobatchLoader(
        dataset, described, order, batching, seed=seed, fields=fields, processes=options.pop("shared", None), **options
    )


def expected(step: int, microbatch: int, size: int = 13, seed: int = 4) -> dict[str, torch.Tensor]:
    """Rule 1 of the contract, read again."""
    rows = []
    for position in range(step * 7 + microbatch * 7 // 3, step * 7 + (microbatch + 1) * 7 // 3):
        epoch, entry = divmod(position, size)
        index = torch.randperm(size, generator=torch.Generator().manual_seed(seed_of(seed, "epoch", epoch)))[entry].item()
        here = seed_of(seed, "sample", epoch, index) % 2**32
        random.seed(here)
        numpy.random.seed(here)
        torch.manual_seed(here)
        rows.append(Noisy(size)[index])
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in ALL}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("size", [1, 2, 5, 13])
def test_every_epoch_has_every_sample_once_in_an_order_of_its_own(size: int):
    order = SampleOrder(3, size)
    stream = order.ids(0, 5 * size)
    assert Counter(stream) == {(epoch, index): 1 for epoch in range(5) for index in range(size)}
    assert [place for start in range(0, 5 * size, 3) for place in order.ids(start, min(start + 3, 5 * size))] == stream
    assert order.ids(7, 7) == [] and SampleOrder(3, size).ids(3 * size, 3 * size + 1) == stream[3 * size : 3 * size + 1]
    assert SampleOrder(3, size, shuffle=False).ids(size - 1, size + 1) == [(0, size - 1), (1, 0)]


def test_a_step_may_reach_over_many_epochs():
    assert len(SampleOrder(3, 2).ids(1, 12)) == 11


def test_samples_are_those_of_the_contract_in_any_order_of_asking():
    read = loader(Noisy())
    asked = [(0, 0), (0, 1), (0, 2), (1, 0), (5, 2), (0, 1), (1, 2)]
    assert all(same(read.get(*place), expected(*place)) for place in asked)


@pytest.mark.ci
def test_data_processes_give_the_same_bits_and_end_with_the_loader():
    read = loader(Noisy(), function="helpers.data_cases:Noisy", processes=2)
    for step in (0, 1, 2):
        read.prefetch(step, (0, 2))
    assert all(same(read.get(*place), expected(*place)) for place in [(0, 0), (0, 2), (0, 1), (1, 0), (1, 2), (2, 0), (0, 0)])
    processes = pids(read._processes)
    assert all(alive(pid) for pid in processes)
    read.close()
    read.close()
    assert all_end(processes, within_s=5)


@pytest.mark.ci
def test_a_data_process_that_ignores_sigterm_ends_with_its_worker_too(tmp_path: Path):
    processes = DataProcesses(
        DataConfig(function="helpers.data_cases:Stubborn", args={"folder": str(tmp_path)}, processes=1), 4
    )
    loader(Noisy(), function="helpers.data_cases:Stubborn", processes=1, shared=processes).prefetch(0, (0,))
    there, deadline = pids(processes), time.monotonic() + 60
    while not (tmp_path / str(there[0])).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    processes.close()
    assert all_end(there, within_s=5)


@pytest.mark.ci
def test_a_process_that_is_forked_from_the_worker_and_ends_leaves_the_data_processes_alone():
    processes = DataProcesses(DataConfig(function="helpers.data_cases:Noisy", processes=1), 4)
    read = loader(Noisy(), function="helpers.data_cases:Noisy", processes=1, shared=processes)
    try:
        assert same(read.get(0, 0), expected(0, 0))
        if not (forked := os.fork()):
            try:
                processes.close()  # as `atexit` does
            finally:
                os._exit(0)
        os.waitpid(forked, 0)
        assert same(read.get(0, 1), expected(0, 1))
    finally:
        processes.close()


def test_data_processes_have_no_semaphore_with_a_name_that_would_stay_where_all_are_killed_at_once():
    """As Ray does with the processes of a worker that ends."""
    processes = DataProcesses(DataConfig(function="helpers.data_cases:Noisy", processes=1), 4)
    try:
        read = loader(Noisy(), function="helpers.data_cases:Noisy", processes=1, shared=processes)
        assert same(read.get(0, 0), expected(0, 0))
        assert not [pid for pid in [os.getpid(), *pids(processes)] if "sem.mp-" in Path(f"/proc/{pid}/maps").read_text()]
    finally:
        processes.close()


def pids(processes: DataProcesses | None) -> list[int]:
    assert processes is not None and processes._processes
    return [one.process.pid for one in processes._processes]


@pytest.mark.full  # that they outlive plans: the next test
def test_data_processes_outlive_plans_with_what_they_have_read_and_give_another_plan_other_fields():
    spec = DataConfig(function="helpers.data_cases:Noisy", processes=1)
    processes = DataProcesses(spec, 4)
    first = loader(Noisy(), function=spec.function, processes=1, shared=processes)
    assert same(first.get(0, 0), expected(0, 0))
    first.prefetch(0, (1, 2))
    there = pids(processes)
    first.close()
    second = loader(Noisy(), function=spec.function, processes=1, shared=processes)
    assert {read[:2] for read in processes._pending} == {(0, 1), (0, 2)}
    assert same(second.get(0, 2), expected(0, 2)) and same(second.get(1, 0), expected(1, 0))
    third = loader(Noisy(), fields=("id",), function=spec.function, processes=1, shared=processes)
    assert torch.equal(third.get(1, 0)["id"], expected(1, 0)["id"]) and pids(processes) == there
    second.prefetch(2, ())
    assert not processes._pending, "what nobody has taken is let go"
    processes.close()
    assert all_end(there, within_s=5)


@pytest.mark.ci
def test_the_data_processes_of_a_worker_are_the_same_under_each_of_its_plans():
    spec = ugly_models.job("plain", steps=3)
    spec = spec.replace(data=spec.data.replace(function="helpers.ugly_models:Numbers", processes=1))
    work = TorchJob(spec, make_layer_graph(spec))
    run = Generations(work)
    try:
        run.adopt(ParallelPlan.mesh(dp=2, layers=8), [0, 1], 0)
        run.step(0)
        before = [pids(body.core.loader._processes) for body in run.bodies.values()]
        run.adopt(ParallelPlan.mesh(pp=2, layers=8), [1, 0], 1)
        run.step(1)
        loaders = [body.core.loader for body in run.bodies.values()]
        after = [pids(loader._processes) for loader in loaders if isinstance(loader, MicrobatchLoader)]
        assert after and all(found in before for found in after)
    finally:
        for body in run.bodies.values():
            body.core.close()
    assert all_end([pid for each in before for pid in each], within_s=5)


def test_batches_are_fresh_and_only_the_fields_asked_for():
    read = loader(Noisy(), fields=("id",))
    first = read.get(0, 0)
    first["id"].zero_()
    assert list(first) == ["id"] and torch.equal(read.get(0, 0)["id"], expected(0, 0)["id"])


def test_a_microbatch_with_two_readers_is_read_once_and_then_let_go():
    seen: Counter[int] = Counter()

    class Counted(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            seen[index] += 1
            return super().__getitem__(index)

    read = loader(Counted(), readers=2, batching=Microbatches(1, 0, 13))
    assert same(read.get(0, 0), read.get(0, 0)) and set(seen.values()) == {1}
    assert not read._kept
    read.get(0, 0)
    read.get(1, 0)
    assert list(read._kept) == [(1, 0)]


def test_what_is_read_ahead_is_the_same_is_bounded_and_fails_only_when_it_is_asked_for(monkeypatch):
    ahead = loader(Noisy(13), readers=2)
    reads = Counter()
    read = type(ahead._reader).read
    monkeypatch.setattr(
        type(ahead._reader), "read", lambda self, places, at: reads.update([tuple(places)]) or read(self, places, at)
    )
    ahead.read_ahead(1, [0, 1, 2])
    for microbatch in range(3):
        assert all(same(ahead.get(1, microbatch), expected(1, microbatch)) for _ in range(2))
    assert set(reads.values()) == {1} and not ahead._kept
    monkeypatch.setattr("raypar.worker.data.microbatch_loader.AHEAD_BYTES", 1)
    ahead.read_ahead(2, [0, 1, 2])
    assert list(ahead._kept) == [(2, 0)]
    broken = loader(Of([{"x": 1.0}] * 3 + [{}] * 4), fields=("x",))
    broken.read_ahead(0, [0, 1, 2])
    with pytest.raises(DataError, match="no field 'x'"):
        [broken.get(0, microbatch) for microbatch in range(3)]


def test_tuples_get_names_and_numbers_become_tensors():
    pairs = Of([(float(i), i, [i, i]) for i in range(7)])
    batch = loader(pairs, fields=("x", "y", "z")).get(0, 0)
    assert [(b.dtype, tuple(b.shape)) for b in batch.values()] == [
        (torch.float32, (2,)),
        (torch.int64, (2,)),
        (torch.int64, (2, 2)),
    ]
    assert list(loader(pairs, fields=("b", "c"), names=("a", "b", "c")).get(0, 0)) == ["b", "c"]
    assert loader(Of([3.0] * 7), fields=("x",)).get(0, 0)["x"].tolist() == [3.0, 3.0]


def test_a_data_set_that_promises_to_draw_nothing_is_not_seeded():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader(data_cases.Calm(), fields=("x",)).get(0, 0)
    assert torch.equal(torch.get_rng_state(), before)


def wrong_shape(odd: Any, at: int = 4) -> Of:
    return Of([{"x": odd if i == at else torch.zeros(2)} for i in range(7)])


class Endless(torch.utils.data.IterableDataset):
    def __len__(self) -> int:
        return 7

    def __iter__(self):
        return iter(range(7))


WHOLE = Microbatches(1, 0, 7)
BAD = {
    "a misspelt field": (
        lambda: loader(Of([{"change": 1.0, "series": 2.0}] * 7), fields=("chnge",)),
        "has no field 'chnge', only change, series\n  cure: if 'change' is meant, correct 'chnge' where it is named",
    ),
    "no such field": (lambda: loader(Of([(1, 2)] * 7), fields=("z",)), "has no field 'z', only x, y"),
    "a dict without the field": (lambda: loader(Of([{"a": 1}] * 7), fields=("x",)), "has no field 'x', only a"),
    "more values than names": (lambda: loader(Of([(1, 2, 3, 4)] * 7), fields=("x",)), "4 fields, but names for 3: x, y, z"),
    "another shape": (
        lambda: loader(wrong_shape(torch.zeros(3)), fields=("x",), batching=WHOLE),
        r"sample 4 \(epoch 0\), field 'x': expected shape \(2,\) torch.float32 as in sample \d of .* found shape \(3,\)",
    ),
    "another dtype": (lambda: loader(wrong_shape(torch.zeros(2).long()), fields=("x",), batching=WHOLE), "torch.int64"),
    "text": (lambda: loader(Noisy(), fields=("text",)), "field 'text': a str cannot be made a tensor"),
    "empty": (
        lambda: MicrobatchLoader(Of([]), DataConfig(function=Of), SampleOrder(1, 1), CUT, seed=1, fields=("x",)),
        "is empty",
    ),
    "an iterable one with a length": (lambda: loader(Endless(), fields=("x",)), "cannot be read by sample id"),
    "an iterable one": (lambda: dataset_size(data_cases.Stream()), "cannot be read by sample id"),
    "no samples": (lambda: SampleOrder(1, 0), "a data set of 0 samples"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_data_is_said(case: str):
    make, said = BAD[case]
    with pytest.raises(DataError, match=said) as found:
        made = make()
        made.get(0, 0)
    assert found.value.cure


def test_a_data_set_that_raises_is_reported_with_sample_epoch_and_traceback():
    read = loader(data_cases.Raises(), batching=Microbatches(1, 0, 13))
    with pytest.raises(UserCodeError, match=r"sample 5 \(epoch 1\)") as found:
        read.get(1, 0)
    assert "no such picture" in found.value.what and "data_cases.py" in found.value.what


class Short:
    """Has fewer samples than its length says. `shrinks`: it says so once only."""

    def __init__(self, samples: Any, length: int, *, shrinks: bool = False) -> None:
        self.samples, self.length, self.shrinks = samples, length, shrinks

    def __len__(self) -> int:
        length = self.length
        if self.shrinks:
            self.length = len(self.samples)
        return length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


@pytest.mark.parametrize("samples", [[{"x": 1.0}] * 4, {i: {"x": 1.0} for i in range(4)}], ids=["IndexError", "KeyError"])
def test_a_sample_that_is_not_there_is_reported_with_the_length_and_the_ids_that_are_read(samples: Any):
    order = SampleOrder(4, 6)
    missing = next(index for _, index in order.ids(0, 6) if index >= 4)
    reader = SampleReader(Short(samples, 6), (), ("x",), 4)
    with pytest.raises(UserCodeError) as found:
        reader.read(order.ids(0, 6))
    assert f"sample {missing} (epoch 0): the data set raised" in found.value.what
    assert "\n  its length is 6, so samples 0 to 5 are read\n" in found.value.what
    assert found.value.cure == (
        f"read it by itself: dataset[{missing}]; if there are fewer samples, let __len__ return their number"
    )


def test_a_data_set_that_has_become_shorter_is_reported_with_its_length_and_what_length_it_shall_have():
    dataset = Short([{"x": 1.0}] * 4, 6, shrinks=True)
    order = SampleOrder(4, len(dataset))
    with pytest.raises(UserCodeError) as found:
        SampleReader(dataset, (), ("x",), 4).read(order.ids(0, 6))
    assert "\n  its length is 4, so samples 0 to 3 are read\n" in found.value.what
    assert "the length was larger when the run began: let __len__ return the same in every process" in found.value.cure


def test_an_error_of_a_sample_that_is_there_says_nothing_of_the_length():
    class Untitled(Of):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)["title"]

    with pytest.raises(UserCodeError, match="KeyError: 'title'") as found:
        SampleReader(Untitled([{"x": 1.0}]), (), ("x",), 4).read([(0, 0)])
    assert "its length" not in found.value.what


def test_a_factory_that_raises_or_is_not_there():
    with pytest.raises(UserCodeError, match="broken_factory raised RuntimeError: no data here"):
        make_dataset(DataConfig(function="helpers.data_cases:broken_factory"))
    with pytest.raises(ConfigError, match=r"cannot import 'helpers.data_cases:none'"):
        make_dataset(DataConfig(function="helpers.data_cases:none"))


@pytest.mark.parametrize(
    "name, kind, said",
    [
        (
            "Raises",
            UserCodeError,
            r"step 1, microbatch 0 \(samples [\d, ]+\.\.\. 13 in all\): sample 5 \(epoch 0\).*no such picture",
        ),
        ("Slow", UserCodeError, r"did not give step 1, microbatch 0 \(samples .* within 0.5 s, read by 1 process\n"),
        ("Dies", UserCodeError, "a data process died while it read step 1, microbatch 0"),
    ],
)
def test_failures_in_data_processes_name_step_microbatch_and_samples(name: str, kind: type[Exception], said: str):
    read = loader(
        getattr(data_cases, name)(),
        function=f"helpers.data_cases:{name}",
        batching=Microbatches(1, 0, 13),
        processes=1,
        timeout_s=0.5 if name == "Slow" else 60,
    )
    try:
        with pytest.raises(kind) as found:
            read.get(0, 0)
        assert re.search(said, str(found.value), re.DOTALL)
    finally:
        read.close()


PARENT = """
import sys, time
from helpers.data_cases import Leaves
from raypar.plan import ParallelPlan
from raypar.plan.microbatches import Microbatches
from raypar.worker.data.data_process_pool import DataProcesses
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.sample_order import SampleOrder
from raypar.job import DataConfig, ValidationConfig
if __name__ == "__main__":
    folder = sys.argv[1]
    spec = DataConfig(function="helpers.data_cases:Leaves", args={"folder": folder}, processes=1)
    MicrobatchLoader(Leaves(folder), spec, SampleOrder(1, 13), Microbatches(1, 0, 4), seed=1, fields=("x",)).get(0, 0)
    print("read", flush=True)
    time.sleep(60)
"""


@pytest.mark.ci
@pytest.mark.parametrize("ends", ["closed", "worker is gone"])
def test_processes_that_a_data_set_has_started_end_with_its_data_process(ends: str, tmp_path: Path):
    spec = DataConfig(function="helpers.data_cases:Managed", args={"folder": str(tmp_path)}, processes=1)
    processes = DataProcesses(spec, 4)
    loader(Noisy(), function="helpers.data_cases:Managed", processes=1, shared=processes).get(0, 0)
    (started,) = [int(path.name) for path in tmp_path.iterdir()]
    assert alive(started)
    if ends == "worker is gone":
        for one in processes._processes:
            one._connection.close()
        assert all_end([started], within_s=5)
    processes.close()
    assert all_end([started], within_s=5)


@pytest.mark.ci
def test_data_processes_end_when_their_worker_is_killed(tmp_path: Path):
    """At once: Python's own end takes a second of a processor, while other workers recover."""
    script, pids = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    pids.mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    with subprocess.Popen(
        [sys.executable, str(script), str(pids)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"read\n"
        parent.send_signal(signal.SIGKILL)
    children = [int(path.name) for path in pids.iterdir() if path.name.isdecimal()]
    assert children
    assert all_end(children, within_s=5)
    assert not (pids / "unloads").exists()


LOADING_PARENT = """
import os, sys, time
from raypar.worker.data.data_process_pool import DataProcesses
from raypar.job import DataConfig
if __name__ == "__main__":
    os.environ["LOADED_BY"] = str(os.getpid())
    import long_to_load
    processes = DataProcesses(DataConfig(function=long_to_load.Samples, processes=1), 1)
    processes.request((0, 0, ("x",)), [], ())
    time.sleep(60)
"""
LONG_TO_LOAD = """
import os, pathlib, time
if os.environ["LOADED_BY"] != str(os.getpid()):
    pathlib.Path(os.environ["LOADING"]).write_text(str(os.getpid()))
    time.sleep(30)
class Samples: ...
"""


@pytest.mark.ci
def test_a_data_process_that_still_imports_the_data_sets_module_ends_when_its_worker_is_killed(tmp_path: Path):
    """It lived until all was imported: torch alone takes half a minute on a busy machine."""
    (tmp_path / "parent.py").write_text(LOADING_PARENT)
    (tmp_path / "long_to_load.py").write_text(LONG_TO_LOAD)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "LOADING": str(tmp_path / "loading")}
    with subprocess.Popen([sys.executable, str(tmp_path / "parent.py")], stderr=subprocess.DEVNULL, env=env) as parent:
        deadline = time.monotonic() + 60
        while not (loading := tmp_path / "loading").exists() or not loading.read_text():
            assert time.monotonic() < deadline and parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    assert all_end([int(loading.read_text())], within_s=5)


def all_end(pids: list[int], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.02)
    return not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    """A zombie that nobody reaps counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Kept(ugly_models.Numbers):
    """Gives what it keeps."""

    def __init__(self, change: Any) -> None:
        self.rows, self.change = [{"x": torch.ones(ugly_models.SEQ), "y": 0.5} for _ in range(9)], change
        self.dice, self.reads = random.Random(1), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return self.change(self, self.rows[index])


DEPENDS_ON_THE_PROCESS: dict[str, Any] = {
    "a generator of its own": lambda kept, row: {**row, "x": row["x"] + kept.dice.random()},
    "a counter": lambda kept, row: {**row, "y": float(kept.reads)},
    "writes into what it keeps": lambda kept, row: {**row, "x": row["x"].mul_(1.5)},
}


@pytest.mark.parametrize("change", DEPENDS_ON_THE_PROCESS.values(), ids=DEPENDS_ON_THE_PROCESS)
@pytest.mark.parametrize("key", ["data", "validation"])
def test_samples_that_depend_on_the_process_that_reads_them_are_refused(key: str, change: Any):
    """Stages and replicas read the same samples, and workers read them again after a failure."""
    given = {"function": Kept, "args": {"change": change}}
    job = ugly_models.job("plain").replace(**{key: DataConfig(**given) if key == "data" else ValidationConfig(**given)})
    place = "" if key == "data" else r"validation: "
    words = r"asked twice for samples \d, \d under the same seed, gave field '[xy]' with other numbers.*\n  cure: let a"
    with pytest.raises(DataError, match=f"^{place}data set Kept, {words}"):
        preflight(job)


@pytest.mark.parametrize("last", [3, 2**63 - 1, -(2**63), torch.tensor(7)], ids=str)
def test_integers_are_made_one_tensor_at_once_with_the_bits_of_stacking(last: object, monkeypatch: pytest.MonkeyPatch):
    values = [1, -2, last]
    wanted = torch.stack([torch.as_tensor(value) for value in values])
    samples, made = Of([{"label": value} for value in values]), list[object]()
    as_tensor = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda value: (made.append(value), as_tensor(value))[1])
    found = SampleReader(samples, (), ("label",), 4).read([(0, 0), (0, 1), (0, 2)])["label"]
    assert torch.equal(found, wanted)
    assert (found.dtype, found.stride()) == (torch.int64, (1,))
    assert bool(made) == (isinstance(last, torch.Tensor) or last == -(2**63)), "one by one where not all are integers"


@pytest.mark.parametrize("odd", [True, 2.5], ids=str)
def test_a_value_that_is_no_integer_among_integers_is_refused(odd: object):
    with pytest.raises(DataError, match=r"sample 2 \(epoch 0\), field 'label': expected shape"):
        SampleReader(Of([{"label": value} for value in (1, -2, odd)]), (), ("label",), 4).read([(0, 0), (0, 1), (0, 2)])


class FillsOneDict:
    """Gives the same dict, with the same list in it, filled again for each sample."""

    def __init__(self) -> None:
        self.sample = {"x": [0.0, 0.0], "y": -1}

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, object]:
        self.sample["x"][1] = self.sample["y"] = index
        return self.sample


def test_a_data_set_may_fill_the_same_dict_again_for_each_sample():
    for guard in (None, TorchStateGuard(threads=torch.get_num_threads())):
        reader = SampleReader(FillsOneDict(), (), ("x", "y"), seed=0, guard=guard)
        for _ in range(2):
            read = reader.read([(0, 3), (0, 5), (0, 1)])
            assert read["x"].tolist() == [[0, 3], [0, 5], [0, 1]] and read["y"].tolist() == [3, 5, 1]
