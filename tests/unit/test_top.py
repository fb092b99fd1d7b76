"""`raypar top`: a run on a terminal of any size, from its folder alone, reading only what is new."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.recorded_runs import events_of

from raypar.cli import main
from raypar.console import live_run
from raypar.console.live_run import follow_run_folder, live_workers
from raypar.console.top_screen import make_console, sparkline, top_screen
from raypar.record.totals import RunTotals
from raypar.storage.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PLAN = {"schedule": "1f1b", "stages": [{"replicas": 2}, {"replicas": 2}]}


def step_line(step: int, workers: int = 4, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 4.0 / step, "norm": 1.0, "seconds": 0.1, "samples_per_s": 320.0, "bubble": 0.2,
            "busy_shares": [0.9, 0.8, 0.5, 0.2] * (workers // 4), "peak_rss_bytes": [300 << 20] * workers,
            "time": 1000.0 + step / 10, **more}  # fmt: skip


def members(stages: int = 2, replicas: int = 2) -> dict[str, Any]:
    here = []
    for number in range(stages * replicas):
        seat = f"worker {number} (stage {number // replicas}, replica {number % replicas})"
        here.append({"worker": number, "coordinate": seat, "node": "b09ad58ff", "pid": 5000 + number, "host": "alpha"})
    return {"time": 1005.0, "phase": "running", "generation": 2, "plan": f"{stages} stages x {replicas} replicas", "step": 1,
            "schedule": "1f1b", "members": here, "spares": [{"worker": 99}], "wanted": stages * replicas}  # fmt: skip


EVENTS = [
    {"kind": "started", "text": "4 workers on 1 node", "time": 1000.0},
    {"kind": "lost", "worker": 3, "why": "killed", "time": 1004.0},
    {"kind": "generation", "generation": 2, "workers": [0, 1, 2, 4], "step": 40, "pause_s": 0.4, "time": 1004.4},
]


@pytest.fixture
def run_folder(tmp_path):
    folder = RunFolder.create(tmp_path, "tiny")
    folder.job.write_text("steps: 200\nprice_per_worker_hour: 2.5\n")
    folder.members.write_text(json.dumps(members()))
    folder.plan.write_text(json.dumps(PLAN))
    for step in range(1, 51):
        folder.append_line(folder.metrics, step_line(step))
    for event in EVENTS:
        folder.append_line(folder.events, event)
    return folder


def shown(view, width: int = 80, height: int = 24, clean=str) -> list[str]:
    """The screen as plain lines."""
    console = make_console(width)
    with console.capture() as captured:
        console.print(top_screen(view, width, height, clean))
    return [re.sub(r"\x1b\[[0-9;]*m", "", text).rstrip() for text in captured.get().splitlines()]


def test_a_screen_says_of_which_kind_the_time_of_a_step_is(run_folder):
    for step in range(51, 61):
        run_folder.append_line(run_folder.metrics, step_line(step, seconds=0.5, samples_per_s=64.0))
    text = "\n".join(shown(follow_run_folder(run_folder)()))
    assert "91 samples/s  350 ms a step (median 500 ms)" in text, "of the same steps, those of the generation"


def test_a_screen_says_how_far_the_run_is_how_fast_who_computes_and_what_happened(run_folder):
    lines = shown(follow_run_folder(run_folder)())
    text = "\n".join(lines)
    assert "raypar top  tiny" in lines[0] and "generation 2" in lines[0]
    assert "step 50 of 200  25.0 %" in lines[1]
    assert re.search(r"loss  0\.0800  █.*▁", text)
    assert "320 samples/s" in text and "100 ms a step" in text and "bubble 20.0 %" in text and "goodput 100.0 %" in text
    assert "2 stages x 2 replicas, schedule 1f1b" in text and "workers 4 + 1 in reserve" in text
    head = next(line for line in lines if line.split()[:2] == ["stage", "replica"])
    assert head.split() == ["stage", "replica", "worker", "node", "pid", "computing", "peak", "memory"]
    rows = lines[lines.index(head) + 1 :][:4]
    assert [row.split()[:5] for row in rows][3] == ["1", "1", "3", "b09ad58f", "5003"]
    assert [re.search(r"(\d+) %", row)[1] for row in rows] == ["90", "80", "50", "20"] and all("300 MiB" in row for row in rows)
    assert "lost worker 3" in text and "generation 2: 4 workers" in text


@pytest.mark.ci
@pytest.mark.parametrize("width, height", [(80, 24), (40, 12), (20, 5), (200, 60), (100, 8)])
@pytest.mark.parametrize("stages, replicas", [(2, 2), (1, 1), (16, 4), (64, 64)])
def test_the_screen_fits_a_terminal_of_any_size(run_folder, width, height, stages, replicas):
    run_folder.members.write_text(json.dumps(members(stages, replicas)))
    run_folder.append_line(run_folder.metrics, step_line(51, max(4, stages * replicas)))
    for number in range(30):
        run_folder.append_line(run_folder.events, {"kind": "note", "text": f"note {number} " + "x" * 300, "time": 1006.0})
    lines = shown(follow_run_folder(run_folder)(), width, height)
    assert len(lines) <= max(height, 6) and max(map(len, lines)) <= width


def test_more_workers_than_lines_are_a_row_for_each_stage(run_folder):
    run_folder.members.write_text(json.dumps(members(4, 16)))
    run_folder.append_line(run_folder.metrics, step_line(51, 64))
    lines = shown(follow_run_folder(run_folder)())
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["stage", "workers"])
    assert [line.split()[:2] for line in lines[at + 1 : at + 5]] == [[str(stage), "16"] for stage in range(4)]
    assert "60 %" in lines[at + 1] and "20 %" in lines[at + 1], "the mean and the least"
    assert any("note" in line or "lost" in line for line in lines[at + 5 :]), "there is room for what happened"
    run_folder.members.write_text(json.dumps(members(64, 16)))
    assert any(line.strip().startswith("+ ") for line in shown(follow_run_folder(run_folder)()))


def test_an_ended_a_failed_and_a_silent_run_say_so(run_folder):
    assert "no news for" in shown(follow_run_folder(run_folder)())[0]
    run_folder.append_line(run_folder.events, {"kind": "end", "end": "failed", "why": "user code raised", "time": 9000.0})
    lines = shown(follow_run_folder(run_folder)())
    assert "ended: failed" in lines[0] and any("why   user code raised" in line for line in lines)


def test_names_and_messages_move_no_cursor_and_show_no_secret(run_folder):
    secret = "hunter2hunter2"
    told = members() | {"plan": "2 stages\x1b[2J", "why": f"\x1b]0;x\x07 {secret}"}
    told["members"][0] |= {"coordinate": "\x1b[31mworker 0 (stage 0, replica 0)", "node": "\x1b[2J"}
    run_folder.members.write_text(json.dumps(told))
    run_folder.append_line(
        run_folder.events, {"kind": "note", "text": f"\x1b[2J{secret}\r\n[bold]not markup[/bold]", "time": 1.0}
    )
    console = make_console(200)
    with console.capture() as captured:
        console.print(top_screen(follow_run_folder(run_folder)(), 200, 40, lambda text: text.replace(secret, "[removed]")))
    assert "\x1b[2J" not in captured.get() and "\x07" not in captured.get() and secret not in captured.get()
    assert "[bold]not markup[/bold]" in captured.get()


def test_damaged_and_missing_files_leave_a_screen(run_folder):
    for name, content in (("members.json", b"{"), ("totals.json", b"[1]"), ("job.yaml", b"steps: [\n"), ("plan.json", b"\x00")):
        (run_folder.path / name).write_bytes(content)
        assert shown(follow_run_folder(run_folder)())
    run_folder.append_line(run_folder.metrics, step_line(51, busy_shares="x", bubble=None, peak_rss_bytes=[None]))
    assert shown(follow_run_folder(run_folder)())
    for file in (run_folder.metrics, run_folder.events, run_folder.members, run_folder.plan):
        file.unlink()
    assert "step 0" in "\n".join(shown(follow_run_folder(run_folder)()))


def test_numbers_of_a_job_that_no_float_can_hold_leave_a_screen(run_folder):
    for numbers in (
        f"steps: 200\nprice_per_worker_hour: 1{'0' * 400}",
        f"steps: 1{'0' * 400}",
        "steps: 200\nprice_per_worker_hour: .nan",
    ):
        run_folder.job.write_text(numbers + "\n")
        run_folder.totals.write_text(json.dumps(RunTotals(steps=50, worker_s=360.0).as_document()))
        text = "\n".join(shown(follow_run_folder(run_folder)()))
        assert "step 50" in text and "cost" not in text


def test_a_run_that_is_resumed_from_an_earlier_step_is_shown_from_there(run_folder, monkeypatch):
    """Its lines after that step are removed from the file. What was shown before is no reason to take the run for silent."""
    look = follow_run_folder(run_folder)
    assert "step 50 of 200" in "\n".join(shown(look()))
    now_s = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now_s)
    run_folder.metrics.write_text("".join(json.dumps(step_line(step)) + "\n" for step in range(1, 31)))
    for step in range(31, 41):
        run_folder.append_line(run_folder.metrics, step_line(step, time=now_s - 40 + step))
    for _ in range(2):
        text = "\n".join(shown(look()))
        assert "step 40 of 200" in text and "no news" not in text


def test_a_look_reads_only_what_is_new_and_the_first_one_only_the_end_of_a_long_file(run_folder, monkeypatch):
    monkeypatch.setattr(live_run, "FIRST_BYTES", 4000)
    read: list[int] = []

    from raypar.storage import follow_run_files

    whole = follow_run_files.read_events

    def counted(name: str, stream: Any) -> Any:
        read.append(len(stream.getvalue()))
        return whole(name, stream)

    monkeypatch.setattr(follow_run_files, "read_events", counted)
    look = follow_run_folder(run_folder)
    first = look()
    assert sum(read) < 6000 < run_folder.metrics.stat().st_size and first.first_step > 30
    read.clear()
    look()
    assert read == []
    run_folder.append_line(run_folder.metrics, step_line(51))
    assert look().status.step == 51 and 0 < sum(read) < 500


def test_a_sparkline_shows_the_course_and_takes_any_values():
    assert sparkline([1, 2, 3, 4], 4) == "▁▃▆█" and sparkline([3.0], 9) == "▄" and sparkline([], 9) == sparkline([1.0], 0) == ""
    assert sparkline([1.0, 1e-6], 2) == "█▁" and sparkline([1e308, -1e308], 2) == ""
    assert len(sparkline([float(v) for v in range(1000)], 37)) == 37


def test_who_computes_is_known_only_from_steps_with_as_many_workers():
    here = members()["members"]
    assert [one.busy for one in live_workers(here, events_of([step_line(1), step_line(2)]))] == [0.9, 0.8, 0.5, 0.2]
    assert [one.busy for one in live_workers(here[:3], events_of([step_line(1)]))] == [None] * 3
    odd = live_workers([{"worker": 7, "coordinate": "a spare"}], [])
    assert (odd[0].stage, odd[0].replica, odd[0].node) == ("a spare", "", "?")


def test_a_worker_is_shown_with_all_of_its_roles():
    (found,) = live_workers([{"worker": 1, "coordinate": "worker 1 (stage 0, replica 1; stage 1,2, replica 0, shard 1)"}], [])
    assert (found.stage, found.replica, found.shard) == ("0+1,2", "1+0", "1")


# -- the command ---------------------------------------------------------------------------------------------------------


def test_without_a_terminal_it_prints_one_screen_if_asked_and_else_says_what_to_do(run_folder, capsys):
    assert main(["top", str(run_folder.path), "--once"]) == 0
    assert "raypar top  tiny" in capsys.readouterr().out
    assert main(["top", str(run_folder.path)]) == 2
    assert "cure: add --once" in capsys.readouterr().err


def test_without_rich_it_says_how_to_install_it(run_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["top", str(run_folder.path), "--once"]) == 2
    assert "cure: pip install rich" in capsys.readouterr().err


@pytest.mark.parametrize("end", [b"q", b"\x03"])
def test_on_a_terminal_it_draws_until_q_or_ctrl_c_and_leaves_the_terminal_as_it_was(run_folder, end):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "raypar", "top", str(run_folder.path)]
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True, preexec_fn=_own
    )
    os.close(theirs)
    text, deadline, told = b"", time.monotonic() + 60, False
    try:
        while time.monotonic() < deadline and process.poll() is None:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    text += os.read(ours, 65536)
                except OSError:  # the terminal's last user is gone
                    break
            if not told and b"samples/s" in text:
                told = os.write(ours, end) > 0
        assert process.wait(30) == 0, text
    finally:
        process.kill()
        os.close(ours)
    assert told and b"\x1b[?1049h" in text and text.rindex(b"\x1b[?1049l") > text.rindex(b"\x1b[?1049h"), (
        "the screen is put back"
    )


def _own() -> None:
    """Make the terminal on stdin this process's own, so that Ctrl-C on it reaches the process, also where pytest ignores it."""
    import fcntl
    import signal
    import termios

    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
