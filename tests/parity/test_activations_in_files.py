"""`plan.activations_in`: what stays in memory is what the sheet says; layouts and views of what is written; what a full, slow
or shared folder does."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import limited_activations, reference, ugly_models
from helpers.live_storages import LiveStorages
from helpers.offloaded_layouts import small_memory_offloaded, with_rest_offloaded
from helpers.sheet_checks import expected_after_each
from test_recomputation_memory import job_and_graph
from test_recomputed_layers import KINDS, Overwrites, Slope, in_one_process, job, model
from torch import nn

from raypar.errors import CommTimeout, ConfigError, ModelError, UserCodeError
from raypar.job import Job, PlanConfig
from raypar.launch import check_offload_folder as check_offload_folder_module
from raypar.launch.check_offload_folder import check_offload_folder, lines_about_offloading
from raypar.plan import MicrobatchRouting, ParallelPlan, offloading
from raypar.plan.recomputation import resolve_recomputed_layers
from raypar.planner.model_profile import ModelProfile
from raypar.planner.offloaded_activations import bytes_in_place, unwritten_limits
from raypar.planner.predicted_step import kept_bytes_by_kind
from raypar.schedule import registry
from raypar.schedule.instructions import ACTIVATIONS, FETCHED, RESIDENT, WRITTEN
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.measure_profile import one_microbatch_of_each_size, profile_layers, read_microbatches
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.stage.activation_offloading import OffloadedActivations, StageOffload
from raypar.worker.state.activation_file import ActivationFile, Room

GPIPE = ParallelPlan.mesh(layers=4).with_offload(range(4))


@pytest.fixture(autouse=True)
def small_memory() -> Iterator[None]:
    with small_memory_offloaded():
        yield


def in_folder(spec: Job, folder: Path) -> Job:
    return spec.replace(plan=PlanConfig(activations_in=str(folder)))


@contextmanager
def traffic_of_files() -> Iterator[tuple[Counter[ActivationFile], Counter[ActivationFile]]]:
    """Context that yields, by file, how many bytes are written and how many are read in it."""
    written, read = Counter[ActivationFile](), Counter[ActivationFile]()
    begin_writing, begin_reading = ActivationFile.begin_writing, ActivationFile.begin_reading

    def writes(file, memory):
        written[file] += memory.nbytes
        return begin_writing(file, memory)

    def reads(file, room, nbytes):
        read[file] += nbytes
        return begin_reading(file, room, nbytes)

    with (
        mock.patch.object(ActivationFile, "begin_writing", writes),
        mock.patch.object(ActivationFile, "begin_reading", reads),
    ):
        yield written, read


# -- memory --------------------------------------------------------------------------------------------------------------------


@pytest.mark.part(4)
@pytest.mark.parametrize("policy", ["none", ("1", "2", "5")], ids=str)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-v"])
def test_what_is_alive_after_each_instruction_is_what_the_sheet_says(schedule, policy, tmp_path, monkeypatch):
    spec, graph = job_and_graph("plain")
    plan = ParallelPlan.mesh(
        pp=2,
        layers=len(graph.layers),
        chunks=registry.resolve_chunks_per_worker(schedule),
        placement=registry.placement_of_schedule(schedule),
        recompute=resolve_recomputed_layers(policy, [layer.name for layer in graph.layers]),
    )
    plan = with_rest_offloaded(plan)
    routing = MicrobatchRouting(plan, spec.batching)
    orders = registry.build_schedule(schedule, routing)
    measured = profile_layers(spec, graph, read_microbatches(spec, graph, one_microbatch_of_each_size(spec.batching)))
    profile = ModelProfile(measured.layers, outputs=measured.outputs, kept=measured.kept)
    sizes = kept_bytes_by_kind(profile, routing, orders)

    storages = LiveStorages()
    storages.watch(monkeypatch)
    files: list[ActivationFile] = []
    count = LiveStorages._count

    def count_when_written(self, interpreter, instruction):
        files[interpreter.rank].settle()
        return count(self, interpreter, instruction)

    monkeypatch.setattr(LiveStorages, "_count", count_when_written)
    with OneProcessRun(in_folder(spec, tmp_path), plan, orders, graph=graph) as run:
        files += [core.activation_place for core in run.cores]
        run.step(0)
        storages.kept.clear()
        with traffic_of_files() as (written, read):
            run.step(1)
        for order, file in zip(orders, files, strict=True):
            of_step = sum(
                profile.offloaded_bytes(plan, i.stage, len(spec.batching.samples(i.microbatch)))
                for i in order
                if RESIDENT in i.allocates
            )
            assert written[file] == of_step >= read[file], "each byte once"
        unwritten = max(unwritten_limits(profile, plan))
        for core, in_files in zip(run.cores, bytes_in_place(profile, routing, orders), strict=True):
            held = core.memory()
            assert held["unwritten"] <= unwritten and held["activation_files"] <= in_files + (1 << 16)  # in whole pages
    for rank, order in enumerate(orders):
        found = [(kept.after, kept.total, kept.stash) for kept in storages.kept if kept.rank == rank]
        assert found == expected_after_each(order, sizes)


@pytest.mark.parametrize("layers", ["all", "but one", "two apart"])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("gpipe", marks=pytest.mark.ci), "zb-h1"])
def test_inside_a_backward_those_of_two_layers_are_there_as_the_sheet_says(schedule, layers, tmp_path, monkeypatch):
    spec, graph = job_and_graph("plain")
    count = len(graph.layers)
    offloaded = {"all": range(count), "but one": [i for i in range(count) if i != 3], "two apart": (1, 4, count - 1)}[layers]
    plan = ParallelPlan.mesh(layers=count).with_offload(offloaded)
    orders = registry.build_schedule(schedule, routing := MicrobatchRouting(plan, spec.batching))
    measured = profile_layers(spec, graph, read_microbatches(spec, graph, one_microbatch_of_each_size(spec.batching)))
    profile = ModelProfile(measured.layers, outputs=measured.outputs, kept=measured.kept)
    sizes = kept_bytes_by_kind(profile, routing, orders)
    most: dict[str, int] = {}
    enter = OffloadedActivations.enter

    def watched(self: OffloadedActivations, position: int) -> None:
        enter(self, position)
        here = {id(m): m for saved in self._of_layer.values() for m in saved if m.restored is not None or m.memory.is_back}
        most[self.coordinate] = max(most.get(self.coordinate, 0), sum(m.memory.nbytes for m in here.values()))

    monkeypatch.setattr(OffloadedActivations, "enter", watched)
    with OneProcessRun(in_folder(spec, tmp_path), plan, orders, graph=graph) as run:
        run.step(0)
    assert len(most) == spec.batching.count
    for microbatch in range(spec.batching.count):
        of_kind = {kind: by_stage[0][microbatch] for kind, by_stage in sizes.items()}
        there = most[f"of microbatch {microbatch} on stage 0"]
        assert 0 < there < 0.7 * of_kind[WRITTEN]
        if schedule != "zb-h1":  # there what weight gradients need is counted, too
            assert there + of_kind[RESIDENT] == of_kind[ACTIVATIONS] + of_kind[FETCHED]


def test_a_gradient_that_goes_back_once_more_is_refused(tmp_path: Path):
    activations, _ = taken(tmp_path)
    saved = activations.take(torch.randn(1000), 0, ())
    activations.enter(0)
    assert saved.tensor("activations").shape == (1000,)
    activations.enter(-1)
    with pytest.raises(ModelError, match="a gradient goes back once more through activations which were let go"):
        saved.tensor("activations")


def limited(schedule: str, folder: str, room_mib: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "helpers.limited_activations", schedule, folder, str(room_mib)]
    places = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=180)


@pytest.mark.ci
@pytest.mark.parametrize("schedule", limited_activations.CASES)
def test_a_model_whose_activations_exceed_the_limit_trains_with_them_in_files_alone(schedule, tmp_path: Path):
    """Those of twelve microbatches, or of one."""
    case = limited_activations.CASES[schedule]
    assert case.room_mib < 0.7 * case.kept_mib
    given = ((str(tmp_path), case.room_mib), ("-", case.room_mib), ("-", 0))
    files, without, free = (limited(schedule, folder, room) for folder, room in given)
    assert files.returncode == free.returncode == 0, files.stderr
    assert files.stdout == free.stdout and not any(tmp_path.iterdir())
    assert without.returncode and "can't allocate memory" in without.stderr


# -- what is written -----------------------------------------------------------------------------------------------------------


def taken(folder: Path) -> tuple[OffloadedActivations, ActivationFile]:
    file = ActivationFile(str(folder), 20.0)
    return OffloadedActivations(StageOffload((0,), file), "of microbatch 0 on stage 0"), file


def test_memory_is_written_once_and_read_with_the_layout_and_views_that_it_had(tmp_path: Path):
    activations, file = taken(tmp_path)
    base = torch.randn(6, 40, 8)
    views = [base, base[2:, ::3], base.transpose(0, 2), base.reshape(-1)[7:100].view(torch.int32)]
    saved = [activations.take(each, 0, ()) for each in views]
    want = [each.clone() for each in views]
    assert all(saved) and len({id(each.storage) for each in saved}) == 1
    file.settle()
    assert file.nbytes == -(-base.nbytes // 4096) * 4096
    layouts = [(each.shape, each.stride(), each.storage_offset(), each.dtype) for each in views]
    del base, views
    activations.fetch()
    again = [each.tensor("these") for each in saved]
    assert [(each.shape, each.stride(), each.storage_offset(), each.dtype) for each in again] == layouts
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    assert len({each.untyped_storage().data_ptr() for each in again}) == 1 and again[0].data_ptr() % 64 == 0


def test_what_something_else_still_holds_is_not_read_again(tmp_path: Path):
    activations, file = taken(tmp_path)
    kept, gone = torch.randn(1000), torch.randn(1000)
    saved = [activations.take(each, 0, ()) for each in (kept, gone)]
    file.settle()
    del gone
    activations.fetch()
    first, second = (each.tensor("these") for each in saved)
    assert first.data_ptr() == kept.data_ptr() and second.data_ptr() != kept.data_ptr()


def test_what_is_small_a_parameters_or_no_plain_memory_stays(tmp_path: Path):
    activations, _ = taken(tmp_path)
    weight = nn.Parameter(torch.randn(100, 100))
    assert activations.take(weight.detach().t(), 0, {weight.data_ptr()}) is None
    assert activations.take(torch.randn(4), 0, ()) is None
    assert activations.take(torch.randn(1000, dtype=torch.complex64).conj(), 0, ()) is None
    assert activations.take(torch.randn(100, 100).to_sparse(), 0, ()) is None
    assert activations.take(torch.randn(1001)[1:].clone().as_subclass(nn.Parameter), 0, ()) is None
    assert activations.take(torch.randn(1000), 0, ()) is not None


def test_room_in_the_file_is_used_again_and_neighbours_become_one(tmp_path: Path):
    file = ActivationFile(str(tmp_path), 20.0)
    written = [file.write(torch.zeros(nbytes, dtype=torch.uint8)) for nbytes in (4096, 5000, 4096, 12288)]
    assert [each.room for each in written] == [Room(0, 4096), Room(4096, 8192), Room(12288, 4096), Room(16384, 12288)]
    file.settle()
    for number in (0, 2, 1):
        written[number].release()
    assert file._free == [Room(0, 16384)] and file.nbytes == 28672
    assert file.write(torch.zeros(9000, dtype=torch.uint8)).room == Room(0, 12288)
    assert file._free == [Room(12288, 4096)]
    assert file.write(torch.zeros(4097, dtype=torch.uint8)).room.start == 28672


def test_what_is_not_written_yet_when_it_is_asked_for_is_not_read(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(offloading, "MOST_UNWRITTEN_BYTES", 1 << 20)
    file, may_write, pwrite = ActivationFile(str(tmp_path), 20.0), threading.Event(), os.pwrite

    def late(*given):
        may_write.wait(20)
        return pwrite(*given)

    monkeypatch.setattr(os, "pwrite", late)
    first, second = torch.arange(1000.0), torch.arange(500.0)
    saved = [file.write(each.view(torch.uint8)) for each in (first, second)]
    for each in saved:
        each.fetch()
    assert [each.wait("these").data_ptr() for each in saved] == [first.data_ptr(), second.data_ptr()]
    may_write.set()
    file.settle()
    assert not file._unwritten and file._free == [Room(0, 8192)]


def test_little_is_unwritten_at_a_time(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(offloading, "MOST_UNWRITTEN_BYTES", 10_000)
    file, may_write, pwrite, most = ActivationFile(str(tmp_path), 0.2), threading.Event(), os.pwrite, []

    def late(*given):
        may_write.wait(20)
        most.append(file._unwritten)
        return pwrite(*given)

    monkeypatch.setattr(os, "pwrite", late)
    kept = [file.write(torch.zeros(8_000, dtype=torch.uint8))]
    with pytest.raises(CommTimeout, match=r"0.0 MiB of activations were not written to plan.activations_in .* within 0.2 s"):
        file.write(torch.zeros(8_000, dtype=torch.uint8))
    may_write.set()
    kept += [file.write(torch.zeros(8_000, dtype=torch.uint8)) for _ in range(4)]
    file.settle()
    assert set(most) == {8_000} and len(kept) == 5


@pytest.mark.part(4)
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_as_people_write_them_has_the_bits_of_one_that_is_kept(name, tmp_path: Path):
    spec, graph, want = in_one_process(name)
    with OneProcessRun(in_folder(spec, tmp_path), GPIPE, "gpipe", graph=graph) as run:
        for step in range(3):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}
            found = run.gradients()
            assert all(torch.equal(copy, g) for n, g in want.gradients[step].items() for copy in found[n])
        assert run.cores[0].activation_place.nbytes


def test_a_layer_that_writes_into_what_is_saved_is_refused_offloaded_too(tmp_path: Path):
    with (
        OneProcessRun(in_folder(job(lambda: model(Overwrites)), tmp_path), GPIPE, "gpipe") as run,
        pytest.raises(UserCodeError, match="modified by an inplace operation"),
    ):
        run.step(0)


def test_a_step_that_was_broken_off_leaves_nothing_in_the_file(tmp_path: Path):
    spec = ugly_models.job("plain", microbatches=4, steps=3)
    graph = make_layer_graph(spec)
    want = reference.train(graph, spec)
    plan = ParallelPlan.mesh(layers=len(graph.layers)).with_offload(range(len(graph.layers)))
    (batch,) = read_microbatches(spec, graph, [0])
    with OneProcessRun(in_folder(spec, tmp_path), plan, "gpipe", graph=graph) as run:
        (core,) = run.cores
        (stage,) = core.stages.values()
        stage.begin_step(7)
        stage.offloaded_forward(0, {}, batch)
        stage.offloaded_forward(1, {}, batch)
        stage.fetch(0)
        stage.begin_step(0)
        file = core.activation_place
        file.settle()
        assert file.nbytes and file._free == [Room(0, file.nbytes)]
        for step in range(3):
            assert {r.loss for r in run.step(step)} == {want.losses[step]}
        file.settle()
        assert file._free == [Room(0, file.nbytes)]


# -- bad input -----------------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_of_two_lines(tmp_path: Path, monkeypatch):
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spec, graph, _ = in_one_process("noise")
    with OneProcessRun(in_folder(spec, tmp_path), GPIPE, "gpipe", graph=graph) as run:
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"plan.activations_in .* does not keep activations: .*No space") as error:
            run.step(0)
    assert error.value.cure.startswith("give a folder that workers can write to, on a local disk with room for those of all")


def test_what_cannot_be_written_is_an_error_of_the_next_that_is(tmp_path: Path, monkeypatch):
    file = ActivationFile(str(tmp_path), 20.0)

    def broken(*given):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", broken)
    kept = file.write(torch.arange(100.0).view(torch.uint8))
    file.settle()
    kept.fetch()
    assert torch.equal(kept.wait("these").view(torch.float32), torch.arange(100.0)), "it is still there"
    with pytest.raises(ConfigError, match=r"does not keep activations: .*Input/output error"):
        file.write(torch.zeros(4096, dtype=torch.uint8))


def test_a_disk_that_does_not_answer_is_an_error_that_names_what_was_waited_for(tmp_path: Path, monkeypatch):
    spec, graph, _ = in_one_process("noise")
    preadv, answers = os.preadv, threading.Event()

    def silent(*given):
        answers.wait(20)
        return preadv(*given)

    with OneProcessRun(in_folder(spec, tmp_path), GPIPE, "gpipe", graph=graph) as run:
        run.cores[0].activation_place._timeout_s = 0.2
        monkeypatch.setattr(os, "preadv", silent)
        words = (
            r"activations of layer '\d', of microbatch \d on stage 0, were not read from plan.activations_in .* within 0.2 s"
        )
        with pytest.raises(CommTimeout, match=words):
            run.step(0)
        answers.set()


def test_it_is_known_before_the_run_what_the_folders_have_no_room_for(tmp_path: Path, monkeypatch):
    spec, _, _ = in_one_process("noise")
    sheets = [SimpleNamespace(optimizer_files=5 << 20, activation_files=4 << 20)] * 2
    both = spec.replace(plan=PlanConfig(activations_in=str(tmp_path), optimizer_in=str(tmp_path / "other")))
    check_offload_folder(both, sheets)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=17 << 20))
    check_offload_folder(in_folder(spec, tmp_path), sheets)
    with pytest.raises(ConfigError, match=r"activations_in .* has room for 17 MiB, and all workers together offload 18 MiB"):
        check_offload_folder(both, sheets)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"plan.activations_in .*here takes none of activations: .*directory"):
        check_offload_folder(in_folder(spec, tmp_path / "file" / "here"), sheets)
    with pytest.raises(ConfigError, match=r"plan.activations_in .*file is a file, and activations would lie in a folder"):
        check_offload_folder(in_folder(spec, tmp_path / "file"), sheets)


def test_a_folder_that_another_run_uses_or_that_is_on_another_machine_is_refused(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(check_offload_folder_module, "ENDING_S", 0.0)
    spec, _, _ = in_one_process("noise")
    file = ActivationFile(str(tmp_path), 20.0)
    written = file.write(torch.zeros(4096, dtype=torch.uint8))
    with pytest.raises(ConfigError, match=r"plan.activations_in .* is used by another run on this machine"):
        check_offload_folder(in_folder(spec, tmp_path), ())
    file.settle()
    file.close()
    del file, written
    check_offload_folder(in_folder(spec, tmp_path), ())
    mounts = tmp_path / "mounts"
    mounts.write_text(f"36 35 98:0 / / rw - ext4 /dev/a rw\n37 36 0:50 / {tmp_path}/far rw shared:1 - nfs4 server:/x rw\n")
    monkeypatch.setattr("raypar.files.file_systems.MOUNTS", str(mounts))
    with (
        pytest.raises(ConfigError, match=r"plan.activations_in .*far is on another machine \(nfs4\)"),
        OneProcessRun(in_folder(spec, tmp_path / "far"), GPIPE, "gpipe"),
    ):
        pass
    mounts.write_text("36 35 0:9 / / rw - tmpfs none rw\n")
    (line,) = lines_about_offloading(in_folder(spec, tmp_path))
    assert line.startswith(f"plan.activations_in {tmp_path} is on tmpfs here, whose files lie in memory: nothing is saved")


def test_a_layer_that_refuses_hooks_is_refused_before_the_run(tmp_path: Path):
    spec = in_folder(job(lambda: model(Slope)), tmp_path)
    graph = make_layer_graph(spec)
    batches = read_microbatches(spec, graph, [0])
    with pytest.raises(UserCodeError, match="saved tensor hooks") as error:
        profile_layers(spec, graph, batches)
    assert "leave the layer out of plan.recompute and plan.offload" in error.value.cure
    profile_layers(spec.replace(plan=PlanConfig(activations_in=str(tmp_path), offload=["0", "3"])), graph, batches)
