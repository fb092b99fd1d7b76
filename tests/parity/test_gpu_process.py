"""Workers on a device: every tensor is where it belongs, and a new run, its checkpoints and its hand-overs have the CPU's bits.

The device is `helpers.pretend`, which computes as the CPU does and refuses what a GPU would refuse."""

import pytest
from helpers import device_calls, pretend
from helpers.parity import Layout
from helpers.processes import Worker
from helpers.shard_grid import SHALLOW, Cell

LAYOUTS = [
    Layout("tangled", "1f1b", (2, 2), 4),
    Layout("tangled", "zb-v", (1, 1), 5),
    Layout("plain", "interleaved", (2, 2), 7),
    Layout("tangled", "gpipe", (4,), 7, blocks=5),
    Layout("tangled", "zb-h1", (1, 2, 1), 8),
    Layout("plain", "1f1b", (3, 2), 7, blocks=5),
    Layout("tangled", "1f1b", (2, 2), 5, blocks=1),
    Layout("tangled", "interleaved", (1, 1, 1), 7, chunks=3),
]
QUICK = 2

pytestmark = pretend.NEEDED


@pytest.fixture(scope="module")
def run():
    worker = Worker()

    def call(function, *args, timeout_s=60.0):
        worker.call(function, *args)
        return worker.result(timeout_s)

    call(device_calls.begin)
    yield call
    worker.end()


def test_the_device_refuses_what_a_gpu_would(run):
    assert run(device_calls.refuses) == 5


@pytest.mark.parametrize("layout", LAYOUTS[:1] + [pytest.param(one, marks=pytest.mark.ci) for one in LAYOUTS[1:QUICK]], ids=str)
def test_a_run_on_a_device_has_the_bits_of_one_process(run, layout):
    run(device_calls.trains, layout)


NORMS = [Layout("norms", schedule, replicas, 4) for schedule, replicas in (("1f1b", (1,)), ("1f1b", (2, 2)), ("gpipe", (3, 1)))]


def test_a_run_in_float16_on_a_device_skips_the_steps_of_one_process_and_has_its_bits(run):
    run(device_calls.trains, Layout("tangled", "1f1b", (2, 1), 5, compute="fp16 gradients"))


def test_running_statistics_on_a_device_are_alike_under_every_plan(run):
    run(device_calls.folds, NORMS)


@pytest.mark.parametrize("level", [1, 3])
def test_replicas_on_a_device_that_divide_state_have_the_bits_of_one_process(run, level):
    run(device_calls.divides, LAYOUTS[0], level)


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS[QUICK:], ids=str)
def test_the_other_layouts_on_a_device_have_the_bits_of_one_process(run, layout):
    run(device_calls.trains, layout)


@pytest.mark.parametrize(
    "recompute, precision",
    [(False, None), (True, None), (False, "bf16 parameters"), (False, "bf16 gradients"), (False, "fp16 parameters")],
)
def test_what_the_forward_asks_of_a_batch_is_read_on_the_host_alone(run, recompute, precision):
    run(device_calls.decides, recompute, precision)


def test_a_checkpoint_is_gone_on_with_on_either_device(run, tmp_path):
    run(device_calls.resumes, str(tmp_path))


@pytest.mark.parametrize("fused", [False, True], ids=["loop", "fused"])
def test_an_optimizer_gets_its_state_back_where_it_keeps_it(run, fused):
    run(device_calls.keeps, fused)


@pytest.mark.parametrize("dests, memory", [(1, pretend.NAME), (8, pretend.NAME), (9, "cpu")])
def test_state_leaves_the_device_through_host_memory_where_too_many_want_it(run, dests, memory):
    assert run(device_calls.hands_over, dests) == {memory}


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sample", "whole"])
@pytest.mark.parametrize("replicas, stages", [(2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_state_on_a_device_survives_faults_with_the_bits_of_the_cpu(run, replicas, stages, whole):
    """Handed over between workers, copied into the mirror and back."""
    ways = run(device_calls.survives, replicas, stages, whole, timeout_s=400.0)
    assert ways >= ({"Move("} if replicas > 1 else {"Move(", "from_mirror=True"}), ways


CELLS = [
    Cell(SHALLOW, "1f1b", (2, 1), (2, 2), 3),
    Cell("llama", "zb-h1", (1, 1), (4, 2), 3, sequence=True),
    Cell("dropped", "1f1b", (2, 1), (2, 2), 4, sequence=True),
    Cell("llama", "1f1b", (1, 1), (1, 3), 5),
    Cell("gpt", "zb-v", (1,), (4,), 4, sequence=True),
    Cell("gpt", "interleaved", (1, 2), (3, 1), 5, sequence=True, dtype="float32"),
    Cell("llama", "gpipe", (3, 1), (2, 2), 5, sequence=True),
    Cell("gpt", "1f1b", (2, 2), (2, 2), 3, sequence=True, blocks=1),
    Cell("dropped", "gpipe", (1, 1), (3, 2), 4),
]


@pytest.mark.parametrize("cell", CELLS[:1] + [pytest.param(one, marks=pytest.mark.ci) for one in CELLS[1:QUICK]], ids=str)
def test_shards_on_a_device_have_the_bits_of_the_cpu(run, cell):
    run(device_calls.trains_on_shards, cell)


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.ci)])
def test_rows_of_images_on_a_device_have_the_bits_of_the_cpu(run, shards):
    run(device_calls.trains_on_rows, shards)


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS[QUICK:], ids=str)
def test_other_shards_on_a_device_have_the_bits_of_the_cpu(run, cell):
    run(device_calls.trains_on_shards, cell)


PATHS = [
    ("llama", [(1, 1, 2), (1, 2, 3), (2, 1, 2)]),
    ("gpt", [(1, 1, 1), (1, 1, 4), (1, 2, 3)]),
    ("llama", [(2, 2, 2), (1, 1, 1), (1, 1, 4)]),
    ("dropped", [(1, 2, 4), (2, 1, 3), (1, 1, 2)]),
]


@pytest.mark.full
@pytest.mark.parametrize("model, path", PATHS, ids=str)
def test_slices_are_handed_over_and_saved_on_a_device_as_on_the_cpu(run, model, path, tmp_path):
    """replicas x stages x shards; two steps under each."""
    run(device_calls.changes_shards, model, path, str(tmp_path))


@pytest.mark.ci
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sample", "whole"])
@pytest.mark.parametrize("replicas, shards", [(2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_slices_on_a_device_survive_faults_with_the_bits_of_the_cpu(run, replicas, shards, whole):
    """Kept by the other replica, or brought back from the mirror."""
    ways = run(device_calls.survives_on_shards, replicas, shards, whole, timeout_s=400.0)
    assert replicas > 1 or "from_mirror=True" in ways, ways
