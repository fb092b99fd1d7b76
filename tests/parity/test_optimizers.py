"""Every optimizer trains as in one process, under every plan, resumed and joined; or it is refused before the run, by name."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files
from helpers import optimizers, ugly_models
from helpers.optimizer_layouts import LAYERS, LAYOUTS, job_of, outcomes, warm
from safetensors.torch import load_file

from raypar.comm.buffer_pool import BufferPool
from raypar.errors import CheckpointError, ConfigError, StateNotKeptError
from raypar.job import Job, LossConfig, LrScheduleConfig, OptimizerConfig
from raypar.job.contract import contract_of_job
from raypar.launch.choose_plan import choose_plan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.resume import prepare_resumed_run
from raypar.model.python_state import comparable_content
from raypar.plan import ParallelPlan
from raypar.planner.candidate_plans import enumerate_candidates
from raypar.storage.checkpoint_store import open_checkpoint
from raypar.worker import try_optimizer_of_job
from raypar.worker.checkpoint import contract_comparison
from raypar.worker.checkpoint.checkpoint_files import BUFFER, PARAMETER, CheckpointTensors, encode_tensor, load_manifest
from raypar.worker.checkpoint.expected_optimizer_state import NUMBER, ExpectedOptimizerState, SharedEntry
from raypar.worker.checkpoint.manifest import manifest_checksum
from raypar.worker.checkpoint.state_key import GROUP, StateKey
from raypar.worker.job_preflight import PreflightResult, preflight
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.run_in_one_process import OneProcessRun
from raypar.worker.state.mirror import StateCopy
from raypar.worker.state.parameter_state import WHOLE
from raypar.worker.step.optimizer_state import (
    OptimizerState,
    names_with_patterns,
    read_optimizer_state,
    write_optimizer_state,
)
from raypar.worker.step.optimizer_trial import OptimizerKind, try_optimizer

pytestmark = pytest.mark.part(7)

UNDECAYED = (("*.bias", {"weight_decay": 0.1}),)
"""A group beside that of all others."""


def spec(kind: type, groups=UNDECAYED, **args) -> OptimizerConfig:
    return OptimizerConfig(function=kind, args=args, groups=tuple({"match": pattern, **given} for pattern, given in groups))


STAGES, SHARDS = "2 stages", "2 shards"
KINDS = {
    optimizers.CountsInGroup: (OptimizerKind.ELEMENTWISE, ()),
    optimizers.CountsInAttribute: (OptimizerKind.ELEMENTWISE, ()),
    optimizers.HostileNames: (OptimizerKind.ELEMENTWISE, ()),
    optimizers.KeepsOddShapes: (OptimizerKind.PER_PARAMETER, (SHARDS,)),
    optimizers.NormalisesParameter: (OptimizerKind.PER_PARAMETER, (SHARDS,)),
    optimizers.NormalisesVectors: (OptimizerKind.PER_PARAMETER, (SHARDS,)),
    optimizers.NormalisesLater: (OptimizerKind.PER_PARAMETER, (SHARDS,)),
    optimizers.NormalisesAll: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.NormalisesEqualShapes: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.NormalisesSmall: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.NormalisesInWarmup: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.EstimatesDistance: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.Prodigy: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
    optimizers.Draws: (OptimizerKind.COUPLED, (STAGES, SHARDS)),
}
"""Optimizer -> its kind, and the layouts in which it is refused."""


QUICK = (optimizers.CountsInGroup, optimizers.CountsInAttribute, optimizers.HostileNames, optimizers.NormalisesAll)
"""Those that the default suite trains."""


@pytest.mark.ci
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_step_of_one_element_depends_on_is_found_before_the_run(kind):
    trial = checked_job(job_of(spec(kind))).optimizer
    assert trial.kind is KINDS[kind][0]
    for layout, plan in ((STAGES, ParallelPlan.mesh(pp=2, layers=4)), (SHARDS, ParallelPlan.mesh(tp=2, layers=4))):
        with pytest.raises(ConfigError, match=f"cannot be used with {layout}") if layout in KINDS[kind][1] else nullcontext():
            trial.check_plan(plan)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.full) for kind in KINDS],
    ids=lambda kind: kind.__name__,
)
def test_an_optimizer_has_the_weights_of_one_process_in_every_layout_that_is_not_refused(kind, tmp_path: Path):
    job = job_of(spec(kind))
    found = outcomes(job, tmp_path)
    refused = [layout for layout, said in found.items() if said.startswith("refused")]
    assert refused == list(KINDS[kind][1])
    assert {layout: said for layout, said in found.items() if layout not in refused} == dict.fromkeys(
        [layout for layout in LAYOUTS if layout not in refused], "equal"
    )


@pytest.mark.ci
def test_an_optimizer_of_pytorch_is_tried_once_for_the_same_arguments_and_shapes(monkeypatch):
    tried: list[str] = []

    def counts(*given):
        tried.append(given[0].label)
        return try_optimizer(*given)

    monkeypatch.setattr(try_optimizer_of_job, "try_optimizer", counts)
    monkeypatch.setattr(try_optimizer_of_job, "_TRIALS", {})
    first = preflight(job_of(spec(torch.optim.Adam, lr=0.1))).optimizer
    assert preflight(job_of(spec(torch.optim.Adam, lr=0.1))).optimizer is first and len(tried) == 1
    others = [spec(torch.optim.Adam, lr=0.2), spec(torch.optim.Adam, (), lr=0.1), spec(torch.optim.AdamW, lr=0.1)]
    for number, other in enumerate([*others, spec(optimizers.CountsInGroup), spec(optimizers.CountsInGroup)]):
        preflight(job_of(other))
        assert len(tried) == 2 + number  # code of users may do otherwise each time
    for _ in range(2):  # a tensor may be changed
        preflight(job_of(spec(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False)))
    assert len(tried) == 8


@pytest.mark.ci
def test_an_optimizer_of_pytorch_is_tried_again_when_a_method_of_it_is_replaced(monkeypatch):
    monkeypatch.setattr(try_optimizer_of_job, "_TRIALS", {})
    first, step = preflight(job_of(spec(torch.optim.Adam, lr=0.1))).optimizer, torch.optim.Adam.step
    assert first is not None and first.kind is OptimizerKind.ELEMENTWISE

    def scales(self, closure=None):
        for parameter in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            parameter.grad.add_(parameter.grad.norm())
        return step(self, closure)

    monkeypatch.setattr(torch.optim.Adam, "step", scales)
    replaced = preflight(job_of(spec(torch.optim.Adam, lr=0.1))).optimizer
    assert replaced is not None and replaced.kind is OptimizerKind.PER_PARAMETER
    monkeypatch.setattr(torch.optim.Adam, "step", step)
    assert preflight(job_of(spec(torch.optim.Adam, lr=0.1))).optimizer is first


REFUSED = {
    "int key": r"optimizer state 0 of first.weight is named by an int, not by a text",
    "empty key": r"optimizer state '' of first.weight is named by no printable text",
    "list": r"optimizer state 'factors' of first.weight is a list",
    "text": r"optimizer state 'mode' of first.weight is a str",
    "complex": r"optimizer state 'phase' of first.weight is a tensor of dtype complex128",
    "sparse": r"optimizer state 'rows' of first.weight is a sparse tensor",
    "object": r"optimizer state 'thing' of first.weight is an object",
    "two names": r"one tensor under two names, 'first' of first.weight and 'second' of first.weight",
    "gradient": r"one tensor under two names, 'last' of first.weight and the gradient of first.weight",
    "list in group": r"'seen' of the optimizer group '\*', which a step has changed, is a list",
    "list in attribute": r"'history', an attribute of the optimizer, which a step has changed, is a list",
    "generator": r"'dice', an attribute of the optimizer, which a step has changed, is a Generator",
    "state of no parameter": r"optimizer.state\['all'\] is of no parameter",
    "large attribute": r"'table', an attribute .* is a tensor of 262,144 bytes, more than 65,536",
}


@pytest.mark.parametrize("what", optimizers.KEPT)
def test_state_that_cannot_be_kept_is_refused_before_the_run_by_name(what: str):
    with pytest.raises(ConfigError, match=REFUSED[what]) as found:
        preflight(job_of(spec(optimizers.Keeps, (), what=what)))
    assert found.value.cure


SHAPES = {f"{layer}.{kind}": shape for layer in range(6) for kind, shape in (("weight", (6, 4)), ("bias", (6,)))}
"""Parameters of a model of twelve."""
OUTSIDE = {
    optimizers.CountsInModule: "keeps state in global variable '_calls' of helpers.optimizers, which its steps change",
    optimizers.CountsGlobally: "keeps state in global variable '_METER' of helpers.optimizers, which its steps change",
    optimizers.CountsInClass: "keeps state in class attribute 'calls' of helpers.optimizers.CountsInClass, which its",
    optimizers.CountsInObject: "'meter', an attribute of the optimizer, which a step has changed, is a Meter, neither",
    optimizers.CountsInClosure: "'count', an attribute of the optimizer, which a step has changed, is a function, neither",
}


@pytest.mark.parametrize("kind", OUTSIDE, ids=lambda kind: kind.__name__)
def test_state_in_objects_classes_globals_and_functions_is_refused_by_name_however_late_it_has_an_effect(kind):
    with pytest.raises(ConfigError, match=re.escape(OUTSIDE[kind])) as found:
        try_optimizer(spec(kind), SHAPES)
    assert "in optimizer.state[p], in param_groups" in found.value.cure


def test_a_table_that_the_first_step_makes_is_no_state():
    optimizers.CachesInClass.TABLE.clear()
    assert try_optimizer(spec(optimizers.CachesInClass), SHAPES).kind is OptimizerKind.ELEMENTWISE


class Hides(torch.optim.SGD):
    """Counts where nobody looks: in a list that is found through the frames of its caller."""

    def step(self, closure=None):
        calls = globals().setdefault("HIDDEN" + "_CALLS", [0])
        calls[0] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] / calls[0])


def test_state_that_nobody_can_see_is_found_because_a_resumed_optimizer_goes_on_otherwise():
    with pytest.raises(
        ConfigError, match=r"Hides trains differently once its state was saved and loaded \(after 6 steps\): in a trial"
    ):
        try_optimizer(spec(Hides, (), lr=0.1), SHAPES)


LATE = {
    "a warmup": {"warmup_steps": 50},
    "a long warmup": {"warmup_steps": 2000},
    "a very long warmup": {"warmup_steps": 3_000_000},
    "in every 250th step": {"every": 250},
}


@pytest.mark.parametrize("what", LATE)
def test_an_optimizer_that_couples_parameters_late_is_found(what: str):
    trial = try_optimizer(spec(optimizers.NormalisesAfter, **LATE[what]), SHAPES)
    assert trial.kind is OptimizerKind.COUPLED
    said = r"in a trial of (\d+) steps( \(counters set forward to [\d,]+\))? the weights of \S+ differ by"
    assert (steps := re.match(said, trial.difference)) and int(steps[1]) < 150, "the steps that were made"
    trial = try_optimizer(spec(optimizers.NormalisesAfter, together=False, **LATE[what]), SHAPES)
    assert trial.kind is OptimizerKind.PER_PARAMETER


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, optimizers.NormalisesAll])
def test_parameters_without_dimensions_are_tried_too(kind):
    """As a learned temperature: `nn.Parameter(torch.zeros(()))`."""
    trials = [try_optimizer(spec(kind, (), lr=0.1), {"scale": shape, "weight": (3, 2)}) for shape in ((), (1,))]
    assert trials[0].kind is trials[1].kind


def test_an_optimizer_that_takes_the_seventh_parameter_otherwise_is_found():
    trial = try_optimizer(spec(optimizers.TakesSeventhOtherwise, ()), SHAPES)
    assert trial.kind is OptimizerKind.COUPLED
    assert "with all 12 parameters and with 6 of them alone" in trial.difference


@pytest.mark.parametrize("after", [20, 30_000])
def test_state_that_can_be_kept_at_first_only_is_refused_before_the_run(after: int):
    with pytest.raises(ConfigError, match=r"KeepsListLater after \d+ steps.*: optimizer state 'factors' of \S+ is a list"):
        try_optimizer(spec(optimizers.KeepsListLater, after=after), SHAPES)


class EndsAfter(torch.optim.SGD):
    """Knows how many steps it will make, and refuses more."""

    steps = 0

    def __init__(self, params, lr, total_steps):
        super().__init__(params, lr)
        self.done, self.total_steps = 0, total_steps

    def step(self, closure=None):
        self.done += 1
        if self.done > self.total_steps:
            raise RuntimeError("enough")
        return super().step(closure)


@pytest.mark.parametrize("total", [12, 50, 1000])
def test_an_optimizer_may_refuse_to_go_on_after_its_last_step(total: int):
    trial = try_optimizer(spec(EndsAfter, (), lr=0.1, total_steps=total), SHAPES)
    assert trial.kind is OptimizerKind.ELEMENTWISE and [key.name for _, key in trial.keeps.shared] == ["done"]


def test_an_optimizer_that_takes_no_gradients_of_zero_is_refused_only_for_what_it_does_with_others():
    """The step that the trial makes without effect divided by zero in D-Adaptation's SGD, which was refused for every plan."""
    assert try_optimizer(spec(optimizers.DividesByNorm, ()), SHAPES).kind is OptimizerKind.PER_PARAMETER


def test_an_optimizer_that_counts_only_steps_with_gradients_is_not_for_stages():
    trial = preflight(job_of(spec(optimizers.CountsSteps))).optimizer
    with pytest.raises(ConfigError, match=r"'k' of the group .* having no gradient in some steps"):
        trial.check_plan(ParallelPlan.mesh(pp=3, layers=LAYERS))
    trial.check_plan(ParallelPlan.mesh(dp=3, layers=LAYERS))


def test_the_refusal_of_a_coupled_optimizer_says_what_why_and_the_cure_and_then_what_was_measured():
    trial = checked_job(job_of(spec(optimizers.NormalisesAll))).optimizer
    with pytest.raises(ConfigError) as found:
        trial.check_plan(ParallelPlan.mesh(pp=3, layers=LAYERS))
    what, cure = str(found.value).splitlines()
    assert re.fullmatch(
        r"NormalisesAll cannot be used with 3 stages: its step of one parameter depends on the other parameters, "
        r"and the optimizer of a stage has only that stage.s parameters",
        what,
    )
    assert cure.startswith("  cure: set plan.stages: 1 (plan.replicas may be any number), or use an optimizer that takes each")
    assert re.search(r"\); measured: in a trial of 12 steps .* differ by [\d.e-]+ ", cure)


def test_an_optimizer_that_draws_is_said_to_do_so():
    trial = checked_job(job_of(spec(optimizers.Draws))).optimizer
    with pytest.raises(ConfigError, match="its step draws random numbers, one after the other for all parameters of a stage"):
        trial.check_plan(ParallelPlan.mesh(pp=2, layers=LAYERS))


def test_the_planner_gives_one_stage_to_an_optimizer_that_couples_parameters_also_when_workers_are_lost_or_join():
    job = job_of(spec(optimizers.NormalisesAll))
    chosen = choose_plan(job, checked_job(job), None, "", 4)
    assert chosen.profile.most_stages == 1 and len(chosen.plan.stages) == 1
    heavy = replace(chosen.profile, layers=tuple(replace(x, parameter_bytes=1 << 30) for x in chosen.profile.layers))
    for workers in range(1, 5):  # as `PlanCache` does: the request has the profile
        assert {c.stages for c in enumerate_candidates(heavy, workers, job.batching)} == {1}
    free = replace(heavy, most_stages=None)
    assert {c.stages for c in enumerate_candidates(free, 4, job.batching)} == {1, 2, 3, 4}


def saved(spec: Job, plan: ParallelPlan, folder: Path, disturb=lambda run: None, metrics=None, done: int = 2) -> Path:
    with OneProcessRun(spec, plan, "1f1b") as run:
        for step in range(done):
            run.step(step)
        disturb(run)
        begun = checkpoint_files.create_checkpoint(folder, done)
        for core in run.cores:
            core.start_save(begun)
        records = [core.save_result() for core in run.cores]
        contract = contract_of_job(spec)
        return checkpoint_files.commit_checkpoint(begun, records, steps_done=done, contract=contract, metrics=metrics)


def test_shared_state_is_in_a_checkpoint_once_by_the_group_s_pattern_and_by_attribute(tmp_path: Path):
    path = saved(job_of(spec(optimizers.CountsInGroup)), ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS), tmp_path / "groups")
    groups, attributes = checkpoint_files.read_shared_state(path)
    assert {pattern: state["k"] for pattern, state in groups.items()} == {"*.bias": 2, "*": 2} and not attributes
    assert all(torch.equal(state["weight_sum"], groups["*"]["weight_sum"]) for state in groups.values())
    assert "lr" not in groups["*"] and groups["*"].keys() == {"k", "weight_sum"}, "hyperparameters are the job's"
    path = saved(job_of(spec(optimizers.CountsInAttribute)), ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path / "attributes")
    groups, attributes = checkpoint_files.read_shared_state(path)
    assert not any(groups.values()) and attributes["*"]["count"] == 2 and attributes["*"]["total"].tolist() == [2.0, 1.0]


def test_stages_that_disagree_on_what_they_share_make_no_checkpoint(tmp_path: Path):
    def disturb(run: OneProcessRun) -> None:
        run.cores[1].step_commit.optimizers[1, 0].param_groups[-1]["k"] = 7

    with pytest.raises(
        CheckpointError, match=r"stages disagree on 'k' of the optimizer group '\*'.*: 2 in stage 0, 7 in stage 1"
    ):
        saved(job_of(spec(optimizers.CountsInGroup)), ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path, disturb)


def forged(path: Path, change) -> Path:
    """A checkpoint whose manifest's entries were changed, with a checksum that fits."""
    body = json.loads((path / "manifest.json").read_text())
    del body["sha256"]
    body["entries"] = [entry for entry in map(change, body["entries"]) if entry is not None]
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": manifest_checksum(body)}))
    return path


def as_of_format_2(path: Path) -> Path:
    body = json.loads((path / "manifest.json").read_text())
    body = {key: value for key, value in body.items() if key not in ("sha256", "kept")} | {"format": 2}
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": manifest_checksum(body)}))
    return path


def without(**named: str):
    return lambda entry: None if named.items() <= entry.items() else entry


def having(value, **named: str):
    return lambda entry: {**entry, "value": value} if named.items() <= entry.items() else entry


def encoded(tensor: torch.Tensor):
    made = encode_tensor(tensor)
    return {"dtype": made.dtype, "shape": list(made.shape), "data": made.data}


COUNT_OF_BIASES = {"kind": "optimizer group", "name": "*.bias", "state": "k"}
SUM = {"kind": "optimizer group", "name": "*", "state": "weight_sum"}
TOTAL = {"kind": "optimizer attribute", "name": "*", "state": "total"}
FORGED = {
    "no count of a group": (optimizers.CountsInGroup, without(**COUNT_OF_BIASES), "lacks 'k' of the group '*.bias'"),
    "no sum of a group": (optimizers.CountsInGroup, without(**SUM), "lacks 'weight_sum' of the group '*'"),
    "no attribute": (optimizers.CountsInAttribute, without(**TOTAL), "lacks the attribute 'total'"),
    "a tensor as count": (
        optimizers.CountsInGroup,
        having(encoded(torch.ones(())), **COUNT_OF_BIASES),
        "has 'k' of the group '*.bias' as float32 of shape [], and it is a number",
    ),
    "another dtype": (
        optimizers.CountsInGroup,
        having(encoded(torch.ones((), dtype=torch.int64)), **SUM),
        "has 'weight_sum' of the group '*' as int64 of shape [], and it is float32 of shape []",
    ),
    "another shape": (
        optimizers.CountsInAttribute,
        having(encoded(torch.ones(3)), **TOTAL),
        "has the attribute 'total' as float32 of shape [3], and it is float32 of shape [2]",
    ),
    "no state": (torch.optim.Adam, without(kind="optimizer"), "lacks 'exp_avg' of "),
}


_CHECKED: dict[str, PreflightResult] = {}


def checked_job(job: Job) -> PreflightResult:
    """What a check before the run finds; the same jobs are checked once, for tests of what comes after it."""
    if repr(job) not in _CHECKED:
        _CHECKED[repr(job)] = preflight(job)
    return _CHECKED[repr(job)]


def resumes(job: Job, path: Path) -> None:
    """Raises what a resume says of a checkpoint before a run is made."""
    options = LaunchOptions(job, lambda chosen: pytest.fail("no run is made"))
    _, choose = prepare_resumed_run(open_checkpoint(str(path)), options, lambda checked: None, lambda event: None)
    choose(checked_job(job))


BEGIN_LATE = {
    "after so many steps": ({"after": 3}, warm),
    "above a learning rate": ({"above": 0.0005}, optimizers.small_for_two),
}
"""Optimizers that have no state of a parameter after the first step, which the trial sees of the first one only."""


@pytest.mark.ci
@pytest.mark.parametrize("what", BEGIN_LATE)
def test_a_checkpoint_before_an_optimizer_begins_its_state_is_resumed(what: str, tmp_path: Path):
    options, schedule = BEGIN_LATE[what]
    job = job_of(spec(optimizers.BeginsAbove, (), **options), lr_schedule=LrScheduleConfig(function=schedule))
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path, done=1)
    resumes(job, path)
    with (
        OneProcessRun(job, ParallelPlan.mesh(layers=LAYERS), "1f1b") as whole,
        OneProcessRun(job, ParallelPlan.mesh(dp=2, layers=LAYERS), "1f1b") as resumed,
    ):
        for core in resumed.cores:
            core.load(path)
        for step in range(job.steps):
            whole.step(step)
            if step:
                resumed.step(step)
        want = whole.parameters()
        assert whole.cores[0].step_commit.optimizers[0, 0].state, "it has begun"
        for name, copies in resumed.parameters().items():
            assert all(torch.equal(copy, want[name][0]) for copy in copies), name


@pytest.mark.ci
@pytest.mark.parametrize(
    "kind, done, name",
    [(torch.optim.AdamW, 5, "first.weight"), (torch.optim.AdamW, 5, None), (optimizers.BeginsAbove, 5, None)],
)
def test_a_checkpoint_that_has_lost_state_which_was_there_is_refused_with_the_parameter_s_name(
    kind: type, done: int, name: str | None, tmp_path: Path
):
    given = {"after": 3} if kind is optimizers.BeginsAbove else {}
    job = job_of(spec(kind, (), **given))
    path = saved(job, ParallelPlan.mesh(pp=2, dp=2, layers=LAYERS), tmp_path, done=done)
    resumes(job, path)
    forged(path, without(kind="optimizer", **({} if name is None else {"name": name})))
    first = name or "block0.down.bias"
    with pytest.raises(CheckpointError, match=rf"lacks '\w+' of {first}, which the optimizer had") as found:
        resumes(job, path)
    assert "init_from=" in found.value.cure


@pytest.mark.parametrize("state", ["step", "exp_avg"])
def test_a_checkpoint_that_has_lost_one_number_or_tensor_of_one_parameter_is_refused_at_a_resume_and_by_a_worker(
    state: str, tmp_path: Path
):
    job = job_of(spec(optimizers.CountsForEach if state == "step" else torch.optim.AdamW, ()))
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path)
    entries = json.loads((path / "manifest.json").read_text())["entries"]
    (lost,) = (e for e in entries if e["name"] == "first.weight" and e.get("state") == state)
    assert ("value" in lost) == (state == "step"), "a number is in the manifest alone"
    forged(path, without(kind="optimizer", name="first.weight", state=state))
    said = rf"lacks '{state}' of first\.weight, which the optimizer had"
    with pytest.raises(CheckpointError, match=said):
        resumes(job, path)
    with OneProcessRun(job, ParallelPlan.mesh(layers=LAYERS), "1f1b") as run, pytest.raises(CheckpointError, match=said):
        run.cores[0].load(path)


def test_a_name_that_is_removed_with_its_state_is_refused_by_the_manifest_s_checksum(tmp_path: Path):
    """Who computes the checksum anew may write any checkpoint: it has no secret."""
    path = saved(job_of(spec(torch.optim.AdamW, ())), ParallelPlan.mesh(layers=LAYERS), tmp_path)
    body = json.loads((path / "manifest.json").read_text())
    body["kept"]["first.weight"].remove("exp_avg")
    body["entries"] = [e for e in body["entries"] if (e["name"], e.get("state")) != ("first.weight", "exp_avg")]
    (path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="was altered: its checksum is another"):
        load_manifest(path)


@pytest.mark.ci
def test_a_checkpoint_that_does_not_say_what_there_was_is_checked_by_the_trial(tmp_path: Path):
    """Those of an earlier raypar, format 2, cannot tell state that was lost from state that had not begun."""
    job = job_of(spec(torch.optim.AdamW, ()))
    path = as_of_format_2(saved(job, ParallelPlan.mesh(layers=LAYERS), tmp_path))
    resumes(job, path)
    forged(path, without(kind="optimizer", name="first.weight"))
    resumes(job, path)
    forged(path, without(kind="optimizer"))
    with pytest.raises(CheckpointError, match="has weights, and no state of the optimizer"):
        resumes(job, path)


def test_a_worker_s_file_that_is_lost_before_the_manifest_is_written_is_missed(tmp_path: Path):
    """Each worker records what its optimizers hold, whoever writes it."""
    job = job_of(spec(torch.optim.AdamW, ()))
    with OneProcessRun(job, ParallelPlan.mesh(dp=2, layers=LAYERS), "1f1b") as run:
        run.step(0)
        begun = checkpoint_files.create_checkpoint(tmp_path, 1)
        for core in run.cores:
            core.start_save(begun)
        first, second = (core.save_result() for core in run.cores)
        lost = replace(second, entries=tuple(e for e in second.entries if e.kind.kind != "optimizer"))
        path = checkpoint_files.commit_checkpoint(begun, [first, lost], steps_done=1, contract=contract_of_job(job))
    with pytest.raises(CheckpointError, match="which the optimizer had"):
        resumes(job, path)


@pytest.mark.parametrize("what", FORGED)
def test_a_checkpoint_that_lacks_state_of_the_optimizer_or_has_another_form_of_it_is_refused(what: str, tmp_path: Path):
    kind, change, said = FORGED[what]
    job = job_of(spec(kind))
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path)
    resumes(job, path)
    forged(path, change)
    with pytest.raises(CheckpointError, match=re.escape(said)) as found:
        resumes(job, path)
    assert "init_from=" in found.value.cure


@pytest.mark.parametrize("kind", [optimizers.SumsLearningRates, optimizers.SumsInGroup, torch.optim.Adam])
def test_a_checkpoint_after_steps_with_learning_rate_0_is_resumed(kind, tmp_path: Path):
    """A sum of learning rates was missed in it: it still had the value that it was given."""
    job = job_of(spec(kind, ()), lr_schedule=LrScheduleConfig(function=optimizers.zero_at_first))
    resumes(job, saved(job, ParallelPlan.mesh(layers=LAYERS), tmp_path))


@pytest.mark.ci
@pytest.mark.parametrize("kind", [optimizers.CountsInGroup, torch.optim.Adam])
def test_a_checkpoint_after_skipped_steps_only_is_resumed(kind, tmp_path: Path):
    """It was said to have weights and no state of the optimizer, which is what the run itself has then."""
    job = job_of(spec(kind, ()), loss=LossConfig(function=optimizers.no_number), non_finite="skip")
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path, metrics={"loss": float("nan"), "norm": float("nan")})
    resumes(job, path)
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path / "other", metrics={"loss": 1.0, "norm": float("inf")})
    resumes(job, path)
    path = saved(job, ParallelPlan.mesh(pp=2, layers=LAYERS), tmp_path / "damaged", metrics={"loss": 1.0, "norm": 1.0})
    with pytest.raises(CheckpointError, match="has weights, and no state of the optimizer"):
        resumes(job, as_of_format_2(path))  # which does not say that there was none


def test_what_comes_back_to_the_value_that_it_was_given_may_be_missing():
    (entry,) = try_optimizer(spec(optimizers.CountsToTwenty, ()), SHAPES).keeps.shared.values()
    assert not entry.is_always_there and entry.forms == {NUMBER}


def test_state_that_can_no_longer_be_kept_is_reported_and_the_weights_are_saved_without_it(tmp_path: Path):
    job = job_of(
        spec(optimizers.KeepsListLater, (), above=0.01), lr_schedule=LrScheduleConfig(function=optimizers.doubles_after_two)
    )
    with OneProcessRun(job, ParallelPlan.mesh(pp=2, layers=LAYERS), "1f1b") as run:
        reports = [run.step(step) for step in range(4)]
        assert [any(report.not_kept for report in of_step) for of_step in reports] == [False, False, False, True]
        assert re.match("optimizer state 'factors' of first.weight is a list", reports[3][0].not_kept)
        with pytest.raises(StateNotKeptError, match=r"'factors' of first\.weight is a list"):
            run.cores[0].start_save(checkpoint_files.create_checkpoint(tmp_path, 4))
        begun = checkpoint_files.create_checkpoint(tmp_path, 4, only_weights=True)
        for core in run.cores:
            core.start_save(begun, only_weights=True)
        records = [core.save_result() for core in run.cores]
        weights = checkpoint_files.commit_checkpoint(begun, records, steps_done=4, contract={}, only_weights=True)
        found = CheckpointTensors(weights)
        assert all(torch.equal(found[name], copies[0]) for name, copies in run.parameters().items())
    assert checkpoint_files.latest_usable_checkpoint(tmp_path) == (None, [])
    with pytest.raises(CheckpointError, match="has weights, and no state of the optimizer"):
        preflight(job).optimizer.keeps.check(load_manifest(weights))


def test_state_that_cannot_be_moved_is_an_error_for_whoever_needs_it():
    """The mirror copies what stands for it, so that no worker waits; a recovery from that copy is refused."""
    error = StateNotKeptError("optimizer state 'factors' of w is a list", cure="")
    stands = OptimizerState.not_kept(["w"], error)
    copy = StateCopy.of({("w", WHOLE): {PARAMETER: torch.ones(2), **stands["w"]}}, BufferPool())
    held = {name: dict(holding.state) for (name, _), holding in copy.holdings().items()}
    with pytest.raises(StateNotKeptError, match="'factors' of w is a list"):
        OptimizerState.of_parameters(held, {"w": "*"})


def test_a_snapshot_that_no_reader_would_take_is_no_checkpoint(tmp_path: Path):
    """The manifest's own rules come before the checkpoint has its name."""
    begun = checkpoint_files.create_checkpoint(tmp_path, 1)
    state = {("w", PARAMETER): torch.ones(2), ("w", BUFFER): torch.ones(2)}
    record = checkpoint_files.write_shard(begun, "a.safetensors", state)
    with pytest.raises(CheckpointError, match="makes no checkpoint that could be read: w is both buffer and parameter"):
        checkpoint_files.commit_checkpoint(begun, [record], steps_done=1, contract={})
    assert checkpoint_files.latest_usable_checkpoint(tmp_path) == (None, [])


def test_the_mirror_has_what_parameters_share_and_keeps_names_apart():
    for kind in (optimizers.CountsInGroup, optimizers.HostileNames):
        with OneProcessRun(job_of(spec(kind)), ParallelPlan.mesh(layers=LAYERS), "1f1b") as run:
            run.step(0)
            (optimizer,) = run.cores[0].step_commit.optimizers.values()
            names = names_with_patterns(optimizer)
            state = read_optimizer_state(optimizer)
            by_name = state.by_parameter(names)
            copy = StateCopy.of(
                {(n, WHOLE): {PARAMETER: p[0], **by_name[n]} for n, p in run.parameters().items()}, BufferPool()
            )
            held = {name: dict(holding.state) for (name, _), holding in copy.holdings().items()}
            assert all(torch.equal(held[name][PARAMETER], values[0]) for name, values in run.parameters().items())
            found = OptimizerState.of_parameters(held, names)
            pairs = [(found.parameters[n], state.parameters[n]) for n in names]
            pairs += [(found.groups[pattern], state.groups[pattern]) for pattern in set(names.values())]
            assert all(one.keys() == other.keys() for one, other in pairs)
            assert all(comparable_content(one[key]) == comparable_content(other[key]) for one, other in pairs for key in one)


def test_a_checkpoint_of_format_1_is_read_and_training_goes_on_from_it():
    """Written before names of optimizer state and raypar's own kinds were apart."""
    there = Path(__file__).parents[1] / "data/checkpoint_format_1/step_00000002"
    manifest = checkpoint_files.verify_checkpoint(there)
    job = ugly_models.job("tangled", steps=5)
    assert not contract_comparison.list_contract_differences(manifest, job)
    raw = {key: value for file in manifest.files for key, value in load_file(there / file).items()}
    found = checkpoint_files.read_checkpoint_state(there)
    assert {len(state) for state in found.values()} == {1, 4}, "frozen ones have no optimizer state"
    for name, state in found.items():
        assert torch.equal(state[PARAMETER], raw[name])
        assert all(torch.equal(value, raw[f"{name}#{key.name}"]) for key, value in state.items() if key != PARAMETER)
    assert checkpoint_files.read_shared_state(there) == ({}, {})
    counts = {("*", StateKey(GROUP, "k")): SharedEntry(True, frozenset((NUMBER,)))}
    assert ExpectedOptimizerState({}, True).describe_missing(manifest) is None
    said = ExpectedOptimizerState(counts).describe_missing(manifest)
    ExpectedOptimizerState(counts, True).check(manifest)
    assert "step_00000002 lacks 'k' of the group '*' of the optimizer" in said and "cure: " in said
    ends = []
    for plan in (ParallelPlan.mesh(layers=9), ParallelPlan.mesh(pp=3, dp=2, layers=9)):
        with OneProcessRun(job, plan, "1f1b") as run:
            for core in run.cores:
                core.load(there)
            run.step(2)
            ends.append(weights_hash({name: copies[0] for name, copies in run.parameters().items()}))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("attribute", ["__class__", "param_groups", "state", "step", "raypar_given"])
def test_a_file_cannot_give_an_optimizer_attributes_that_are_no_state(attribute: str):
    made = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "raypar_pattern": "*", "raypar_names": ["w"]}], 0.1)
    with pytest.raises(CheckpointError, match="as state of the optimizer, which is none"):
        write_optimizer_state(made, OptimizerState(attributes={"*": {attribute: 1}}))


@pytest.mark.parametrize("key", ["params", "raypar_base_lr", "raypar_names"])
def test_a_file_cannot_give_a_group_entries_that_are_no_state(key: str):
    made = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "raypar_pattern": "*", "raypar_names": ["w"]}], 0.1)
    with pytest.raises(CheckpointError, match=r"of the group .* as state of the optimizer, which is none"):
        write_optimizer_state(made, OptimizerState(groups={"*": {key: 1}}))
