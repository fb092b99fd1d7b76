"""`raypar runs`, `logs`, `stop`, `status` and `submit` as users type them, against a job server that is a script."""

import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from raypar.cli import main
from raypar.launch.job_server import JobServer

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


class Jobs:
    """The jobs of the server: their records, their logs, and what was asked for."""

    def __init__(self):
        self.url = ""
        self.records: dict[str, dict] = {}
        self.logs: dict[str, str] = {}
        self.stopped: list[str] = []

    def add(self, submission_id, name, status="RUNNING", run=None, said="", **more):
        self.records[submission_id] = {
            "submission_id": submission_id,
            "status": status,
            "start_time": 1000 * (len(self.records) + 1),
            "metadata": {"raypar_job": name},
        } | more
        run_line = f"      the run is called {run}; its folder is /home/me/raypar/runs/{run}\n" if run else ""
        self.logs[submission_id] = run_line + said

    def answer(self, path):
        if path == "/api/version":
            return {"ray_version": "2.60.0"}
        if path == "/api/jobs/":
            return [*self.records.values()]
        submission_id, what = re.fullmatch(r"/api/jobs/([^/]+)/?(\w*)", path).groups()
        if what == "logs":
            return {"logs": self.logs[submission_id]}
        if what == "stop":
            self.stopped.append(submission_id)
            self.records[submission_id]["status"] = "STOPPED"
            return {"stopped": True}
        return self.records[submission_id]


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """The server's jobs; its address is in the environment, and the working directory is empty."""
    there = Jobs()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = json.dumps(there.answer(self.path)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *given):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    there.url = f"http://127.0.0.1:{http.server_port}"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", there.url)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.chdir(tmp_path)
    yield there
    http.shutdown()
    http.server_close()
    thread.join()


STEP = "step 1/160  loss 5.5000  90 samples/s  ETA 12 s\n"


def test_every_name_that_runs_shows_works_for_logs_and_stop(jobs, capfd):
    jobs.add("a", "dup", run="dup", said=STEP)
    jobs.add("b", "dup", run="dup-2", said=STEP)
    assert main(["runs", "--json"]) == 0
    assert [row["name"] for row in json.loads(capfd.readouterr().out)] == ["dup", "dup-2"]
    assert main(["logs", "dup"]) == 0 and "is called dup;" in capfd.readouterr().out
    assert main(["logs", "dup-2"]) == 0 and "is called dup-2;" in capfd.readouterr().out
    assert main(["stop", "dup-2"]) == 0 and jobs.stopped == ["b"]
    assert main(["stop", "dup"]) == 0 and jobs.stopped == ["b", "a"]
    assert "job a (dup) has stopped" not in capfd.readouterr().err


def test_a_stop_of_an_ended_run_tells_the_active_job_of_its_name(jobs, capfd):
    jobs.add("a", "dup", "STOPPED", run="dup")
    jobs.add("b", "dup", run="dup-2", said=STEP)
    assert main(["stop", "dup"]) == 1 and jobs.stopped == []
    error = capfd.readouterr().err
    assert "run dup had ended already (job a (run dup, stopped))" in error and "`raypar stop b` stops that one" in error
    assert main(["logs", "dup"]) == 0
    assert "note: this is the log of job a; dup is also job b (run dup-2, running)" in capfd.readouterr().err


def test_a_stop_that_fits_several_stops_none(jobs, capfd):
    jobs.add("a", "dup", run="dup-4", said=STEP)
    jobs.add("b", "dup", run="dup-5", said=STEP)
    assert main(["stop", "dup"]) == 2 and jobs.stopped == []
    assert "job b (run dup-5, running), job a (run dup-4, running)" in capfd.readouterr().err


def test_failed_jobs_say_why(jobs, capfd):
    jobs.add("a", "small", "FAILED", driver_exit_code=2, said="error: plan: no such schedule\n  cure: one of ...\n")
    assert main(["runs"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "  error: plan: no such schedule"


def test_failed_runs_in_a_folder_say_why(tmp_path, capfd):
    run = tmp_path / "runs/small"
    (run / "checkpoints").mkdir(parents=True)
    (run / "job.yaml").write_text(JOB)
    end = {"kind": "end", "end": "failed", "why": "worker 1 raised\nTraceback", "step": 3, "time": 1000.0}
    (run / "events.jsonl").write_text(json.dumps(end) + "\n")
    assert main(["runs", str(tmp_path / "runs")]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "  error: worker 1 raised"


@pytest.mark.parametrize("command", ["status", "report"])
def test_where_the_run_folder_of_a_submitted_job_is(jobs, capfd, command):
    jobs.add("a", "text", run="text", said=STEP)
    assert main([command, "text"]) == 2
    error = capfd.readouterr().err
    assert "status, top and report read run folders" in error and "job a of the cluster is /home/me/raypar/runs/text" in error
    assert "`raypar status /home/me/raypar/runs/text`" in error and "`raypar logs text`" in error
    assert main([command]) == 2 and "`raypar logs NAME` show a cluster's job from here" in capfd.readouterr().err
    assert main([command, "unknown"]) == 2
    error = capfd.readouterr().err
    assert "no run 'unknown'" in error and "status, top and report read run folders" in error and "`raypar runs`" in error


def test_a_run_of_this_machine_beside_a_cluster(jobs, capfd):
    (Path("runs/single/checkpoints")).mkdir(parents=True)
    Path("runs/single/job.yaml").write_text(JOB)
    for command in ("logs", "stop"):
        assert main([command, "single"]) == 2
        error = capfd.readouterr().err
        assert "runs/single is a run of this machine: give that path, or --run-dir" in error
        assert main([command, "runs/single"]) == 0, "a folder, whatever is in the environment"
        assert main([command, "runs/single", "--address", jobs.url]) == 0
        assert (
            main([command, "none"]) == 2 and "for a run of this machine give its path, or --run-dir" in capfd.readouterr().err
        )


def test_the_bytes_of_a_server_that_is_none_for_http_are_not_printed(capfd):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            for _ in range(2):
                there, _ = listener.accept()
                with there:
                    there.recv(100)
                    there.sendall(b"\x00\x00\x18\x04\x00\xff\x80\x01gRPC\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert main(["runs", "--address", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 2
    error = capfd.readouterr().err
    assert "it does not speak HTTP: this is not a job server's port, which is usually 8265" in error
    assert "\\x" not in error and "gRPC" not in error and "\x00" not in error


def test_the_log_of_a_pending_job_is_not_asked_for(jobs):
    from raypar.launch.find_cluster_job import find_cluster_job

    jobs.add("a", "text", "PENDING")
    del jobs.logs["a"]
    assert find_cluster_job(JobServer(jobs.url), "text").found.state == "pending"


def submit(words, capfd):
    code = main(["submit", "small.yaml", *words])
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    return code, printed


@pytest.fixture
def sent(monkeypatch):
    """The entrypoints of jobs that were submitted."""
    taken: list[str] = []

    def take(server, name, entrypoint, runtime_env, submission_id):
        taken.append(entrypoint)
        return "raysubmit_1"

    monkeypatch.setattr("raypar.launch.submit_to_job_server.submit_job", take)
    return taken


@pytest.mark.parametrize(
    "ignore, lines, file",
    [
        (".gitignore", "*.safetensors\n", "weights/base.safetensors"),
        (".gitignore", "weights/\n", "weights/base.safetensors"),
        ("weights/.rayignore", "base.*\n", "weights/base.safetensors"),
        (".rayignore", "/weights\n", "weights/base.safetensors"),
    ],
)
def test_a_file_that_the_job_needs_and_an_ignore_file_keeps_back_is_refused(jobs, sent, capfd, ignore, lines, file):
    Path("weights").mkdir()
    Path(file).write_bytes(b"")
    Path("small.yaml").write_text(JOB + f"init_from: {file}\n")
    assert submit(["--no-wait"], capfd) == (0, "") and len(sent) == 1
    Path(ignore).write_text(lines)
    code, error = submit(["--no-wait"], capfd)
    assert code == 2 and len(sent) == 1
    assert f"init_from needs {file}, which is not sent along, because {ignore} names it" in error
    assert f"cure: take it out of {ignore}" in error and "absolute path" in error
    assert ("RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1" in error) == (ignore == ".gitignore")


def test_what_rays_variable_and_other_rules_leave_to_the_job(jobs, sent, capfd, monkeypatch):
    Path("small.yaml").write_text(JOB + "init_from: base\n")
    Path("base/.cache").mkdir(parents=True)
    for name in ("base/model.safetensors", "base/.cache/log", "other.pt"):
        Path(name).write_bytes(b"")
    Path(".gitignore").write_text("*.pt\n/model.safetensors\n")
    Path("base/.cache/.gitignore").write_text("*\n")
    assert submit(["--no-wait"], capfd) == (0, "")
    Path(".gitignore").write_text("*.safetensors\n")
    assert "needs base/model.safetensors" in submit(["--no-wait"], capfd)[1], "a file in the folder that is named"
    monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    assert submit(["--no-wait"], capfd) == (0, "")
    Path(".rayignore").write_text("*.yaml\n")
    assert "the job file small.yaml is not sent along, because .rayignore names it" in submit(["--no-wait"], capfd)[1]
    Path(".rayignore").unlink()
    Path("runs/old").mkdir(parents=True)
    Path("runs/old/model.safetensors").write_bytes(b"")
    assert submit(["--no-wait", "--set", "init_from=."], capfd) == (0, ""), "of a folder only the weights in it count"
    said = submit(["--no-wait", "--set", "init_from=runs/old"], capfd)[1]
    assert "needs runs/old/model.safetensors, and `raypar submit` never sends runs/" in said
    said = submit(["--no-wait", "--set", "init_from=../model.pt"], capfd)[1]
    assert "init_from ../model.pt is not in the working directory" in said
    for elsewhere in ("/mnt/model.pt", "s3://bucket/model.pt", "~/model.pt", "none.pt"):
        assert submit(["--no-wait", "--set", f"init_from={elsewhere}"], capfd) == (0, "")
    Path("order.csv").write_text("F0\n")
    Path(".rayignore").write_text("*.csv\n")
    said = submit(["--no-wait", "--set", "init_from=null", "--set", "plan={schedule_file: order.csv}"], capfd)[1]
    assert "plan.schedule_file needs order.csv, which is not sent along, because .rayignore names it" in said


def test_the_same_is_left_out_as_by_ray(tmp_path):
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    from raypar.launch.submit_to_job_server import EXCLUDES, find_excluding_rule

    for name in ("a.pt", "a.csv", "keep/a.pt", "keep/deep/a.csv", "deep/keep/b.pt", "sub/runs/x", "runs", "sub/.git/y", "z/z"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    for name, lines in (
        (".gitignore", "*.pt\n!keep/a.pt\nz/\n"),
        ("keep/.rayignore", "/deep\n"),
        ("deep/.gitignore", "!keep/b.pt\n"),
    ):
        (tmp_path / name).write_text(lines)
    taken: set[Path] = set()
    _dir_travel(tmp_path, [_get_excludes(tmp_path, [*EXCLUDES])], taken.add, include_gitignore=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path for path in files if find_excluding_rule(tmp_path, path) is None} == taken & {*files} != set()
