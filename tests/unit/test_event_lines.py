"""Events of a run in words that a person understands, and the lines of the terminal made of them."""

import io
import json

import pytest

from raypar.console.event_printer import BriefEventPrinter, EventPrinter
from raypar.elastic.user_messages import plain_failure_text
from raypar.launch import Result
from raypar.record.parse_events import parse_event
from raypar.trainer import Trainer

NODE = "b09ad58ff304f43bab2062275bfedc43fc221be2deddc4e46c63e95e"
STEP = {"kind": "step", "loss": 2.5, "count": 8.0, "seconds": 0.1, "samples_per_s": 80.0, "bubble": 0.1, "eta_s": 12.0}


@pytest.mark.parametrize(
    "event, words",
    [
        (
            {
                "kind": "lost",
                "worker": 5,
                "coordinate": "worker 3 (stage 1, replica 1)",
                "node": NODE,
                "pid": 77,
                "why": "killed",
            },
            "lost worker 5 (stage 1, replica 1; pid 77, node b09ad58f): killed",
        ),
        ({"kind": "lost", "worker": 5}, "lost worker 5: it died"),
        (
            {"kind": "lost", "worker": 3, "why": "worker 3 (stage 1) was lost: The actor died unexpectedly before finishing."},
            "lost worker 3: its process died",
        ),
        (
            {"kind": "recovering", "generation": 2, "text": "worker 0 (stage 0): the connection was closed"},
            "training is paused: worker 0 (stage 0): the connection was closed",
        ),
        (
            {"kind": "recovering", "generation": 2, "workers": [0], "plan": "1 stage x 1 replica", "moved_elements": 3100},
            "trying generation 2: 1 worker = 1 stage x 1 replica; 3,100 parameters and their optimizer state move",
        ),
        (
            {"kind": "recovering", "generation": 2, "workers": [0], "state": "cut", "step": 4, "moved_elements": 5},
            "trying generation 2: 1 worker; the last copy of something was lost: all go back to the mirror's cut after 4 steps",
        ),
        (
            {"kind": "recovering", "generation": 2, "workers": [0], "state": "beginning", "step": 0},
            "trying generation 2: 1 worker; no memory has all of the state any more: all begin again from the initial weights",
        ),
        (
            {"kind": "learning_rate", "text": "learning rate 0.1 -> 0.05 from step 7 on", "step": 7, "lr": 0.05, "before": 0.1},
            "learning rate 0.1 -> 0.05 from step 7 on",
        ),
        ({"kind": "shares", "text": "worker 2 gets 2 of 12 blocks", "step": 40}, "worker 2 gets 2 of 12 blocks"),
        ({"kind": "joined", "worker": 6, "node": NODE, "pid": 78}, "joined: worker 6 (pid 78, node b09ad58f)"),
        (
            {"kind": "draining", "worker": 2, "node": NODE, "pid": 7, "why": "node b09ad58f is being drained"},
            "worker 2 (pid 7, node b09ad58f) is going to leave: node b09ad58f is being drained; its work moves off",
        ),
        (
            {"kind": "draining", "worker": 5, "why": "node b09ad58f is being drained", "works": False},
            "worker 5 is going to leave: node b09ad58f is being drained; it has no work",
        ),
        (
            {
                "kind": "generation",
                "generation": 3,
                "workers": [0, 1, 4],
                "plan": "3 stages x 1 replica",
                "schedule": "1f1b",
                "step": 50,
                "pause_s": 0.418,
                "again": 2,
            },
            "generation 3: 3 workers = 3 stages x 1 replica, schedule 1f1b; training goes on after step 50, "
            "after a pause of 0.42 s; 2 steps executed again",
        ),
        ({"kind": "generation", "generation": 2, "workers": [0]}, "generation 2: 1 worker"),
        (
            {
                "kind": "generation",
                "generation": 2,
                "workers": [0],
                "schedule": "zb-h1",
                "schedule_was": "1f1b",
                "schedule_why": "predicted to be the fastest with 1 worker",
            },
            "generation 2: 1 worker, schedule zb-h1 (1f1b before; predicted to be the fastest with 1 worker)",
        ),
        (
            {
                "kind": "generation",
                "generation": 2,
                "workers": [0],
                "plan": "1 stage x 1 replica",
                "schedule": "1f1b",
                "shards": "1",
                "shards_was": "2",
                "step": 7,
            },
            "generation 2: 1 worker = 1 stage x 1 replica, schedule 1f1b, layers cut over 1 shard instead of 2, which changes "
            "the bits from here on; training goes on after step 7",
        ),
        (
            {"kind": "job_changed", "text": "from step 101 on: clip_norm 1.0 -> 0.5", "step": 101},
            "from step 101 on: clip_norm 1.0 -> 0.5",
        ),
        ({"kind": "waiting", "text": "waiting for 1 of 4 workers"}, "waiting for 1 of 4 workers"),
        ({"kind": "driver", "text": "lost; a new one has adopted 4 workers"}, "lost; a new one has adopted 4 workers"),
        ({"kind": "end", "end": "done", "why": "all steps are done", "step": 200}, "done after 200 steps: all steps are done"),
        ({"kind": "picture", "path": "x.svg"}, None),
    ],
)
def test_an_event_is_told_in_one_line(event, words):
    assert parse_event(event).line() == words


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "worker 2 (stage 1, replica 0), in step 9: recv tag 3571213767016448 of rank 2 with 0 (generation 1): lost rank 0: "
            "it closed the connection",
            "a connection between two workers broke in step 9 (rank 2 with 0)",
        ),
        (
            "all_gather of rank 2 with 1, 3 (generation 1): lost rank 3: Connection reset by peer",
            "a connection between two workers broke (rank 2 with 3)",
        ),
        (
            "batch tags [4, 5] of rank 0 with 1 (generation 2) was not done",
            "batch of rank 0 with 1 (generation 2) was not done",
        ),
        (
            "worker 3 (stage 1, replica 1) was lost: The actor 34d2f00 is unavailable: The actor is temporarily unavailable: "
            "RpcError: RPC Error message: Connection reset by peer; rpc_code: 14. The task may or may not have been executed",
            "worker 3 (stage 1, replica 1) was lost: it cannot be reached",
        ),
        (
            "worker 3 was lost: The actor never ran - it was cancelled. Details: 7",
            "worker 3 was lost: The actor never ran - it was cancelled",
        ),
        (
            "worker 3 was lost: The actor died unexpectedly before\\nThe actor died because its node has died.",
            "worker 3 was lost: its node died",
        ),
    ],
)
def test_reasons_are_told_without_tags_and_without_details_of_ray(text, words):
    assert plain_failure_text(text) == words


def printed(*events: dict, as_json: bool = False) -> list[str]:
    out = io.StringIO()
    console = EventPrinter(steps=200, as_json=as_json, out=out)
    for event in events:
        console(parse_event(event))
    return out.getvalue().splitlines()


def test_the_progress_line_shows_generation_and_workers_once_they_differ_from_the_start():
    lines = printed(
        {"kind": "generation", "generation": 1, "workers": [0, 1, 2, 3]},
        {**STEP, "step": 49},
        {"kind": "lost", "worker": 3, "pid": 77, "why": "killed"},
        {"kind": "recovering", "text": "the step is aborted; 3 of 4 workers answer", "generation": 2},
        {"kind": "generation", "generation": 2, "workers": [0, 1, 4], "step": 49, "pause_s": 0.0999},
        {**STEP, "step": 50},
    )
    assert lines[1].startswith("step 49/200  loss 2.5000  80 samples/s") and "gen" not in lines[1]
    assert lines[2:5] == [
        "lost worker 3 (pid 77): killed",
        "training is paused: the step is aborted; 3 of 4 workers answer",
        "generation 2: 3 workers; training goes on after step 49, after a pause of 0.10 s",
    ]
    assert lines[5].endswith("ETA 12 s  gen 2, 3 workers")
    assert "  80 samples/s" in lines[5], "a step's seconds are its own, the pause before it is no part of them"


def test_the_progress_line_names_the_shards_of_a_later_generation():
    event = {"kind": "generation", "generation": 2, "workers": [0, 1], "plan": "1 stage x 1 replica x 2 shards"}
    assert printed(event, {**STEP, "step": 9})[1].endswith("gen 2, 2 workers, 2 shards")
    assert printed({**event, "plan": "2 stages x 1 replica"}, {**STEP, "step": 9})[1].endswith("gen 2, 2 workers")


def test_a_generation_that_comes_to_nothing_is_told_as_given_up():
    tried = {"kind": "recovering", "generation": 2, "workers": [0, 1], "text": "..."}
    again = {"kind": "recovering", "generation": 3, "text": "worker 1 did not answer"}
    lines = printed(
        tried, again, {**tried, "generation": 3, "workers": [0]}, {"kind": "generation", "generation": 3, "workers": [0]}
    )
    assert lines == [
        "trying generation 2: 2 workers",
        "generation 2 is given up: worker 1 did not answer",
        "trying generation 3: 1 worker",
        "generation 3: 1 worker",
    ]


def test_numbers_of_generations_that_were_never_tried_are_accounted_for():
    claims = [{"kind": "recovering", "generation": number, "text": "it died"} for number in (2, 3, 4)]
    lines = printed(
        *claims,
        {"kind": "generation", "generation": 4, "workers": [0]},
        {"kind": "generation", "generation": 5, "workers": [0, 1]},
    )
    assert lines[-2:] == ["generation 4 (2, 3 failed to start): 1 worker", "generation 5: 2 workers"]


def test_the_last_step_of_a_run_that_is_stopped_is_shown_also_if_lines_have_just_been_printed():
    """The log of a stopped job ended with the loss of a step long before, and `raypar runs` showed that."""
    steps = [{**STEP, "step": step, "loss": 1.0 / step} for step in (1, 2, 3)]
    end = {"kind": "end", "end": "interrupted", "text": "SIGTERM", "done": 3}
    assert [line.split("  ")[:2] for line in printed(*steps, end)] == [
        ["step 1/200", "loss 1.0000"],
        ["step 3/200", "loss 0.3333"],
    ]
    generation = {"kind": "generation", "generation": 2, "workers": [0]}
    assert printed(*steps, generation, end)[1:] == ["generation 2: 1 worker"], "no speed is known of that one yet"


def test_steps_that_are_executed_again_are_shown_while_they_are():
    again = [{"kind": "replay", "step": step, "until": 25} for step in range(20, 26)]
    lines = printed({**STEP, "step": 25}, *again, {**STEP, "step": 26})
    assert lines[1:] == ["executing steps again: 20 of 25", "executing steps again: 25 of 25"], "not a line for every one"


def test_the_speed_at_the_end_says_of_how_many_steps_it_is_if_not_of_all():
    def last_line(done: int) -> str:
        out = io.StringIO()
        console = EventPrinter(steps=200, out=out)
        for step in (199, 200):
            console(parse_event({**STEP, "step": step}))
        console.finish(Result(metrics={}, path="runs/tiny", end="done", done=done, why="all steps are done"))
        return next(line for line in out.getvalue().splitlines() if line.startswith("all steps are done"))

    assert last_line(2).endswith("all steps are done: 2 steps, 80 samples/s")
    assert last_line(1).endswith("all steps are done: 1 step, 80 samples/s")
    assert last_line(200).endswith("200 steps, 80 samples/s in the last 2 steps")


def test_the_end_of_a_disturbed_run_says_what_it_has_survived():
    out = io.StringIO()
    console = EventPrinter(steps=200, out=out)
    console(parse_event({"kind": "lost", "worker": 3}))
    console(parse_event({"kind": "generation", "generation": 2, "workers": [0], "pause_s": 0.4, "again": 2}))
    console.finish(Result(metrics={}, path="runs/tiny", end="done", done=200, why="all 200 steps are done"))
    assert "survived: 1 worker lost; 0.4 s of pauses in all, 2 steps executed again" in out.getvalue().splitlines()


def test_the_end_of_a_run_says_how_many_of_its_steps_were_skipped():
    """A run all of whose steps were skipped ended as any other."""
    out = io.StringIO()
    console = EventPrinter(steps=3, out=out)
    for step, skipped in ((1, {}), (2, {"skipped": True}), (3, {"skipped": True})):
        console(parse_event({**STEP, "step": step, **skipped}))
    console.finish(Result(metrics={}, path="runs/tiny", end="done", done=3, why="all 3 steps are done"))
    assert "skipped 2 of 3 steps: loss or gradient norm not finite" in out.getvalue().splitlines()


@pytest.mark.parametrize("end, next_line", [
    ("done", "next: raypar export tiny --out model.safetensors"),
    ("stopped", "next: Trainer(..., resume_from_checkpoint=result.checkpoint).fit() goes on from there"),
])  # fmt: skip
def test_a_program_is_told_where_the_checkpoint_is_what_comes_next_and_the_hash(end, next_line, monkeypatch, capsys):
    """`Trainer.fit` printed neither, and gave no hint of `raypar export`."""
    came_out = Result(
        {}, "runs/tiny", end, 8, "why", checkpoint_path="runs/tiny/checkpoints/step_00000008", weights_sha256="ab12"
    )
    monkeypatch.setattr("raypar.trainer.train_job_in_new_folder", lambda *given, **more: came_out)
    trainer = Trainer(model="m:layers", loss="m:loss", data="m:text", steps=8, batch_size=8, microbatches=4)
    assert trainer.fit() is came_out
    lines = capsys.readouterr().out.splitlines()
    assert "checkpoint: runs/tiny/checkpoints/step_00000008 (result.checkpoint)" in lines and next_line in lines
    assert lines[0].startswith("[1/6] job run: 8 steps ... ") and lines[-1] == "weights sha256 ab12"
    assert trainer.fit(verbose=False) is came_out and capsys.readouterr().out == ""


def test_a_run_among_many_has_a_few_lines_with_its_name(capsys):
    console = BriefEventPrinter("lr_0.1", ["hunter2hunter2"])
    console(parse_event({"kind": "stage", "stage": "read", "text": "job lr_0.1: 8 steps"}))
    console(
        parse_event(
            {"kind": "stage", "stage": "planned", "text": "2 workers = 2 stages, schedule 1f1b; predicted step 9 ms\nmore"}
        )
    )
    console(parse_event({"kind": "waiting_for", "text": "no news for 2 s; now loading PyTorch"}))
    console(parse_event({"kind": "waiting", "text": "waiting for 2 CPUs: 0 of 2 are free, run lr_0.2 has 2"}))
    console(parse_event({"kind": "stage", "stage": "built", "text": "stages built"}))
    console(parse_event({**STEP, "step": 1}))
    console(parse_event({"kind": "warning", "text": "the disk hunter2hunter2 is full\n  cure: free it"}))
    console(parse_event({"kind": "checkpoint", "step": 8, "path": "x"}))
    console.finish(Result({"loss": 0.5}, "runs/lr_0.1", "done", 8, "all 8 steps are done"))
    *lines, end = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "lr_0.1: waiting for 2 CPUs: 0 of 2 are free, run lr_0.2 has 2",
        "lr_0.1: training begins: 2 workers = 2 stages, schedule 1f1b",
    ]
    assert len(lines) == 4 and "hunter2" not in lines[2] and lines[3] == "lr_0.1:   cure: free it"
    assert end == "lr_0.1: all 8 steps are done, loss 0.5000; in runs/lr_0.1"


def test_json_lines_carry_the_events_as_they_are():
    event = {"kind": "lost", "worker": 3, "pid": 77}
    (line,) = printed(event, as_json=True)
    assert event.items() <= json.loads(line).items()


def test_the_end_after_no_known_number_of_steps_is_told():
    assert parse_event({"kind": "end", "end": "failed", "step": None}).line() == "failed after 0 steps"
