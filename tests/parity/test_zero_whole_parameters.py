"""ZeRO with optimizers that need whole parameters: an owner keeps all of each, with the bits of one process."""

from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders, optimizers, reference
from helpers.optimizer_layouts import ADAMW_IN_8_BITS, LAYERS, MUON_AND_ADAMW, job_of
from helpers.zero_layouts import small_pieces

from raypar.errors import ConfigError
from raypar.job import OptimizerConfig
from raypar.plan import ParallelPlan
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

WHOLE = {
    "Muon and AdamW": MUON_AND_ADAMW,
    "AdamW8bit": ADAMW_IN_8_BITS,
    "every shape": {"function": optimizers.KeepsOddShapes},
}


def test_one_that_couples_parameters_is_refused_with_the_measured_difference_and_what_works():
    """Prodigy has one estimate of the distance to the solution for all parameters."""
    spec = job_of(OptimizerConfig(function=optimizers.Prodigy))
    trial = preflight(spec).optimizer
    with pytest.raises(ConfigError) as error:
        trial.check_plan(ParallelPlan.mesh(dp=2, layers=LAYERS).with_zero(3))
    what, cure = str(error.value).splitlines()
    assert "cannot be used with plan.zero: 3: its step of one parameter depends on the other parameters" in what
    assert cure.startswith("  cure: set plan.zero: 0, or use an optimizer that takes each parameter by itself")
    assert "; measured: in a trial of " in cure
    trial.check_plan(ParallelPlan.mesh(dp=2, layers=LAYERS))


@pytest.mark.parametrize("which", WHOLE)
def test_optimizers_of_whole_parameters_divide_these(which: str, tmp_path: Path):
    """An owner keeps all of a parameter; saved under ZeRO 1, a run goes on under any plan."""
    spec = job_of(OptimizerConfig.model_validate(WHOLE[which]))
    trial = preflight(spec).optimizer
    plan = ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS).with_zero(3)
    trial.check_plan(plan)
    spec = spec.with_undivided(trial.undivided)
    graph = make_layer_graph(spec)
    with small_pieces():
        want = reference.train(graph, spec).parameters
        with OneProcessRun(spec, plan, "1f1b", graph=graph) as run:
            for step in range(3):
                run.step(step)
            owned = [each for core in run.cores for mine in core.step_commit.owned.values() for each in mine]
            assert {each.name for each in owned if each.run is not None}.isdisjoint(trial.undivided)
            assert len({each.name for each in owned}) == len(want), "each has an owner"
            path = checkpoint_folders.save_run(run, tmp_path, 3, contract={})
            for step in range(3, 6):
                run.step(step)
            found = [run.parameters()]
        for other in (ParallelPlan.mesh(layers=LAYERS), ParallelPlan.mesh(dp=3, layers=LAYERS).with_zero(3)):
            with OneProcessRun(spec, other, "1f1b", graph=graph) as run:
                for core in run.cores:
                    core.load(path)
                for step in range(3, 6):
                    run.step(step)
                found.append(run.parameters())
    assert all(torch.equal(copy, want[name]) for of in found for name, copies in of.items() for copy in copies)
