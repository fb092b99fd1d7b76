"""Copies of the state in another worker's memory: the same bits, in memory that is used again."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raypar.comm.buffer_pool import BufferPool
from raypar.comm.local_transport import LocalMesh
from raypar.comm.routine import run_routine
from raypar.errors import ConfigError
from raypar.job.elastic_section import ElasticConfig
from raypar.job.read_job import parse_job
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, optimizer_key
from raypar.worker.elastic_worker import ElasticWorker
from raypar.worker.state import mirror
from raypar.worker.state.file_memory import FileMemoryPool
from raypar.worker.state.mirror import Mirror, StateCopy, split_into_chunks
from raypar.worker.state.parameter_state import WHOLE, StateByKey, StatePart

A = ("a", WHOLE)
JOB = """
model: {function: "helpers.tiny_job:model"}
loss: {function: "helpers.tiny_job:loss"}
data: {function: "helpers.tiny_job:data"}
steps: 2
batch_size: 8
microbatches: 4
"""


def state(seed: int) -> dict[StatePart, StateByKey]:
    dice = torch.Generator().manual_seed(seed)
    return {
        A: {
            PARAMETER: torch.randn(300, 1001, generator=dice),
            optimizer_key("exp_avg"): torch.randn(300, 1001, generator=dice),
            optimizer_key("step"): 3,
        },
        ("b", WHOLE): {PARAMETER: torch.randn(7, generator=dice).double(), optimizer_key("step"): torch.tensor(2.0)},
        ("c", WHOLE): {PARAMETER: torch.randn(5, 3, generator=dice).half()},
    }


def same(first, second) -> bool:
    pairs = [(first[n][k], second[n][k]) for n in first for k in first[n]]
    return all(torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def pair(pool: Callable[[], BufferPool] = BufferPool) -> tuple[list[Mirror], LocalMesh]:
    return [Mirror({0: 1, 1: 0}, rank, pool=pool()) for rank in range(2)], LocalMesh(2)


def exchange(mirrors, mesh, done: int) -> None:
    for rank, one in enumerate(mirrors):
        one.take_snapshot(done, state(10 * done + rank), mesh.transports[rank])
    while any(part._at is not None for one in mirrors for part in one._exchange):
        for one in mirrors:
            one.poll()


def test_copies_may_lie_in_files_without_names_whose_memory_is_used_again(tmp_path):
    folder = tmp_path / "made" / "here"
    mirrors, mesh = pair(lambda: FileMemoryPool(str(folder)))
    for done in (1, 2, 3, 4):
        for one in mirrors:
            run_routine(one.finish(), 1.0)
        exchange(mirrors, mesh, done)
        assert same({n: h.state for n, h in mirrors[1]._snapshots[done][0].holdings().items()}, state(10 * done))
    assert not any(folder.iterdir()), "whatever ends a worker, nothing is left"
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    nbytes = [int(stop, 16) - int(start, 16) for start, stop in (line.split()[0].split("-") for line in mapped)]
    copy = state(0)[A][PARAMETER].nbytes * 2
    assert copy * 4 * 2 <= sum(nbytes) <= copy * 6 * 2, "of two or three snapshots: a worker's own and its ward's"


def test_a_folder_that_takes_no_copies_is_an_error_of_two_lines(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"mirror_in .*file/here takes no 2.3 MiB of the mirror's copies: .*directory"):
        StateCopy.of(state(1), FileMemoryPool(str(tmp_path / "file/here")))

    def full(descriptor, start, size):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match=r"takes no 2.3 MiB of the mirror's copies: .*No space left on device") as error:
        StateCopy.of(state(1), FileMemoryPool(str(tmp_path)))
    assert error.value.cure.startswith("give a folder that workers can write to")


def test_a_folder_for_copies_that_are_never_made_is_bad_input():
    with pytest.raises(ConfigError, match=r"elastic.mirror_in is /copies, and elastic.mirror is off: there are no copies"):
        ElasticConfig(mirror="off", mirror_in="/copies")


def test_workers_know_the_folder_and_start_with_no_other_than_one_that_takes_copies(tmp_path):
    (tmp_path / "file").write_text("")

    def worker(key: str) -> ElasticWorker:
        return ElasticWorker(SimpleNamespace(spec=parse_job(f"{JOB}elastic: {{{key}}}\n").for_workers()), 0)

    for key, pool in ((f"mirror_in: {tmp_path}/copies", FileMemoryPool), ("min_workers: 2", BufferPool)):
        assert type(worker(key).mirror.pool) is pool
    with pytest.raises(ConfigError, match=r"mirror_in .*file/here takes none of the mirror's copies: "):
        worker(f"mirror_in: {tmp_path}/file/here")


def test_the_buddy_holds_the_same_bits_and_the_last_complete_cut_stays_until_the_next_is_complete():
    mirrors, mesh = pair()
    for done in (1, 2, 3):
        for one in mirrors:
            run_routine(one.finish(), 1.0)
        exchange(mirrors, mesh, done)
        kept = mirrors[1].pieces()
        assert set(kept) == {step for step in (done - 1, done) if step}
        for step in kept:
            own = StateCopy.of(state(10 * step + 1), BufferPool())
            assert set(mirrors[1]._snapshots[step]) == {mirror.OWN, 0}
            assert same({n: h.state for n, h in mirrors[1]._snapshots[step][0].holdings().items()}, state(10 * step))
            assert mirrors[1]._snapshots[step][mirror.OWN].digest() == own.digest()


def test_memory_is_used_again():
    mirrors, mesh = pair()
    held = []
    for done in range(1, 7):
        for one in mirrors:
            run_routine(one.finish(), 1.0)
        exchange(mirrors, mesh, done)
        held.append(mirrors[0].pool.held_bytes)
    assert held[1] == held[-1], held


def test_a_cut_that_is_broken_off_is_not_held_and_the_one_before_it_is():
    mirrors, mesh = pair()
    exchange(mirrors, mesh, 1)
    for one in mirrors:
        run_routine(one.finish(), 1.0)
    for rank, one in enumerate(mirrors):
        one.take_snapshot(2, state(rank), mesh.transports[rank])
    mesh.abort("a worker died")
    for one in mirrors:
        one.give_up_exchange()
        assert set(one._snapshots[1]) == {mirror.OWN, 1 - mirrors.index(one)} and set(one._snapshots[2]) == {mirror.OWN}


def test_both_ends_cut_the_memory_into_the_same_chunks():
    for size in (0, 1, 1 << 18, 40 << 20, (600 << 20) + 1):
        memory = torch.empty(size, dtype=torch.uint8)
        assert sum(len(part) for part in split_into_chunks(memory)) == size
        assert len(split_into_chunks(memory)) <= 2 * mirror.CHUNKS


def test_a_digest_depends_on_every_bit_and_its_place():
    kept = state(1)
    before = StateCopy.of(kept, BufferPool()).digest()
    turned = {(name, WHOLE): kept[name, WHOLE] for name in "cba"}
    assert before == StateCopy.of(turned, BufferPool()).digest(), "not on the order of names"
    kept[A][PARAMETER].view(torch.int32)[7, 9] ^= 1
    flipped = StateCopy.of(kept, BufferPool()).digest()
    assert flipped[0] == before[0] and flipped[1] != before[1]
    kept[A][PARAMETER].view(torch.int32)[7, 9] ^= 1
    kept[A][PARAMETER][[0, 1]] = kept[A][PARAMETER][[1, 0]]
    assert StateCopy.of(kept, BufferPool()).digest()[1] != before[1], "two rows are exchanged"
    kept[A][PARAMETER][[0, 1]] = kept[A][PARAMETER][[1, 0]]
    kept[A][optimizer_key("step")] = 4
    assert StateCopy.of(kept, BufferPool()).digest()[1] != before[1], "a number is another one"
