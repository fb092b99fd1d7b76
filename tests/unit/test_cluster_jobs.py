"""Submitted jobs: their states and exit codes, what their logs say, how one is named, how one is followed."""

import io
import json

import pytest

from raypar.errors import ClusterError, ConfigError
from raypar.launch.cluster_jobs import match_job, parse_ray_job_record, read_log_facts
from raypar.launch.follow_job import AWAY_S, JobFollower, wait_for_job_end
from raypar.launch.job_printer import JobPrinter, describe_job_end
from raypar.launch.submit_to_job_server import same_name_warning

LOG = """Running entrypoint for job first: python -m raypar train jobs/quickstart.yaml
[1/6] job quickstart read from jobs/quickstart.yaml: 160 steps ... 0.4 s
[4/6] joined the Ray cluster at 127.0.0.1:6379 ... 3.1 s
      the run is called quickstart-2; its folder is /home/me/raypar/runs/quickstart-2
"""
STEPS = "step 1/160  loss 5.5000  90 samples/s  bubble 30 %  ETA 12 s\nstep 80/160  loss 2.4100  91 samples/s  ETA 6 s\n"
STOPPED = "stopped after 83 steps (SIGTERM): the checkpoint /home/me/step_00000083 can be resumed"


def job(submission_id="a", status="RUNNING", name="quickstart", start=1000, **more):
    record = {"submission_id": submission_id, "status": status, "start_time": start, "metadata": {"raypar_job": name}}
    return parse_ray_job_record(record | more)


@pytest.mark.parametrize(
    "status, code, state, command_code",
    [
        ("SUCCEEDED", 0, "done", 0),
        ("STOPPED", None, "stopped", 130),
        ("FAILED", 130, "stopped", 130),
        ("FAILED", 2, "failed", 2),
        ("FAILED", None, "failed", 1),
        ("FAILED", -9, "failed", 1),
    ],
)
def test_a_stopped_job_is_told_from_a_finished_one_by_the_exit_code(status, code, state, command_code):
    found = job(status=status, driver_exit_code=code)
    assert (found.state, found.command_exit_code, found.over) == (state, command_code, True)


def test_a_job_of_another_program_has_no_name():
    found = parse_ray_job_record({"submission_id": "x", "status": "PENDING", "metadata": None})
    assert (found.name, found.state, found.started_s, found.over) == (None, "pending", None, False)
    assert job(name="a\x1b[2Jb").name == "a?[2Jb", "what others have chosen does not move the cursor"


def test_what_a_log_says():
    facts = read_log_facts(LOG)
    assert (facts.run, facts.step, facts.waiting, facts.end) == ("quickstart-2", None, None, None)
    facts = read_log_facts(LOG + STEPS)
    assert (facts.step, facts.steps, facts.loss) == (80, 160, 2.41)
    facts = read_log_facts(LOG + STEPS + STOPPED)
    assert facts.step == 83 and facts.end == STOPPED
    facts = read_log_facts(LOG + STEPS + "all steps done: 160 steps, 310 samples/s\nweights sha256 12\n")
    assert facts.step == 160 and facts.end == "all steps done: 160 steps, 310 samples/s"
    waiting = "waiting for 3 more workers: the cluster has a place for 1 of 4"
    assert read_log_facts(f"{LOG}{waiting}\n").waiting == waiting
    assert read_log_facts(f"{LOG}{waiting}\n{STEPS}").waiting is None
    assert read_log_facts("step 3/9  loss nan  1 samples/s").step == 3
    assert read_log_facts("") == read_log_facts("anything else\n")


def test_a_job_is_meant_by_its_id_or_by_its_name_of_which_the_last_one_counts():
    jobs = [job("a", start=1), job("b", start=3), job("c", start=2), job("quick", name="other", start=9)]
    assert match_job("a", jobs, "s").submission_id == "a"
    assert match_job("quickstart", jobs, "s").submission_id == "b"
    with pytest.raises(ConfigError, match="no job 'quickstrat' at s") as error:
        match_job("quickstrat", jobs, "s")
    assert "did you mean quickstart?" in error.value.cure and "the last jobs there: quickstart, a, c, b" in error.value.cure
    with pytest.raises(ConfigError, match="no job has been submitted there"):
        match_job("a", [], "s")


def test_a_job_of_the_same_name_that_has_not_ended_is_warned_of():
    ended, other = job("a", status="STOPPED"), job("b", name="other")
    assert same_name_warning("quickstart", [ended, other]) is None
    said = same_name_warning("quickstart", [ended, other, job("c")])
    assert said.startswith("warning: job c of the same name (quickstart) is running") and "`raypar stop c` first" in said


class Server:
    """A job server in a script: each look at the job takes the next (status, log) or raises it."""

    name = "http://head:8265"

    def __init__(self, *script):
        self.script = [*script]

    def job(self, submission_id):
        now = self.script[0]
        if isinstance(now, Exception):
            self._next()
            raise now
        return {"submission_id": submission_id, "status": now[0]}

    def log(self, submission_id):
        now = self._next()
        return now[1]

    def _next(self):
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]


def follower(server, said=None):
    shown: list[str] = []
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    said = [] if said is None else said
    return JobFollower(server, "a", shown.append, said.append, clock=lambda: now[0], sleep=sleep), shown


def test_following_shows_every_character_once_and_ends_with_the_job():
    server = Server(("PENDING", ""), ("RUNNING", "one\ntw"), ("RUNNING", "one\ntwo\n"), ("SUCCEEDED", "one\ntwo\nthree\n"))
    follow, shown = follower(server)
    assert follow.follow().state == "done"
    assert shown == ["one\ntw", "o\n", "three\n"]


def test_a_job_that_does_not_start_is_said_to_be_waited_for():
    said: list[str] = []
    follow, _ = follower(Server(*[("PENDING", "")] * 12, ("FAILED", "")), said)
    assert follow.follow().state == "failed"
    assert said == [f"waiting for the cluster to start job a, for {n} s so far" for n in (5, 10)]


def test_a_gap_of_the_job_server_is_survived_and_a_long_one_is_an_error():
    gone = ClusterError("Connection refused")
    said: list[str] = []
    follow, shown = follower(Server(("RUNNING", "one\n"), gone, gone, ("SUCCEEDED", "one\ntwo\n")), said)
    assert follow.follow().state == "done" and shown == ["one\n", "two\n"]
    assert said == ["waiting for the job server http://head:8265 (Connection refused), for 0 s of 60"]
    said.clear()
    follow, _ = follower(Server(("RUNNING", ""), gone), said)
    with pytest.raises(ClusterError, match=f"has not answered for {AWAY_S + 1:.0f} s") as error:
        follow.follow()
    assert "raypar logs a -f" in error.value.cure
    assert [line.rpartition("for ")[2] for line in said] == [f"{n} s of 60" for n in (0, 10, 20, 30, 40, 50, 60)]


def test_a_job_that_does_not_stop_is_an_error_at_the_deadline():
    said: list[str] = []
    with pytest.raises(ClusterError, match="job a was asked to save and end, and is still running after 0 s"):
        wait_for_job_end(Server(("RUNNING", "")), "a", 0.01, said.append)


def test_a_log_is_printed_as_it_comes_and_as_json_line_by_line():
    out = io.StringIO()
    printer = JobPrinter(out, as_json=True)
    printer.submitted("a", "quickstart", "http://head:8265", "python -m raypar train q.yaml")
    for piece in ("one\ntw", "o\nthr"):
        printer.log(piece)
    assert printer.ended(job(status="STOPPED")) == 130
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["kind"] for line in lines] == ["submitted", "log", "log", "log", "end"]
    assert [line["text"] for line in lines[1:4]] == ["one", "two", "thr"]
    assert lines[0]["submission_id"] == "a" and lines[-1]["state"] == "stopped" and lines[-1]["exit_code"] == 130
    out = io.StringIO()
    printer = JobPrinter(out, as_json=False)
    printer.log("one\ntw")
    assert printer.ended(job(status="SUCCEEDED")) == 0 and out.getvalue() == "one\ntw\njob a is done\n"


def test_how_a_job_ended_in_words():
    assert describe_job_end(job(status="FAILED", driver_exit_code=1)) == "job a has failed, with exit code 1"
    message = "runtime_env setup failed\nno such package"
    assert describe_job_end(job(status="FAILED", message=message)) == "job a has failed: no such package"
    assert "submit the same job again" in describe_job_end(job(status="STOPPED"))
