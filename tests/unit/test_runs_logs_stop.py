"""`raypar runs`, `logs` and `stop` of runs in a folder, `submit` before it reaches a cluster, and stdout with `--json`."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.recorded_runs import events_of, view_of

from raypar.cli import main
from raypar.console import run_log
from raypar.console.run_log import RunLogFormatter
from raypar.console.run_table import RunRow, build_run_row, format_run_table
from raypar.errors import ClusterError, ConfigError
from raypar.files.find_writing_process import describe_process, oldest_process
from raypar.launch.stop_run import stop_local_run
from raypar.launch.submit_to_job_server import make_entrypoint, make_runtime_env, submission_error
from raypar.record.events import StartupStage
from raypar.storage.follow_run_files import NewLineReader
from raypar.storage.run_folder import RunFolder

JOB = """
name: small
steps: 8
batch_size: 8
microbatches: 4
model: m:layers
loss: m:loss
data: m:text
optimizer: torch.optim:SGD
"""
HOLDER = """
import fcntl, signal, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
signal.signal(signal.SIGTERM, lambda *given: sys.exit(0) if sys.argv[2] == "ends" else None)
print("held", flush=True)
time.sleep(60)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)


def step(number, at_s, loss=2.5):
    return {"step": number, "loss": loss, "seconds": 0.1, "samples_per_s": 80.0, "time": at_s}


def make_run(root: Path, name: str, metrics=(), events=(), started_s=1000.0) -> RunFolder:
    folder = RunFolder.create(root, name)
    folder.job.write_text(JOB)
    for path, lines in ((folder.metrics, metrics), (folder.events, events)):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder.cluster.write_text('{"kind": "own", "address": "127.0.0.1:1", "nodes": []}')
    os.utime(folder.cluster, (started_s, started_s))
    return folder


def row(**facts):
    given = {"steps": 8, "metrics": [step(3, 1000.0)], "events": [], "members": {"phase": "running", "time": 1000.0}}
    given |= {"locked": True, "started_s": 990.0, "now": 1001.0} | facts
    return build_run_row("small", "runs/small", view_of(given.pop("metrics"), given.pop("events")), **given)


def test_the_state_of_a_run():
    end = {"kind": "end", "end": "interrupted", "why": "Ctrl-C", "time": 1000.5}
    assert (row().state, row().step, row().steps, row().loss) == ("running", 3, 8, 2.5)
    assert row(events=[end], locked=False).state == "interrupted"
    assert row(locked=False).state == "running", "it may be on another machine"
    assert row(locked=False, now=1100.0).state == "lost" and row(now=1100.0).state == "running"
    assert row(metrics=[], members=None).state == "starting"
    waiting = row(members={"phase": "waiting", "time": 1000.0, "why": "waiting for 2 workers"})
    assert (waiting.state, waiting.why) == ("waiting", "waiting for 2 workers")


def test_a_run_of_functions_without_names_has_a_total_too(tmp_path, capfd):
    """`raypar runs` had `16` beside `16/16` of others: what cannot be written as a job file has none."""
    run = make_run(tmp_path, "from_python", [step(3, 1000.0)])
    run.job.unlink()
    (run.path / "checkpoints").mkdir(exist_ok=True)
    run.members.write_text(json.dumps({"phase": "running", "time": 1000.0, "step": 3, "steps": 16}))
    assert main(["runs", "--json", "--run-dir", str(tmp_path)]) == 0
    assert [(one["step"], one["steps"]) for one in json.loads(capfd.readouterr().out)] == [(3, 16)]
    assert main(["status", str(run.path)]) == 0 and "step 3 of 16" in capfd.readouterr().out
    run.members.write_text(json.dumps({"phase": "running", "steps": "many"}))
    assert main(["runs", "--json", "--run-dir", str(tmp_path)]) == 0
    assert json.loads(capfd.readouterr().out)[0]["steps"] is None


def test_the_table_of_runs_and_of_jobs():
    rows = [
        RunRow("quickstart", "done", 200, 200, 2.4131, 1000.0, 1100.0),
        RunRow("next", "waiting", None, None, None, 1000.0, 1159.0, why="waiting for 3 more workers", path="runs/next"),
    ]
    table = format_run_table(rows, 1160.0).splitlines()
    assert table[0].split() == ["name", "state", "step", "loss", "when"]
    assert table[1].startswith("quickstart  done     200/200  2.4131  ") and table[1].endswith("(1 min 00 s ago)")
    assert table[2].startswith("next        waiting  -        -       ") and table[3] == "  waiting for 3 more workers"
    jobs = format_run_table([RunRow(None, "pending", submission_id="raysubmit_1")], 0.0).splitlines()
    assert jobs[0].split()[0] == "job" and jobs[1].split() == ["raysubmit_1", "-", "pending", "-", "-", "-"]


def test_runs_lists_a_folder_in_the_order_of_starts_also_as_json(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0 and capfd.readouterr().out == "no runs in runs/\n"
    make_run(Path("runs"), "later", [step(8, 2000.0)], [{"kind": "end", "end": "done", "time": 2001.0}], started_s=2000.0)
    make_run(Path("runs"), "earlier", [step(3, 1000.0)])
    damaged = make_run(Path("runs"), "oldest", started_s=1.0)
    damaged.metrics.unlink()
    damaged.metrics.symlink_to("/etc/passwd")
    assert main(["runs", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert [(one["name"], one["state"], one["step"], one["steps"]) for one in found] == [
        ("oldest", "unreadable", None, None),
        ("earlier", "lost", 3, 8),
        ("later", "done", 8, 8),
    ]
    assert main(["runs", "--last", "1", "--run-dir", str(tmp_path / "runs")]) == 0
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["name", "later"]
    make_run(Path("runs"), "odd", [step(8, 3000.0, float("nan"))], started_s=3000.0)
    assert main(["runs", "--json", "--last", "1"]) == 0
    assert '"loss": null' in capfd.readouterr().out, "JSON has no NaN"
    assert main(["runs", "--run-dir", "runs", "--address", "http://a:1"]) == 2
    assert "give one of them" in capfd.readouterr().err


def test_a_long_file_is_read_from_its_end_and_then_what_is_new(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step(n, 1000.0 + n)) + "\n" for n in range(1, 101)))
    assert len(NewLineReader(path).read()) == 100
    lines = NewLineReader(path, last_bytes=200)
    assert [event.step for event in lines.read()] == [99, 100]
    with open(path, "a") as file:
        file.write(json.dumps(step(101, 1.0))[:20])
        file.flush()
        assert lines.read() == []
        file.write(json.dumps(step(101, 1.0))[20:] + "\n")
    assert [event.step for event in lines.read()] == [101] and lines.read() == []
    path.write_text(json.dumps(step(1, 1.0)) + "\n")
    assert [event.step for event in lines.read()] == [1], "it was shortened"
    assert NewLineReader(tmp_path / "none").read() == []


def test_the_log_of_a_run_has_its_events_and_a_step_every_ten_seconds():
    log = RunLogFormatter(steps=8)
    metrics = [step(n, 1000.0 + 4 * n) for n in range(1, 8)]
    lines = log.lines(events_of([*metrics[:2], {"kind": "warning", "text": "slow", "time": 1009.0}, *metrics[2:]]))
    assert [line.split("  ", 1)[1].split("  ")[0] for line in lines] == ["step 1/8", "warning: slow", "step 4/8", "step 7/8"]
    assert [line.split("  ")[1] for line in log.lines(events_of([step(8, 1029.0)]))] == ["step 8/8"], "the last one"


def test_logs_prints_a_run_and_follows_it_to_its_end(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_run(Path("runs"), "small", [step(3, 1000.0)])
    assert main(["logs", "small"]) == 0
    assert capfd.readouterr().out.endswith("step 3/8  loss 2.5000  80 samples/s\n")

    def goes_on(seconds):
        folder.append_line(folder.metrics, step(4, 1020.0))
        folder.append_line(folder.events, {"kind": "end", "end": "interrupted", "why": "Ctrl-C", "time": 1021.0})

    monkeypatch.setattr("time.sleep", goes_on)
    assert main(["logs", "small", "-f", "--json"]) == 130
    kinds = [json.loads(line)["kind"] for line in capfd.readouterr().out.splitlines()]
    assert kinds == ["step", "step", "end"]
    assert main(["logs", "small", "--follow"]) == 130, "it has ended already"


def test_a_followed_run_that_nobody_trains_is_an_error_at_the_deadline(tmp_path, monkeypatch, capfd):
    make_run(tmp_path, "small", [step(3, 1000.0)])
    monkeypatch.setattr(run_log, "GONE_S", 0.05)
    monkeypatch.setattr(run_log, "POLL_S", 0.02)
    assert main(["logs", "small", "-f", "--run-dir", str(tmp_path)]) == 1
    assert "no process of this machine trains it" in capfd.readouterr().err


@pytest.mark.parametrize("command", ["logs", "stop"])
def test_an_unknown_run_is_an_error_with_the_nearest_name(command, tmp_path, capfd):
    make_run(tmp_path, "quickstart")
    assert main([command, "quickstrat", "--run-dir", str(tmp_path)]) == 2
    assert "did you mean quickstart?" in capfd.readouterr().err


def hold(folder: RunFolder, how: str) -> subprocess.Popen:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.job), how], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_stop_asks_the_process_that_trains_to_end_and_waits_for_it(tmp_path, capfd):
    folder = make_run(tmp_path, "small", [step(3, 1000.0)], [{"kind": "end", "end": "interrupted", "time": 1001.0}])
    (folder.checkpoints / "step_00000003").mkdir()
    with hold(folder, "ends") as holder, open(folder.job):  # a reader, such as `raypar status`, is not the one
        assert main(["stop", "small", "--run-dir", str(tmp_path)]) == 0
        assert holder.wait(10) == 0
    out = capfd.readouterr().out
    assert "run small has ended after 3 of 8 steps" in out and "goes on from step_00000003" in out
    assert main(["stop", "small", "--run-dir", str(tmp_path), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["stopped"], facts["state"], facts["checkpoint"]) == (False, "interrupted", "step_00000003")


def test_a_run_that_does_not_end_is_an_error_at_the_deadline(tmp_path):
    folder = make_run(tmp_path, "small")
    with hold(folder, "stays") as holder:
        with pytest.raises(ClusterError, match=rf"process {holder.pid}\) was asked to save and end, and has not"):
            stop_local_run(folder, 0.1, print)
        holder.send_signal(signal.SIGKILL)


def test_a_second_process_that_would_train_in_a_run_folder_hears_who_does_since_when_and_what_to_do(tmp_path, capfd):
    """`another process trains in runs/small`"""
    folder = make_run(tmp_path, "small")
    with hold(folder, "ends") as holder:
        assert main(["resume", "small", "--run-dir", str(tmp_path)]) == 2
        holder.terminate()
    what, cure = capfd.readouterr().err.splitlines()
    who = rf"process {holder.pid}, which was started \d+ s ago \(at [\d:]+\)"
    assert re.fullmatch(rf"error: run small is under way: {who} trains in {folder.path}", what)
    assert "wait for its end" in cure and f"raypar stop {folder.path}" in cure and f"raypar status {folder.path}" in cure


def test_the_age_of_a_process_is_said_in_a_unit_of_which_there_are_two(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "uptime").write_text("1000000.5 1.0\n")
    ticks = os.sysconf("SC_CLK_TCK")
    for age_s, said in ((90, "90 s ago"), (300, "5 minutes ago"), (30 * 3600, "30 hours ago"), (3 * 86400, "3 days ago")):
        rest = ["S", *["0"] * 18, str(round((1000000.5 - age_s) * ticks)), "0"]
        (tmp_path / "7/stat").write_text(f"7 (a) b) {' '.join(rest)}\n")
        assert describe_process(7, tmp_path).startswith(f"process 7, which was started {said} (at ")
    assert describe_process(8, tmp_path) == "process 8"


def test_of_a_process_and_its_forks_the_first_one_is_stopped():
    assert oldest_process({7: 1, 9: 7, 12: 9}) == 7 and oldest_process({}) is None


def test_the_command_of_a_submitted_job(tmp_path, monkeypatch):
    (tmp_path / "jobs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert make_entrypoint("jobs/a b.yaml", Path(), ["steps=5", "name=it's"], None) == (
        "python -m raypar train 'jobs/a b.yaml' --set steps=5 --set 'name=it'\"'\"'s'"
    )
    assert (
        make_entrypoint(str(tmp_path / "jobs/q.yaml"), Path("jobs"), [], False) == "python -m raypar train q.yaml --no-resume"
    )
    with pytest.raises(ConfigError, match="is not in the working directory") as error:
        make_entrypoint("q.yaml", Path("jobs"), [], None)
    assert "--working-dir" in error.value.cure
    with pytest.raises(ConfigError, match="no folder"):
        make_entrypoint("q.yaml", Path("none"), [], None)


def test_a_submitted_job_has_time_to_save_when_it_is_stopped(tmp_path):
    env = make_runtime_env(tmp_path, {})
    assert env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120"} and env["working_dir"] == str(tmp_path)
    assert make_runtime_env(tmp_path, {"RAY_JOB_STOP_WAIT_TIME_S": "9"})["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "9"
    with pytest.raises(ConfigError, match="whole seconds"):
        make_runtime_env(tmp_path, {"RAY_JOB_STOP_WAIT_TIME_S": "soon"})


def test_what_rays_client_raises_in_words(tmp_path, monkeypatch):
    """Known by types, HTTP codes and what the job server knows: Ray may say the same in other words."""
    from raypar.launch.job_server import JobServer, NoSuchJob
    from raypar.ray_compat import job_submission

    known = {"first": {"status": "RUNNING"}}

    class Server(JobServer):
        def job(self, submission_id):
            if submission_id not in known:
                raise NoSuchJob(submission_id)
            return known[submission_id]

    def said(text, kind=RuntimeError):
        return str(submission_error(kind(text), Server("http://head:8265"), "first", tmp_path))

    assert "a job 'first' has been submitted" in said("Request failed with status code 500: Traceback ... ValueError: taken")
    assert "did not take the job: no agent" in said("no agent"), "it was not refused: its own submission may have arrived"
    known.clear()
    assert "did not take the job: Request failed" in said("Request failed with status code 500: a job that already exists")
    assert "pip install 'raypar[jobs]'" in said("No module named 'aiohttp'", ImportError)
    monkeypatch.setattr(job_submission.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'raypar[jobs]'" in said("what is needed is not installed")
    monkeypatch.undo()
    assert ".rayignore" in said("Package size (600 MiB) exceeds the maximum size of 512 MiB.", ValueError)
    (tmp_path / "runs").mkdir()
    for place, size in (("data.bin", 7 << 20), ("code.py", 10), ("runs/never sent.bin", 9 << 20)):
        with open(tmp_path / place, "wb") as file:
            file.truncate(size)
    for text, kind in (
        ("Request failed with status code 413: in other words..", RuntimeError),
        ("Package size (600 MiB) exceeds the maximum size of 512 MiB.", ValueError),
    ):
        assert "; its largest files are data.bin (7 MiB)\n  cure: name what the job does not need" in said(text, kind)
    assert "did not take the job: no agent" in said("no agent")


def test_bad_input_of_submit_is_one_error_before_anything_is_sent(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(JOB)
    for words, message in (
        (["small.yaml"], "no address of a job server is given"),
        (["none.yaml", "--address", "http://127.0.0.1:1"], "none.yaml"),
        (["small.yaml", "--address", "http://127.0.0.1:1"], "tried http://127.0.0.1:1 (Connection refused)"),
        (["small.yaml", "--set", "stepz=1", "--address", "http://127.0.0.1:1"], "stepz"),
    ):
        assert main(["submit", *words]) == 2
        error = capfd.readouterr().err
        assert message in error and "cure: " in error and "Traceback" not in error


def test_stdout_is_pure_json_whatever_else_prints_there():
    code = """
    import os, sys
    from raypar.console.json_stdout import json_stdout
    with json_stdout(True) as out:
        print("autoscaler")
        os.write(1, b"worker\\n")
        os.system("echo child")
        print('{"a": 1}', file=out)
        print("more")
    print("after")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == '{"a": 1}\nafter\n'
    assert sorted(done.stderr.split()) == ["autoscaler", "child", "more", "worker"]
    closed = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert closed.stdout == '{"a": 1}\nafter\n'


def test_the_json_of_train_is_pure_while_ray_and_the_jobs_code_print(tmp_path, monkeypatch, capfd):
    from raypar.launch import Result

    def train(job, tell, **rest):
        print("(autoscaler) Adding 1 node")
        tell(StartupStage(stage="checked", text="checked"))
        return Result({}, "runs/small", "done", 8)

    (tmp_path / "small.yaml").write_text(JOB)
    monkeypatch.setattr("raypar.launch.train_job_in_new_folder", train)
    assert main(["train", str(tmp_path / "small.yaml"), "--json"]) == 0
    printed = capfd.readouterr()
    assert [json.loads(line)["kind"] for line in printed.out.splitlines()] == ["stage", "stage", "result"]
    assert printed.err == "(autoscaler) Adding 1 node\n"


def test_the_cure_for_a_run_that_trains_already_finds_it_from_every_folder(tmp_path):
    """It was `raypar stop NAME`, which looks under runs/ only."""
    run = make_run(tmp_path / "elsewhere", "small", [])
    with run.hold_lock(), pytest.raises(ConfigError, match="run small is under way") as caught, run.hold_lock():
        pass
    assert f"`raypar stop {run.path}` lets it save and end" in caught.value.cure


def test_what_a_run_folder_says_does_not_move_the_cursor_nor_break_pictures(tmp_path, capsys):
    """Others may have written the folder, on storage too. Line breaks and tabs stay."""
    note = {"kind": "note", "text": "\x1b[2Ja\u202eb\x00c\td\ne", "time": 999.0}
    lost = {
        "kind": "lost",
        "what": "worker 1\x1b[2J",
        "why": "it\x1b[2J died",
        "time": 999.5,
        "worker": 1,
        "pid": 7,
        "node": "n",
    }
    end = {"kind": "end", "end": "failed", "why": "\x1b]0;title\x07", "step": 3, "time": 1001.0}
    folder = make_run(tmp_path, "small", [step(1, 998.0), step(3, 1000.0)], [note, lost, end])
    (tmp_path / "evil\x1b[2J").mkdir()
    (tmp_path / "evil\x1b[2J" / "job.yaml").write_text(JOB)
    drawn, page = tmp_path / "drawn.svg", tmp_path / "page.html"
    assert main(["status", str(folder.path), "--svg", str(drawn)]) == 0
    assert main(["logs", str(folder.path)]) == 0
    assert main(["report", str(folder.path), "--out", str(page)]) == 0
    assert main(["runs", str(tmp_path)]) == 0
    assert main(["status", "none", "--run-dir", str(tmp_path)]) == ConfigError.exit_code
    told = capsys.readouterr()
    texts = (told.out, told.err, drawn.read_text(), page.read_text())
    assert [sorted({c for c in text if not c.isprintable()} - {"\n", "\t"}) for text in texts] == [[]] * len(texts)
    assert "?[2Ja?b?c\td\n" in told.out and "evil?[2J" in told.out and "evil?[2J" in told.err
