"""Out of memory: what a worker holds under its plan, and what would fit, from a profile."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest

from raypar.errors import ConfigError, PlanError
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import check_memory
from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.memory_sheet import MIRROR, describe_changes_that_fit, memory_sheets, out_of_memory_advice
from raypar.planner.model_profile import BATCH, KeptStorages, LayerProfile, LayerStorages, ModelProfile, ReadStorage
from raypar.planner.predicted_step import GATHER_BYTES, OFFLOAD_WINDOW_BYTES, predict_step
from raypar.schedule.instructions import ACTIVATIONS, KEPT_INPUTS, STASH
from raypar.worker import measure_profile
from raypar.worker.step.offloaded_optimizer import WINDOW_BYTES as WINDOW_OF_OPTIMIZER
from raypar.worker.step.parameter_gather import WINDOW_BYTES

MIB = 1 << 20
LAYER = LayerProfile(
    "layer", 1.0, 2.0, 1.0, 1.0, activation_bytes=8 * MIB, parameter_bytes=4 * MIB, optimizer_bytes=8 * MIB, output_bytes=64
)
CUT = Microbatches(8, 1, 64)


def profile(layers=8, memory_mib=None):
    return ModelProfile((LAYER,) * layers, memory_bytes=memory_mib and memory_mib * MIB)


def test_a_sheet_has_parameters_gradients_optimizer_state_and_the_peak_of_the_activations():
    found = memory_sheets(profile(), ParallelPlan.mesh(pp=2, layers=8), "1f1b", CUT)[0]
    assert found.state == {"parameter": 16 * MIB, "gradient": 16 * MIB, "optimizer": 32 * MIB}
    assert found.kept[ACTIVATIONS] == 2 * 4 * 8 * MIB, "1F1B keeps as many as there are stages from here on"
    gpipe = memory_sheets(profile(), ParallelPlan.mesh(pp=2, layers=8), "gpipe", CUT)[0]
    assert gpipe.kept == {ACTIVATIONS: 8 * 4 * 8 * MIB, KEPT_INPUTS: 0, STASH: 0}


def test_a_replica_with_more_blocks_keeps_more_open_sums_and_more_activations():
    even = ParallelPlan.mesh(dp=2, layers=8)
    plan = replace(even, stages=(replace(even.stages[0], share=(15, 1)),))
    many, few = memory_sheets(profile(), plan, "gpipe", Microbatches(16, 16, 64))
    assert (many.state["gradient"], few.state["gradient"]) == (4 * 32 * MIB, 32 * MIB)
    assert many.kept[ACTIVATIONS] == 15 * few.kept[ACTIVATIONS]
    both = [predict_step(profile(), one, "1f1b", Microbatches(16, 16, 64))[0].makespan_ms for one in (even, plan)]
    assert both[1] - both[0] == pytest.approx(7 * 8 * 3.0), "the step takes as long as 15 blocks instead of 8"


def test_recomputation_keeps_one_microbatch_of_activations_and_the_inputs_of_the_others():
    plan = ParallelPlan.mesh(pp=2, layers=8, recompute=range(8))
    first, last = memory_sheets(profile(), plan, "gpipe", CUT)
    assert first.kept == {ACTIVATIONS: 4 * 8 * MIB, KEPT_INPUTS: 0, STASH: 0}, "the first stage reads the batch"
    assert last.kept == {ACTIVATIONS: 4 * 8 * MIB, KEPT_INPUTS: 7 * 64, STASH: 0}
    assert "and at most 32.0 MiB of activations, 0.0 MiB of inputs of recomputed layers: 96.0 MiB" in str(last)


def test_recomputation_does_not_make_the_stash_smaller():
    plan = ParallelPlan.mesh(pp=2, layers=8, recompute=range(8))
    plain, again = (profile().kept_bytes(plan, 1, 8, recompute=recompute) for recompute in (False, True))
    assert plain[STASH] == again[STASH] == plain[ACTIVATIONS] == again[ACTIVATIONS] == 4 * 8 * MIB
    assert (plain[KEPT_INPUTS], again[KEPT_INPUTS]) == (4 * 8 * MIB, 64)


def test_the_error_says_what_the_stage_holds_and_what_would_fit():
    plan = ParallelPlan.mesh(pp=2, layers=8)
    what, fits = out_of_memory_advice(profile(memory_mib=110), plan, "gpipe", CUT, 1)
    assert what == (
        "stage 1 is predicted to hold 16.0 MiB of parameters, 16.0 MiB of gradients, 32.0 MiB of optimizer state and at most "
        "256.0 MiB of activations: 320.0 MiB; when the job was planned, a worker had 110.0 MiB"
    )
    assert fits == (
        "predicted to fit: plan.recompute=full (96.0 MiB a worker, the same results); "
        "or plan.activations_in=FOLDER (96.0 MiB a worker, the same results); or plan.stages=3 under 1f1b (3 workers, "
        "96.0 MiB a worker)"
    )


def test_a_plan_that_was_predicted_to_fit_and_did_not_is_answered_with_smaller_ones():
    plan = ParallelPlan.mesh(pp=2, layers=8)
    what, fits = out_of_memory_advice(profile(memory_mib=1000), plan, "gpipe", CUT, 1)
    assert "320.0 MiB; when the job was planned, a worker had 1,000.0 MiB" in what
    assert fits.endswith("96.0 MiB a worker); or schedule 1f1b instead of gpipe (128.0 MiB)")
    _, fits = out_of_memory_advice(profile(), plan, "1f1b", CUT, 0)
    assert fits.endswith("; or microbatches=16 instead of 8 (96.0 MiB; another sum, so other bits)")


def test_where_nothing_fits_it_says_so():
    _, fits = out_of_memory_advice(
        profile(layers=1, memory_mib=1), ParallelPlan.mesh(layers=1), "1f1b", Microbatches(8, 1, 8), 0
    )
    assert fits.endswith("are predicted to take less than 1.0 MiB a worker: use larger workers")


# Storages: 0 the batch's field, 1 the first layer's output, which the second saves too, 2 and 3 inside a layer, 4 its output.
KEPT = KeptStorages(
    2,
    (10, 100, 7, 30, 200),
    (
        LayerStorages((0, 1), (0,), (ReadStorage(0, BATCH, False),)),
        LayerStorages((1, 2), (1, 2), (ReadStorage(1, 0, True),)),
        LayerStorages((3,), (), (ReadStorage(1, 0, True), ReadStorage(4, 1, True))),
    ),
)


def test_a_storage_that_two_layers_of_a_stage_keep_counts_once():
    assert KEPT.bytes_by_kind(0, 2) == {ACTIVATIONS: 10 + 100 + 7, KEPT_INPUTS: 10 + 100 + 7, STASH: 10 + 100 + 7}
    assert KEPT.bytes_by_kind(1, 2)[ACTIVATIONS] == 100 + 7


def test_a_stage_keeps_what_it_receives_from_other_stages_even_if_no_layer_saves_it():
    assert KEPT.bytes_by_kind(2, 3) == {ACTIVATIONS: 100 + 200 + 30, KEPT_INPUTS: 100 + 200 + 30, STASH: 0}
    assert KEPT.bytes_by_kind(0, 3)[ACTIVATIONS] == 10 + 100 + 7 + 30


def test_a_stage_that_recomputes_keeps_what_recomputed_layers_read_and_none_of_them_makes():
    assert KEPT.bytes_by_kind(0, 3, range(3)) == {ACTIVATIONS: 10 + 100 + 7 + 30, KEPT_INPUTS: 10, STASH: 117}
    assert KEPT.bytes_by_kind(0, 3, (1,))[KEPT_INPUTS] == 10 + 100 + 30
    assert KEPT.bytes_by_kind(1, 3, (1, 2))[KEPT_INPUTS] == 100


def test_what_is_made_again_is_another_storage_than_what_a_kept_layer_keeps_of_the_first_forward():
    assert KEPT.bytes_by_kind(0, 2, (0,))[ACTIVATIONS] == 10 + 100 + 7 + 100


def test_a_microbatch_of_another_size_takes_its_part():
    known = ModelProfile((LAYER,) * 3, kept=(KEPT,))
    plan = ParallelPlan.mesh(layers=3)
    assert known.kept_bytes(plan, 0, 2, recompute=False)[ACTIVATIONS] == 147
    assert known.kept_bytes(plan, 0, 4, recompute=False)[ACTIVATIONS] == 294


def test_the_mirror_takes_two_snapshots_of_the_own_state_and_of_anothers():
    two = ParallelPlan.mesh(pp=2, layers=3)
    known = replace(profile(layers=3), mirror="memory")
    owned = [12 * MIB * (stage.last - stage.first) for stage in two.stages]  # parameters and optimizer state
    sheets = memory_sheets(known, two, "1f1b", CUT)
    assert [sheet.mirror for sheet in sheets] == [2 * sum(owned)] * 2 == [sheet.by_kind[MIRROR] for sheet in sheets]
    assert [sheet.total for sheet in sheets] == list(predict_step(known, two, "1f1b", CUT)[1])
    assert f"{2 * sum(owned) / MIB:.1f} MiB of the mirror's copies and at most" in str(sheets[0])
    alone = memory_sheets(known, ParallelPlan.mesh(layers=3), "1f1b", CUT)
    assert alone[0].mirror == 0, "nobody to give a copy to"


def test_copies_in_files_are_no_part_of_the_memory():
    plan = ParallelPlan.mesh(pp=2, layers=8)
    places = ("memory", "files", None)
    in_memory, in_files, off = (memory_sheets(replace(profile(), mirror=place), plan, "1f1b", CUT)[0] for place in places)
    assert in_files.mirror_files == in_memory.mirror and in_files.mirror == 0
    assert in_files.total == off.total == in_memory.total - in_memory.mirror
    advice = describe_changes_that_fit(replace(profile(), mirror="memory"), plan, "1f1b", CUT, off.total + 1)
    assert advice.startswith(
        f"predicted to fit: elastic.mirror_in=FOLDER ({off.total / MIB:.1f} MiB a worker, the same results)"
    )


def test_offloaded_state_is_in_the_sheet_with_what_is_stepped_together():
    plan, more = ParallelPlan.mesh(pp=2, layers=16), ("1f1b", CUT)
    whole, offloaded = (memory_sheets(replace(profile(16), offloads_optimizer=on), plan, *more)[0] for on in (False, True))
    window = 2 * (OFFLOAD_WINDOW_BYTES + LAYER.parameter_bytes)
    assert OFFLOAD_WINDOW_BYTES == WINDOW_OF_OPTIMIZER and whole.state["optimizer"] == 64 * MIB > window
    assert (offloaded.state["optimizer"], offloaded.optimizer_files, whole.optimizer_files) == (window, 64 * MIB, 0)
    assert offloaded.total == whole.total - 64 * MIB + window
    advice = describe_changes_that_fit(profile(16), plan, *more, offloaded.total + 1)
    assert f"plan.optimizer_in=FOLDER ({offloaded.total / MIB:.1f} MiB a worker, the same results)" in advice


def test_what_owners_send_counts_where_replicas_divide_state():
    known = replace(profile(), reduction_buffer_bytes=8 * MIB)
    plan = ParallelPlan.mesh(dp=4, layers=8)
    assert memory_sheets(known, plan, "1f1b", Microbatches(4, 4, 64))[0].gather == 0
    assert memory_sheets(known, plan.with_zero(1), "1f1b", Microbatches(4, 4, 64))[0].gather == GATHER_BYTES == WINDOW_BYTES
    few = replace(known, layers=(replace(LAYER, parameter_bytes=4096),))
    assert memory_sheets(few, ParallelPlan.mesh(dp=4, layers=1).with_zero(1), "1f1b", Microbatches(4, 4, 64))[0].gather == 3072


JOB = """
model: {function: "helpers.tiny_job:model"}
loss: {function: "helpers.tiny_job:loss"}
data: {function: "helpers.tiny_job:data"}
steps: 2
batch_size: 64
microbatches: 8
virtual_replicas: 1
"""


def test_a_plan_that_needs_more_than_the_job_gives_a_worker_is_refused_with_the_nearest_that_fits():
    known, plan = profile(memory_mib=110), ParallelPlan.mesh(pp=2, layers=8)
    sheets = memory_sheets(known, plan, "gpipe", CUT)
    limited = parse_job(JOB + "placement: {worker_memory_mib: 110}")
    assert limited.worker_memory_bytes == 110 * MIB and parse_job(JOB).worker_memory_bytes is None
    with pytest.raises(PlanError) as error:
        check_memory(known, plan, "gpipe", limited, sheets)
    assert error.value.what == (
        "the plan does not fit: worker 0 (stage 0, replica 0) is predicted to hold 16.0 MiB of parameters, 16.0 MiB of "
        "gradients, 32.0 MiB of optimizer state and at most 256.0 MiB of activations: 320.0 MiB; placement.worker_memory_mib "
        "is 110"
    )
    assert error.value.cure.startswith("predicted to fit: plan.recompute=full (96.0 MiB a worker, the same results)")
    (line,) = check_memory(known, plan, "gpipe", parse_job(JOB), sheets)
    assert "each worker's part of this machine's free memory is 110.0 MiB\n  cure: predicted to fit: plan.recompute" in line
    assert (
        check_memory(profile(memory_mib=320), plan, "gpipe", limited, sheets)
        == ()
        == check_memory(profile(), plan, "gpipe", limited, sheets)
    )


@pytest.mark.parametrize("given", [0, -1, "x", ".inf", ".nan"])
def test_a_workers_memory_is_a_number_of_mib(given):
    with pytest.raises(ConfigError, match="worker_memory_mib"):
        parse_job(JOB + f"placement: {{worker_memory_mib: {given}}}")


def test_limits_of_a_process_and_of_a_container_count(monkeypatch):
    free = measure_profile.free_memory_per_worker(1)
    assert free > 100 * MIB
    monkeypatch.setattr(measure_profile.resource, "getrlimit", lambda which: (1 << 40, 1 << 40))
    assert measure_profile.free_memory_per_worker(1) > 0.5 * free
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_DATA: data + 50 * MIB}
    monkeypatch.setattr(measure_profile.resource, "getrlimit", lambda which: (limits[which], resource.RLIM_INFINITY))
    assert 20 * MIB < measure_profile.free_memory_per_worker(1) <= 60 * MIB
