"""A plan without cuts is cut by measured times: results do not change, given cuts win, and everywhere it is said."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import parity, ugly_models
from helpers.shard_grid import VOCAB, WIDTH, Cell

from examples import gpt
from raypar.cli import main
from raypar.job import Job, ModelConfig
from raypar.job.read_job import parse_job
from raypar.launch.choose_plan import ChosenPlan, choose_plan, describe_chosen_plan, make_plan_chooser, plan_json
from raypar.planner.candidate_plans import enumerate_candidates
from raypar.planner.model_profile import LayerProfile, ModelProfile
from raypar.planner.plan_search import evaluate_candidate
from raypar.worker import measure_profile
from raypar.worker.job_preflight import preflight
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pytest.mark.part(4)

GPT = "jobs/quickstart.yaml"


def measures(monkeypatch: pytest.MonkeyPatch, *forward_ms: float) -> None:
    """Let profiles find these times, whatever the layers are."""
    layers = tuple(LayerProfile(f"l{i}", ms, 2 * ms, ms, ms) for i, ms in enumerate(forward_ms))
    monkeypatch.setattr(measure_profile, "profile_job", lambda spec, **more: ModelProfile(layers))


def chosen(spec: Job, **plan: object) -> ChosenPlan:
    """What a run with this plan section starts with."""
    text = json.dumps({**json.loads(JOB), "plan": plan})
    return make_plan_chooser(spec.replace(plan=parse_job(text).plan))(preflight(spec))


def gpt_of_six_layers() -> Job:
    """Two steps of the smallest GPT with styles."""
    model = ModelConfig(function=gpt.layers, args={"vocab": VOCAB, "width": WIDTH, "depth": 4, "heads": 5, "context": 8})
    return Cell("gpt", "1f1b", (1,), (1,), 5).job.replace(model=model, steps=2)


JOB = json.dumps(
    {
        "name": "default_cut",
        "steps": 1,
        "batch_size": 8,
        "microbatches": 4,
        "model": "given:elsewhere",
        "loss": "given:elsewhere",
        "data": "given:elsewhere",
        "optimizer": "torch.optim:SGD",
    }
)


@pytest.mark.ci
@pytest.mark.parametrize(("schedule", "replicas"), [("1f1b", 1), ("1f1b", 2), ("zb-v", 1), ("interleaved", 1)])
def test_layers_that_are_cut_by_measured_times_give_the_bits_of_one_process(monkeypatch, schedule, replicas):
    spec = ugly_models.job("tangled", microbatches=5, steps=parity.STEPS, virtual_replicas=0)
    layers = len(preflight(spec).graph.layers)
    measures(monkeypatch, *[40.0, 30.0, *[1.0] * (layers - 2)])
    plan = chosen(spec, stages=2, replicas=replicas, schedule=schedule).plan
    assert plan.split_points != plan.with_even_stages().split_points
    want = parity.expected("tangled", 5, 0)
    with OneProcessRun(spec, plan, schedule) as run:
        for step in range(parity.STEPS):
            assert {report.loss for report in run.step(step)} == {want.losses[step]}
            assert not parity.different_gradients(run, want, step)
        parameters = run.parameters()
        assert not [d for n, p in want.parameters.items() for d in parity.differences(n, parameters[n], p)]


@pytest.mark.ci
def test_each_layer_keeps_its_number_of_shards_and_so_its_results(monkeypatch):
    spec = gpt_of_six_layers()
    measures(monkeypatch, 1.0, 1.0, 20.0, 20.0, 1.0, 1.0)
    plan = chosen(spec, stages=3, shards=[2, 2, 1]).plan
    even = plan.with_even_stages()
    assert (even.split_points, plan.split_points) == ((2, 4), (3, 4))
    assert plan.shards_by_layer == even.shards_by_layer == (2, 2, 2, 2, 1, 1)
    found = []
    for one in (even, plan):
        with OneProcessRun(spec, one, "1f1b") as run:
            losses = [run.step(step)[0].loss for step in range(2)]
            found.append((losses, run.gradients(), run.parameters()))
    assert found[0][0] == found[1][0]
    for before, after in zip(found[0][1:], found[1][1:], strict=True):
        assert before.keys() == after.keys()
        for name, copies in before.items():
            assert all(torch.equal(a, b) for a, b in zip(copies, after[name], strict=True)), name


def test_cuts_that_are_given_stay_and_nothing_is_said_of_them(monkeypatch):
    spec = ugly_models.job("plain", microbatches=4, steps=1, virtual_replicas=0)
    layers = len(preflight(spec).graph.layers)
    measures(monkeypatch, *[40.0, *[1.0] * (layers - 1)])
    given = chosen(spec, stages=2, cuts=[5])
    assert given.plan.split_points == (5,) and given.balance is None and given.why == ""
    alone = chosen(spec, stages=layers)
    assert alone.balance is None, "with a layer in every stage there is nothing to choose"


def test_the_start_and_plan_json_say_which_split_points_were_chosen_and_why(monkeypatch):
    spec = ugly_models.job("plain", microbatches=4, steps=1, virtual_replicas=0)
    layers = len(preflight(spec).graph.layers)
    measures(monkeypatch, *[40.0, *[1.0] * (layers - 1)])
    found = chosen(spec, stages=2)
    assert found.plan.split_points == (1,)
    assert "\nstages cut by measured times, plan.cuts=[1]: predicted" in describe_chosen_plan(found)
    told = json.loads(plan_json(found))
    assert [stage["first"] for stage in told["stages"]] == [0, 1]
    assert told["stage_balance"]["chosen"] == "measured times" and told["stage_balance"]["by_measured_times"]["cuts"] == [1]


def test_raypar_plan_shows_the_cut_of_a_run_and_without_times_says_that_it_is_not(monkeypatch, capsys):
    measures(monkeypatch, 40.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert main(["plan", GPT]) == 0
    shown = capsys.readouterr().out
    assert "stages cut by measured times, plan.cuts=[1]: predicted" in shown and "block0 .. head (5)" in shown
    assert main(["plan", GPT, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stage_balance"]["by_number_of_layers"]["cuts"] == [3]
    assert told["workers"][0]["layers"] == [["embed"]]
    assert main(["plan", GPT, "--no-profile"]) == 0
    shown = capsys.readouterr().out
    assert "stages cut by number of layers; without --no-profile, and in a run, measured times decide" in shown
    assert main(["plan", GPT, "--no-profile", "--set", "plan.cuts=[2]"]) == 0
    assert "stages cut" not in capsys.readouterr().out


def test_a_warmup_is_kept_whatever_the_cut(monkeypatch):
    measures(monkeypatch, 40.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    found = chosen(gpt_of_six_layers(), stages=2, warmup=[3, 1])
    assert found.plan.split_points == (1,)
    assert [str(i) for i in found.schedule_instructions[0][:4]] == ["0F0", "0F1", "0F2", "0B0"]


@pytest.mark.parametrize("room", [True, False])
def test_plan_auto_recomputes_where_memory_asks_for_it_with_the_bits_of_one_process(monkeypatch, room):
    spec = ugly_models.job("tangled", microbatches=5, steps=parity.STEPS, virtual_replicas=1)
    checked = preflight(spec)
    profile = replace(measure_profile.profile_job(spec, workers=2, graph=checked.graph, recompute=None), processors=None)
    assert profile.recomputable == tuple(range(len(checked.graph.layers)))
    plans = [c for c in enumerate_candidates(profile, 2, spec.batching) if c.stages == 2]
    least = min(evaluate_candidate(profile, c, spec.batching).memory_bytes for c in plans)
    tight = replace(profile, memory_bytes=least if room else least - 1)
    monkeypatch.setattr(measure_profile, "profile_job", lambda spec, **more: tight)
    found = choose_plan(spec, checked, None, "", 2)
    assert found.plan.world == 2 and bool(found.plan.recompute) is not room
    assert (", recomputing" in describe_chosen_plan(found).splitlines()[0]) is not room
    want = parity.expected("tangled", 5, 1)
    with OneProcessRun(spec, found.plan, found.schedule_instructions) as run:
        for step in range(parity.STEPS):
            assert {report.loss for report in run.step(step)} == {want.losses[step]}
        parameters = run.parameters()
        assert not [d for n, p in want.parameters.items() for d in parity.differences(n, parameters[n], p)]


def test_a_layer_that_may_not_be_recomputed_is_not_refused_by_plan_auto_but_left_out():
    spec = gpt_of_six_layers().replace(model=ModelConfig(function=with_a_counter))
    assert measure_profile.profile_job(spec, workers=1, recompute=None).recomputable == (0, 1, 3)


def with_a_counter() -> torch.nn.Sequential:
    """Layer 2 computes something else each time."""
    embed, block, _, head = gpt.layers(VOCAB, WIDTH, 2, 5, 8)
    return torch.nn.Sequential(embed, block, Counter(), head)


class Counter(torch.nn.Module):
    """Adds the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def test_time_in_which_another_process_had_the_processor_is_not_measured(monkeypatch):
    """Each call takes some ms, of which this thread waits for a processor all but a few."""
    clock = iter(range(10_000))
    waits = iter(0.008 * (n // 2 + n % 2) for n in range(10_000))
    monkeypatch.setattr(measure_profile.time, "perf_counter_ns", lambda: next(clock) * 10_000_000)
    monkeypatch.setattr(measure_profile, "thread_cpu_wait_s", lambda thread: next(waits))
    assert measure_profile.measure_median_ms(lambda: None) == pytest.approx((2.0,))
