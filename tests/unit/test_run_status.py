"""`raypar status`: phase, speed, members and story of a run, from the files in its folder."""

import json
import os
from types import SimpleNamespace

import pytest
from helpers.recorded_runs import view_of

from raypar.actors import members_file_text
from raypar.actors.members_file_text import MembersFileText
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.worker_and_generation_events import training_facts
from raypar.cli import main
from raypar.console.read_run_folder import find_dead_local_nodes
from raypar.console.run_status import build_run_status, format_status
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.plan import ParallelPlan
from raypar.storage.run_folder import RunFolder

NODES = ["b09ad58ff304f43b", "70961f5a11a2f848"]
PLAN = {"schedule": "1f1b", "stages": [{"replicas": 2}, {"replicas": 2}]}


def member(worker, stage, replica, node):
    coordinate = f"worker {worker} (stage {stage}, replica {replica})"
    return {"worker": worker, "coordinate": coordinate, "node": NODES[node], "pid": 5000 + worker, "host": "alpha"}


def line(step, at_s, seconds=0.1):
    return {"step": step, "loss": 2.0, "seconds": seconds, "samples_per_s": 8 / seconds, "time": at_s}


MEMBERS = {
    "time": 1005.0,
    "phase": "running",
    "generation": 2,
    "plan": "3 stages x 1 replica",
    "schedule": "1f1b",
    "step": 49,
    "members": [member(0, 0, 0, 0), member(1, 1, 0, 1), member(10, 2, 0, 1)],
    "spares": [{"worker": 11, "node": NODES[0], "pid": 5011, "host": "alpha"}],
    "wanted": 4,
    "why": "worker 3 was lost",
}
EVENTS = [
    {"kind": "started", "text": "4 workers on 2 nodes", "time": 1000.0},
    {"kind": "checkpoint", "step": 10, "path": "a", "time": 1001.0},
    {"kind": "checkpoint", "step": 20, "path": "b", "time": 1002.0},
    {"kind": "lost", "worker": 3, "node": NODES[1], "pid": 5003, "why": "killed", "time": 1004.5},
    {"kind": "recovering", "generation": 2, "text": "the connection was closed", "time": 1004.6},
    {"kind": "generation", "generation": 2, "workers": [0, 1, 10], "step": 49, "pause_s": 0.4, "time": 1005.0},
]
METRICS = [line(step, 1000 + step / 10) for step in range(1, 50)] + [line(50, 1005.2, 0.2), line(51, 1005.4, 0.2)]


def of(**facts):
    given = {"steps": 200, "plan": PLAN, "members": MEMBERS, "metrics": METRICS, "events": EVENTS, "cluster": None}
    given |= {"now": 1005.5} | facts
    return build_run_status("tiny", "runs/tiny", view_of(given.pop("metrics"), given.pop("events")), **given)


def test_the_precision_is_that_of_the_last_start_and_only_said_where_it_is_set():
    mixed = {"kind": "started", "text": "4 workers", "time": 1000.5, "precision": "bf16"}
    assert "3 stages x 1 replica, schedule 1f1b, computing in bf16" in format_status(of(events=[EVENTS[0], mixed, *EVENTS[1:]]))
    assert of(events=[mixed, *EVENTS]).precision is None and "computing in" not in format_status(of())


def test_a_run_that_gives_up_equal_bits_says_so_in_its_log_and_in_its_status():
    fast = {"kind": "started", "text": "4 workers", "time": 1000.5, **training_facts({"reduction": "fast"})}
    assert "schedule 1f1b, fast reduction: not bit-identical" in format_status(of(events=[EVENTS[0], fast, *EVENTS[1:]]))
    assert training_facts({"reduction": "canonical"}) == {} and "reduction" not in format_status(of())
    for reduction, said in (("fast", ["not bitwise: reduction is fast"]), ("canonical", [])):
        recorder = SimpleNamespace(request=SimpleNamespace(contract={"reduction": reduction}))
        assert [
            line.partition(": gradients")[0]
            for line in RunRecorder.why_not_bitwise(recorder, [SimpleNamespace(fingerprint={})])
        ] == said


def test_members_json_is_written_again_when_the_last_step_has_been_executed_again():
    """Nothing else in it changes then, and it said for ever that steps were being executed again."""
    status = MembersFileText(SimpleNamespace(plan=ParallelPlan.mesh(layers=1), policy=RunPolicy(workers=1, job_steps=20)))
    machine = RunMachine(RunPolicy(workers=1, job_steps=20))
    machine.phase = Phase.RUNNING
    progress = machine.progress
    progress.committed, progress.journalled, progress.emitted = 8, 10, 10

    def replaying() -> object:
        made = status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b")
        return None if made is None else (json.loads(made)["replaying"],)

    assert replaying() == ({"step": 8, "until": 10},)
    progress.committed = 10
    assert replaying() == (None,)
    progress.committed = progress.journalled = 11
    assert replaying() is None


def test_steps_that_are_executed_again_are_counted_in_members_json_also_after_the_clock_was_set_back(monkeypatch):
    """They were not until the clock had caught up with its former time."""
    status = MembersFileText(SimpleNamespace(plan=ParallelPlan.mesh(layers=1), policy=RunPolicy(workers=1, job_steps=20)))
    machine = RunMachine(RunPolicy(workers=1, job_steps=20))
    machine.phase, machine.progress.committed, machine.progress.journalled = Phase.RUNNING, 3, 10
    clocks = {"time": 1e9, "monotonic": 50.0}
    for name in clocks:
        monkeypatch.setattr(members_file_text.time, name, lambda name=name: clocks[name])
    assert status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b") is not None
    machine.progress.committed = 4
    clocks["time"] -= 3600.0
    clocks["monotonic"] += members_file_text.AGAIN_S + 0.1
    text = status.text_if_changed(machine, lambda n: {}, lambda plan: "1f1b")
    assert text is not None and json.loads(text)["replaying"]["step"] == 4 and json.loads(text)["time"] == 1e9 - 3600.0


def test_the_facts_of_workers_are_made_when_something_has_changed_and_not_after_every_report():
    """With 64 workers each of their reports had the facts of all 64 made: three quarters of a driver's time."""
    plan = ParallelPlan.mesh(dp=3)
    status = MembersFileText(SimpleNamespace(plan=plan, policy=RunPolicy(workers=1, job_steps=20)))
    machine = RunMachine(RunPolicy(workers=3, job_steps=20), plan=plan)
    machine.phase = Phase.RUNNING
    asked = []

    def made(started: int = 3) -> bool:
        asked.clear()
        told = status.text_if_changed(machine, lambda n: asked.append(n) or {"worker": n}, lambda plan: "1f1b", started)
        return told is not None

    assert made() and asked == [0, 1, 2]
    machine.progress.committed = machine.progress.journalled = machine.progress.emitted = 7
    assert not made() and asked == []
    for change in (
        lambda: machine.membership.gone.add(1),
        lambda: machine.membership.spares.add(4),
        lambda: machine.hiring.starting.add(5),
        lambda: setattr(machine.membership, "members", (0, 4, 2)),
        lambda: setattr(machine.membership, "generation", 2),
        lambda: setattr(machine, "phase", Phase.CLAIMING),
    ):
        change()
        assert made() and asked
    assert not made(started=4) and asked, "a worker of which more is known now; it is the same here"


def test_shards_are_told_with_the_plan_and_with_each_worker():
    plan = {"schedule": "1f1b", "stages": [{"replicas": 1, "shards": 2}, {"replicas": 2, "shards": 1}]}
    place = "worker 1 (stage 0, replica 0, shard 1)"
    there = {**member(1, 0, 0, 0), "coordinate": place}
    shown = format_status(of(plan=plan, members={**MEMBERS, "plan": None, "members": [there]}))
    assert "plan     2 stages x 1/2 replicas x 2/1 shards, schedule 1f1b" in shown
    assert "  1       stage 0, replica 0, shard 1  b09ad58f" in shown


def test_samples_a_second_and_the_time_of_a_step_are_of_the_same_steps_and_say_of_which_kind():
    """A mean speed stood beside the median time, as if they belonged together: 263 samples/s, 126 ms."""
    uneven = [line(step, 1000 + step, seconds) for step, seconds in enumerate([9.0] + [0.126] * 15 + [0.6] * 5, start=1)]
    status = of(metrics=uneven, events=[])
    assert (status.speed_steps, status.step_s, status.mean_step_s) == (20, 0.126, pytest.approx(0.2445))
    assert status.samples_per_s == pytest.approx(8 / status.mean_step_s)
    assert "speed    33 samples/s, 244 ms a step (mean of the last 20 steps; median 126 ms)" in format_status(status)


def test_an_elastic_run_is_told_with_its_members_spares_and_story():
    assert format_status(of()).splitlines()[:10] == [
        "run tiny: running, generation 2, step 51 of 200",
        "  speed    40 samples/s, 200 ms a step (mean of the last 2 steps)",
        "  loss     2.0000 (2.0000 at first)",
        "  plan     3 stages x 1 replica, schedule 1f1b",
        "  workers  3 of 4 wanted",
        "  why      worker 3 was lost",
        "",
        "  worker  place               node      pid   host",
        "  0       stage 0, replica 0  b09ad58f  5000  alpha",
        "  1       stage 1, replica 0  70961f5a  5001  alpha",
    ]
    shown = format_status(of())
    assert "  11      spare               b09ad58f  5011  alpha" in shown
    assert "lost worker 3 (pid 5003, node 70961f5a): killed" in shown
    assert "is paused" not in shown, "it is over"
    assert "is paused" in format_status(of(events=EVENTS[:-1]))
    resumed = [{**event, "time": 1005.1} for event in (EVENTS[0], EVENTS[4])]
    assert "is paused" in format_status(of(events=EVENTS + resumed)), "a run that is resumed counts its generations anew"
    assert "checkpoint b" in shown and "checkpoint a" not in shown


def losses(*found, validation=None):
    """The row about losses, of steps with these losses."""
    metrics = [{**line(step, 1000 + step), "loss": loss} for step, loss in enumerate(found, 1)]
    if validation is not None:
        metrics.append({"step": len(found), "validation_loss": validation, "time": 1000.0, "seconds": 1.0})
    rows = format_status(of(metrics=metrics, events=EVENTS[:1], members=None)).splitlines()
    return [row.removeprefix("  loss     ") for row in rows if row.startswith("  loss")]


def test_the_loss_is_told_with_the_first_one_and_the_last_validation():
    assert losses(4.17441) == ["4.1744"]
    assert losses(4.17441, 3.0, 1.83124, validation=1.9021) == ["1.8312 (4.1744 at first); in validation 1.9021 after step 3"]
    assert losses(0.5, 2.31e-6) == ["2.31e-06 (0.5000 at first)"] and losses() == []
    found = of(metrics=[line(1, 1000), {**line(2, 1001), "loss": 1.5}]).facts()
    assert (found["loss"], found["first_loss"], found["validation_loss"], found["non_finite_losses"]) == (1.5, 2.0, None, 0)


def test_a_loss_that_is_not_finite_is_told_and_null_in_json():
    assert losses(4.0, None) == ["not finite (4.0000 at first)"]
    assert losses(float("nan"), float("inf")) == ["not finite, not finite in 2 steps"]
    assert losses(4.0, None, 3.0) == ["3.0000 (4.0000 at first), not finite in 1 step"]
    assert json.loads(json.dumps(of(metrics=[{**line(1, 1000), "loss": float("nan")}]).facts()))["loss"] is None


def test_steps_that_changed_nothing_are_counted_also_where_the_loss_was_finite():
    metrics = [
        line(1, 1000),
        {**line(2, 1001), "norm": None, "skipped": True},
        {**line(3, 1002), "loss": None, "skipped": True},
    ]
    found = of(metrics=metrics, events=EVENTS[:1], members=None)
    assert found.skipped_steps == 2
    assert "not finite (2.0000 at first), 2 steps skipped" in format_status(found)


def test_speed_is_that_of_the_present_generation_without_the_pause_before_it():
    assert of().samples_per_s == pytest.approx(40)
    first = [line(step, 1000 + step / 10) for step in range(1, 50)] + [line(50, 1005.2, 0.6), line(51, 1005.4, 0.2)]
    assert of(metrics=first).samples_per_s == pytest.approx(40)
    assert of(events=EVENTS[:-1]).samples_per_s > 60


@pytest.mark.parametrize("quiet_s, silent", [(5, False), (11, True)])
def test_a_run_that_writes_nothing_for_long_is_told_as_silent(quiet_s, silent):
    found = of(now=1005.4 + quiet_s)
    assert (found.silent_s is not None) == silent
    assert ("no news for 11 s" in format_status(found)) == silent


def test_who_starts_or_waits_for_workers_may_be_quiet_for_longer():
    for phase, quiet_s in (("starting", 60), ("waiting", 45)):
        told = {"members": MEMBERS | {"phase": phase}, "metrics": [], "events": []}
        assert of(**told, now=1005.0 + quiet_s - 1).silent_s is None
        assert of(**told, now=1005.0 + quiet_s + 1).silent_s is not None


def test_steps_that_are_executed_again_are_news_and_are_told():
    again = of(members=MEMBERS | {"time": 1030.0, "replaying": {"step": 20, "until": 49}}, now=1032.0)
    assert again.silent_s is None
    assert "executing steps again: 20 of 49" in format_status(again)
    assert "again" not in format_status(of(members=MEMBERS | {"replaying": None}))


def test_a_run_with_long_steps_is_not_silent_between_two_of_them():
    slow = [line(step, 1000 + 30 * step, 30.0) for step in range(1, 4)]
    assert of(metrics=slow, events=[], members=None, now=1090 + 100).silent_s is None
    assert of(metrics=slow, events=[], members=None, now=1090 + 160).silent_s == pytest.approx(160)


def test_an_ended_run_says_how_it_ended_and_is_not_silent():
    found = of(
        events=[*EVENTS, {"kind": "end", "end": "failed", "why": "the disk burned", "step": 51, "time": 1006.0}], now=9e9
    )
    assert (found.phase, found.why, found.silent_s) == ("ended", "the disk burned", None)
    assert "failed after 51 steps: the disk burned" in format_status(found)


def test_a_resumed_run_is_no_longer_ended():
    ended = [{"kind": "end", "end": "stopped", "why": "", "step": 49, "time": 1004.95}]
    assert of(events=ended, members=None).phase == "running"


def test_a_run_without_members_is_told_from_its_other_files():
    found = of(members=None, events=[])
    assert (found.phase, found.generation, found.step, found.plan) == ("running", None, 51, "2 stages x 2 replicas")
    assert format_status(found).splitlines()[3] == "  plan     2 stages x 2 replicas, schedule 1f1b"


def test_the_raylets_of_a_ray_of_our_own_are_told_by_their_pids():
    nodes = [{"node": NODES[0], "pid": 7, "cpus": 2, "head": True}, {"node": NODES[1], "pid": 8, "cpus": 2, "head": False}]
    shown = format_status(of(cluster={"kind": "own", "address": "127.0.0.1:7", "nodes": nodes}))
    assert "  raylets  7 (b09ad58f, the head), 8 (70961f5a)" in shown
    cluster = {"kind": "own", "address": "127.0.0.1:7", "nodes": nodes}
    assert "8 (70961f5a, gone)" in format_status(of(cluster=cluster, gone=[NODES[1]]))
    drained = {"kind": "draining", "worker": 10, "node": NODES[1][:8], "time": 1005.3}
    assert "8 (70961f5a, drained: it leaves)" in format_status(of(cluster=cluster, events=[*EVENTS, drained]))


def test_a_raylet_that_does_not_run_is_gone_where_the_head_is_seen(monkeypatch):
    cluster = {"nodes": [{"node": name, "pid": pid, "head": pid == 7} for name, pid in zip(NODES, (7, 8), strict=True)]}
    for running, found in (({7: NODES[0]}, [NODES[1]]), ({}, []), ({7: NODES[0], 8: NODES[1]}, []), ({8: NODES[1]}, [])):
        seen = {pid: (node, "127.0.0.1:7") for pid, node in running.items()}
        monkeypatch.setattr("raypar.ray_compat.settings.parse_raylet_command", seen.get)
        assert find_dead_local_nodes(cluster) == found


def test_an_ended_run_shows_its_last_workers_and_what_it_has_survived():
    done = {"kind": "end", "end": "done", "why": "all 51 steps are done", "step": 51, "time": 1006.0}
    shown = format_status(of(events=[*EVENTS, done], members=MEMBERS | {"driver_pid": 9}, now=9e9))
    assert shown.startswith("run tiny: done, generation") and "driver" not in shown, "as `raypar runs` calls it"
    assert "  survived 1 worker lost; 0.4 s of pauses in all, 0 steps executed again" in shown
    assert "\n  the last workers were\n  worker  place" in shown
    assert "the last workers" not in format_status(of()) and "  driver   pid 9" in format_status(
        of(members=MEMBERS | {"driver_pid": 9})
    )
    under_way = format_status(of(events=[*EVENTS, done], members=MEMBERS | {"time": 1007.0}, now=1008.0))
    assert under_way.startswith("run tiny: running"), "it was resumed"
    assert "  before   1 worker lost" in format_status(of(events=[*EVENTS, {**done, "end": "failed"}]))


def test_a_long_story_is_cut_on_the_terminal_only():
    many = [{"kind": "lost", "worker": worker, "time": 1000.0 + worker} for worker in range(31)]
    found = of(events=many)
    assert len(found.facts()["story"]) == 31
    assert "  (19 earlier lines: events.jsonl)" in format_status(found)
    assert "lost worker 18" not in format_status(found) and "lost worker 19" in format_status(found)


def test_a_run_that_was_killed_says_how_to_go_on():
    assert "`raypar resume tiny` goes on from the last checkpoint" in format_status(of(now=1020.0, resumable=True))
    assert "there is no checkpoint to go on from" in format_status(of(now=1020.0))
    assert "raypar resume" not in format_status(of(resumable=True))
    lines = format_status(of(now=1020.0, resumable=True, members=MEMBERS | {"driver_pid": 9})).splitlines()
    assert lines[:2] == [
        "run tiny: no news for 15 s: stuck or killed; it was running, generation 2, step 51 of 200",
        "  next     `raypar resume tiny` goes on from the last checkpoint",
    ]
    assert "  driver   pid 9, when it was last heard of" in lines and "  the last workers were" in lines


@pytest.mark.parametrize("end", ["stopped", "interrupted", "failed", "done"])
def test_a_run_that_ended_early_says_how_to_go_on(end):
    ended = [{"kind": "end", "end": end, "why": "asked to stop after 51 steps", "step": 51, "time": 1006.0}]
    lines = format_status(of(events=ended, resumable=True)).splitlines()
    assert ("  next     `raypar resume tiny` goes on from the last checkpoint" in lines) == (end != "done")
    lines = format_status(of(events=ended)).splitlines()
    assert ("  next     `raypar train` anew: there is no checkpoint to go on from" in lines) == (end != "done")
    lines = format_status(of(events=ended, cluster={"kind": "joined", "nodes": [], "submitted": True})).splitlines()
    assert ("  next     `raypar submit` anew: there is no checkpoint to go on from" in lines) == (end != "done")


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        ({"resumable": True}, "`raypar debug tiny` {names}; then `raypar resume tiny` goes on from the last checkpoint"),
        ({}, "`raypar debug tiny` {names}; then `raypar train` anew: there is no checkpoint to go on from"),
        (
            {"cluster": {"kind": "joined", "nodes": [], "submitted": True}},
            "`raypar debug JOB` {names}; then `raypar submit` anew: there is no checkpoint to go on from",
        ),
    ],
    ids=["checkpoint", "none", "submitted"],
)
def test_a_run_that_a_nan_has_ended_is_to_be_debugged_first_as_a_resumption_comes_to_the_same_step(facts, advice):
    why = "step 52: loss nan, gradient norm nan"
    ended = {"kind": "end", "end": "failed", "why": why, "step": 51, "time": 1006.0, "non_finite": True}
    lines = format_status(of(events=[ended], **facts)).splitlines()
    assert "  next     " + advice.format(names="names the first layer with a NaN or an infinite number") in lines


def test_the_command_reads_a_folder_and_a_line_cut_off_by_a_crash_is_told(tmp_path, capsys):
    folder = RunFolder.create(tmp_path, "tiny")
    folder.job.write_text("steps: 200\n")
    folder.plan.write_text(json.dumps(PLAN))
    folder.members.write_text(json.dumps(MEMBERS))
    for facts in METRICS:
        folder.append_line(folder.metrics, facts)
    with open(folder.events, "w") as file:
        file.write('{"kind": "lo\n' + json.dumps(EVENTS[3]) + "\n")
    assert main(["status", "tiny", "--run-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["steps"], found["generation"]) == (51, 200, 2)
    assert found["story"] == [
        [1004.5, "lost worker 3 (pid 5003, node 70961f5a): killed"],
        [None, "1 line of events.jsonl cannot be read (it is no JSON)"],
    ]
    assert found["silent_s"] is not None
    assert main(["status", str(folder.path)]) == 0
    assert "no news for" in capsys.readouterr().out
    assert main(["status", "tinny", "--run-dir", str(tmp_path)]) == 2
    assert "did you mean tiny?" in capsys.readouterr().err


def test_without_a_name_the_run_that_was_started_last_is_told(tmp_path, capsys):
    for at_s, name in ((20, "tiny"), (10, "other")):
        folder = RunFolder.create(tmp_path, name)
        folder.cluster.write_text("{}")
        os.utime(folder.cluster, (at_s, at_s))
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("run tiny: starting")
    assert main(["status", "--run-dir", str(tmp_path / "none")]) == 2
    assert "no run lies under" in capsys.readouterr().err
