"""`optimizer` may be a list: each trains the parameters that its pattern matches, with the bits of a plain loop's."""

import math
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import optimizers, reference
from helpers.optimizer_layouts import LAYERS, LAYOUTS, job_of, outcomes

from raypar.errors import CheckpointError, ConfigError
from raypar.job import Job, OptimizerConfig, OptimizerEntry
from raypar.job.contract import contract_of_job
from raypar.job.read_job import parse_job
from raypar.launch.trainer_arguments import function_section
from raypar.plan import ParallelPlan
from raypar.plan.state_division import StateDivision
from raypar.worker.checkpoint.check_job_changes import changes_at_resume
from raypar.worker.checkpoint.checkpoint_files import load_manifest
from raypar.worker.job_preflight import preflight
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.run_in_one_process import OneProcessRun

MUON = {"match": "block*.*.weight", "function": "torch.optim:Muon", "args": {"lr": 0.02}}
REST = {
    "match": "*",
    "function": "torch.optim:AdamW",
    "args": {"lr": 0.003},
    "groups": [{"match": "*.bias", "weight_decay": 0.0}],
}


def several(*entries) -> OptimizerConfig:
    return OptimizerConfig.model_validate(list(entries))


def halves(step: int) -> float:
    return 0.5**step


@pytest.mark.parametrize("layout", ["2 stages", "2 replicas", "saved, resumed", "joined"])
def test_muon_for_matrices_and_adamw_for_the_rest_have_the_bits_of_one_process(layout: str, tmp_path: Path, muon_and_adamw):
    assert muon_and_adamw[layout] == "equal"


@pytest.fixture(scope="module")
def muon_and_adamw(tmp_path_factory) -> dict[str, str]:
    return outcomes(job_of(several(MUON, REST)), tmp_path_factory.mktemp("several"))


def test_on_shards_the_one_that_needs_whole_parameters_is_refused(muon_and_adamw):
    assert muon_and_adamw["2 shards"].startswith("refused: torch.optim:Muon cannot be used with 2 shards")


def test_each_has_its_own_schedule_and_state_of_groups_and_attributes(tmp_path: Path):
    counts = {"match": "block0.*", "function": optimizers.CountsInAttribute, "args": {"lr": 0.01}}
    groups = {"match": "*.weight", "function": optimizers.CountsInGroup, "lr_schedule": {"function": halves}}
    cosine = {"function": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": 6}}
    rest = {"match": "*", "function": "torch.optim:SGD", "args": {"lr": 0.1, "momentum": 0.9}, "lr_schedule": cosine}
    job = job_of(several(counts, groups, rest))
    graph = make_layer_graph(job)
    found = {name: run(job, graph, tmp_path / name) for name, (_, run) in LAYOUTS.items() if name != "2 shards"}
    assert found == dict.fromkeys(found, "equal")


def test_the_text_job_steps_stands_for_the_number_of_steps_in_an_entry_too():
    cosine = {"function": "torch.optim.lr_scheduler:CosineAnnealingLR", "args": {"T_max": "job.steps"}}
    job = job_of(several({"match": "*", "function": "torch.optim:SGD", "lr_schedule": cosine}))
    assert job.schedule_of(job.optimizer.each[0]).args == {"T_max": job.steps}
    assert contract_of_job(job)["optimizer"]["entries"][0]["lr_schedule"]["args"] == {"T_max": job.steps}


def test_the_learning_rate_that_is_reported_is_that_of_the_first():
    first = {"match": "head.*", "function": "torch.optim:SGD", "args": {"lr": 0.5}, "lr_schedule": {"function": halves}}
    job = job_of(several(first, {"match": "*", "function": "torch.optim:SGD", "args": {"lr": 0.1}}))
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=LAYERS), "1f1b") as run:
        rates = [{report.lr for report in run.step(step)} for step in range(3)]
    assert rates == [{0.5}, {0.25}, {0.125}]


def test_the_trial_says_of_each_parameter_how_its_state_may_be_divided():
    trial = preflight(job_of(several(MUON, REST))).optimizer
    assert trial is not None and trial.division is StateDivision.BY_PARAMETERS
    divisions = trial.divisions
    assert divisions["block0.up.weight"] is StateDivision.BY_PARAMETERS and divisions["block0.up.bias"] is StateDivision.BY_RUNS
    assert trial.most_stages is None


def test_one_that_couples_parameters_leaves_one_stage_to_all():
    coupled = {"match": "*.bias", "function": optimizers.NormalisesAll}
    rest = {"match": "*", "function": "torch.optim:AdamW"}
    trial = preflight(job_of(several(coupled, rest))).optimizer
    assert trial is not None and trial.most_stages == 1
    with pytest.raises(ConfigError, match="NormalisesAll cannot be used with 2 stages"):
        trial.check_plan(ParallelPlan.mesh(pp=2, layers=LAYERS))


REFUSED = {
    "a parameter of none": (
        [MUON, {"match": "*.bias", "function": "torch.optim:SGD"}],
        "no optimizer trains first.weight",
    ),
    "a pattern of nothing": ([{"match": "blok*", "function": "torch.optim:SGD"}, REST], "optimizer pattern 'blok\\*'"),
    "one behind all others": (
        [REST, MUON],
        r"optimizer.entries.0 has match: '\*', .* leaves none to optimizer.entries.1 \(match: 'block\*.\*.weight'\)",
    ),
    "two for all": (
        [REST, REST],
        r"optimizer.entries.0 has match: '\*', .* leaves none to optimizer.entries.1 \(match: '\*'\)",
    ),
    "one behind one that takes the same": (
        [MUON, {**MUON, "match": "block0.*.weight"}, REST],
        r"\(optimizer.entries.1, torch.optim:Muon\) matches only parameters of optimizer.entries.0 \('block\*.\*.weight'\)",
    ),
    "an argument that the class does not take": (
        [{**MUON, "args": {"lrr": 0.1}}, REST],
        r"optimizer.entries.0 \('block\*.\*.weight'\): optimizer torch.optim:Muon refused its arguments: .* 'lrr'",
    ),
    "an option of a group that the class does not know": (
        [MUON, {**REST, "groups": [{"match": "*.bias", "lrr": 0.1}]}],
        r"optimizer.entries.1 \('\*'\): optimizer group '\*.bias' sets 'lrr'",
    ),
    "a class that is not there": ([{**MUON, "function": "torch.optim:Moon"}, REST], r"optimizer.entries.0 .*: cannot import"),
    "a group of nothing": (
        [MUON, {**REST, "groups": [{"match": "block0.up.weight", "lr": 1.0}]}],
        r"optimizer group pattern 'block0.up.weight' matches none of the \d+ parameters of '\*'",
    ),
    "vectors for Muon": ([{**MUON, "match": "*"}], r"optimizer.entries.0 \('\*'\): .*Muon only supports 2D parameters"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_list_that_does_not_fit_the_model_is_one_clear_error(what: str):
    entries, said = REFUSED[what]
    with pytest.raises(ConfigError, match=said) as found:
        preflight(job_of(several(*entries)))
    assert found.value.cure


BASE = """
name: lists
steps: 2
batch_size: 4
microbatches: 2
model: helpers.optimizer_layouts:model
loss: torch.nn.functional:mse_loss
data: helpers.optimizer_layouts:Points
optimizer:
  - {match: "*.weight", function: torch.optim:SGD, args: {lr: 0.1}}
  - {match: "*", function: torch.optim:AdamW}
"""


def test_a_job_file_has_the_list_itself_and_set_reaches_into_it():
    job = parse_job(BASE, ["optimizer.0.args.lr=0.3"])
    assert [type(entry) for entry in job.optimizer.entries] == [OptimizerEntry, OptimizerEntry]
    assert job.optimizer.entries[0].args == {"lr": 0.3} and job.optimizer.label == "torch.optim:SGD, torch.optim:AdamW"
    again = parse_job(job.to_yaml()) if hasattr(job, "to_yaml") else Job.model_validate(job.model_dump())
    assert again.optimizer == job.optimizer


@pytest.mark.parametrize(
    "override, said",
    {
        "optimizer.0.matches=x": "unknown key optimizer.entries.0.matches",
        "optimizer.1={function: 'torch.optim:SGD'}": "optimizer.entries.1.match is missing",
        "optimizer.1.match=7": "optimizer.entries.1.match: expected",
        "optimizer.1.lr_schedule={function: 'm:f', metric: validation_loss}": "entries.1.lr_schedule .* has metric",
        "optimizer={function: 'torch.optim:SGD', entries: [{match: '*', function: 'torch.optim:SGD'}]}": "entries and function",
    }.items(),
)
def test_mistakes_in_the_list_are_named(override: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_job(BASE, [override])


def test_trainer_takes_classes_and_pairs_in_the_list():
    given = [{"match": "*.weight", "function": (torch.optim.SGD, {"lr": 0.1})}, {"match": "*", "function": torch.optim.AdamW}]
    section = function_section("optimizer", given)
    made = OptimizerConfig.model_validate(section)
    assert [entry.resolve() for entry in made.each] == [torch.optim.SGD, torch.optim.AdamW] and made.each[0].args == {"lr": 0.1}
    same = function_section("optimizer", [OptimizerEntry(match="*", function=torch.optim.SGD)])
    assert OptimizerConfig.model_validate(same).each[0].resolve() is torch.optim.SGD


def test_several_optimizers_without_patterns_are_refused_with_the_list_that_works():
    with pytest.raises(ConfigError) as found:
        function_section("optimizer", [torch.optim.SGD, torch.optim.AdamW])
    assert "match" in found.value.cure


def test_a_resume_may_change_options_but_neither_class_nor_pattern(tmp_path: Path):
    job = job_of(several(MUON, REST))
    with OneProcessRun(job, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run:
        run.step(0)
        begun = checkpoint_files.create_checkpoint(tmp_path, 1)
        run.cores[0].start_save(begun)
        saved = checkpoint_files.commit_checkpoint(
            begun, [run.cores[0].save_result()], steps_done=1, contract=contract_of_job(job)
        )
    manifest = load_manifest(saved)
    changed = job_of(several({**MUON, "args": {"lr": 0.01}}, REST))
    assert changes_at_resume(manifest, changed).lines == ("from step 2 on: optimizer.entries.0.args.lr 0.02 -> 0.01",)
    for other in (
        several({**MUON, "match": "block0.*.weight"}, {**MUON, "match": "block1.*.weight"}, REST),
        several({**MUON, "match": "block1.*.weight"}, REST),
        several(MUON, {**REST, "function": "torch.optim:Adam"}),
        several(MUON, {**REST, "groups": [{"match": "*norm*", "weight_decay": 0.0}]}),
        OptimizerConfig(function="torch.optim:AdamW"),
    ):
        with pytest.raises(CheckpointError, match="belongs to another job"):
            changes_at_resume(manifest, job_of(other))


def test_the_reference_trains_parameters_that_an_optimizer_of_the_list_keeps_no_state_of():
    job = job_of(several({"match": "*.weight", "function": "torch.optim:SGD", "args": {"lr": 0.1}}, REST), steps=1)
    state = reference.train(make_layer_graph(job), job).state
    assert state["head.weight"] == {} and state["head.bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_the_reference_trains_otherwise_with_one_optimizer_for_all():
    """So the comparison above would see it."""
    job = job_of(several(MUON, REST))
    graph = make_layer_graph(job)
    one, other = (reference.train(graph, each).losses for each in (job, job_of(OptimizerConfig(function="torch.optim:AdamW"))))
    assert one[0] == other[0] and one[-1] != other[-1] and math.isfinite(one[-1])
