"""Out of memory: what a worker holds under its plan, and what would fit, from a profile."""

from raypar.plan import Microbatches, ParallelPlan
from raypar.planner.memory_sheet import memory_sheet, out_of_memory_advice
from raypar.planner.model_profile import LayerProfile, ModelProfile

MIB = 1 << 20
LAYER = LayerProfile(
    "layer", 1.0, 2.0, 1.0, 1.0, activation_bytes=8 * MIB, parameter_bytes=4 * MIB, optimizer_bytes=8 * MIB, output_bytes=64
)
CUT = Microbatches(8, 1, 64)


def profile(layers=8, memory_mib=None):
    return ModelProfile((LAYER,) * layers, memory_bytes=memory_mib and memory_mib * MIB)


def test_a_sheet_has_parameters_gradients_optimizer_state_and_the_peak_of_the_activations():
    found = memory_sheet(profile(), ParallelPlan.mesh(pp=2, layers=8), "1f1b", CUT, 0)
    assert found.state == {"parameter": 16 * MIB, "gradient": 16 * MIB, "optimizer": 32 * MIB}
    assert found.activations == 2 * 4 * 8 * MIB, "1F1B keeps as many as there are stages from here on"
    assert memory_sheet(profile(), ParallelPlan.mesh(pp=2, layers=8), "gpipe", CUT, 0).activations == 8 * 4 * 8 * MIB


def test_the_error_says_what_the_stage_holds_and_what_would_fit():
    plan = ParallelPlan.mesh(pp=2, layers=8)
    what, fits = out_of_memory_advice(profile(memory_mib=110), plan, "gpipe", CUT, 1)
    assert what == (
        "stage 1 is predicted to hold 16.0 MiB of parameters, 16.0 MiB of gradients, 32.0 MiB of optimizer state and at most "
        "256.0 MiB of activations: 320.0 MiB; when the job was planned, a worker had 110.0 MiB"
    )
    assert fits == "predicted to fit: plan.stages=3 under 1f1b (96.0 MiB a worker)"


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
