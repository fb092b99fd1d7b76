"""Submitted jobs: their states and exit codes, what their logs say, how one is named, how one is followed."""

import io
import json

import pytest

from raypar.errors import ClusterError, ConfigError
from raypar.launch.cluster_jobs import describe_failure, parse_ray_job_record, read_log_facts
from raypar.launch.find_cluster_job import JobWithLog, OtherJobIsActive, choose_job_to_stop, match_job
from raypar.launch.follow_job import AWAY_S, JobFollower
from raypar.launch.stop_run import wait_for_job_end
from raypar.launch.submit_to_job_server import same_name_warning
from raypar.launch.submitted_job_printer import JobPrinter, describe_job_end

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
    for done, number in (("1 step", 1), ("1,024 steps", 1024)):
        for end in (f"stopped after {done} (SIGTERM): there is no checkpoint", f"all steps done: {done}, 310 samples/s"):
            assert (read_log_facts(f"{LOG}{end}\n").step, read_log_facts(f"{LOG}{end}\n").end) == (number, end)
    waiting = "waiting for 3 more workers: the cluster has a place for 1 of 4"
    assert read_log_facts(f"{LOG}{waiting}\n").waiting == waiting
    assert read_log_facts(f"{LOG}{waiting}\n{STEPS}").waiting is None
    assert read_log_facts("step 3/9  loss nan  1 samples/s").step == 3
    assert read_log_facts("") == read_log_facts("anything else\n")


def match(given, *jobs, logs=()):
    logs = dict(logs)
    return match_job(given, jobs, "s", lambda one: JobWithLog(one, read_log_facts(logs.get(one.submission_id, ""))))


def log_of(run, said=""):
    return f"      the run is called {run}; its folder is /home/me/raypar/runs/{run}\n{said}"


def stop_id(given, *jobs, logs=()):
    return choose_job_to_stop(match(given, *jobs, logs=logs), given).submission_id


def test_a_job_is_meant_by_its_id_or_by_its_name_of_which_the_last_one_counts():
    jobs = [job("a", "STOPPED", start=1), job("b", "STOPPED", start=3), job("c", "FAILED", start=2), job("quick", name="other")]
    assert match("a", *jobs).found.job.submission_id == "a"
    assert match("quickstart", *jobs).found.job.submission_id == "b"
    with pytest.raises(ConfigError, match="no job 'quickstrat' at s") as error:
        match("quickstrat", *jobs)
    assert "did you mean quickstart?" in error.value.cure and "the last jobs there: quickstart, a, c, b" in error.value.cure
    with pytest.raises(ConfigError, match="no job has been submitted there"):
        match("a")


def test_the_name_that_runs_shows_works_for_logs_and_stop():
    """The second submission of a job `dup` became run dup-2, which neither knew, and `stop dup` stopped it."""
    both = job("one", name="dup", start=1), job("two", name="dup", start=2)
    logs = {"one": log_of("dup", STEPS), "two": log_of("dup-2", STEPS)}
    assert [stop_id(name, *both, logs=logs) for name in ("dup", "dup-2", "one", "two")] == ["one", "two", "one", "two"]
    unnamed = job("three", metadata={})
    assert stop_id("mine", *both, unnamed, logs={**logs, "three": log_of("mine")}) == "three", "ray job submit"
    assert match("dup-2", *both, logs={"two": log_of("dup-2")}).found.describe() == "job two (run dup-2, starting)"


def test_a_job_that_has_not_ended_comes_before_one_that_has_and_one_that_runs_before_one_that_waits():
    ended, active = job("a", "STOPPED", "text", 2), job("b", "RUNNING", "text", 1)
    assert stop_id("text", ended, active, logs={"a": log_of("text"), "b": log_of("text")}) == "b", "it was resumed"
    waits, trains = job("w", "RUNNING", "text", 3), job("t", "RUNNING", "text", 1)
    logs = {"w": log_of("text-2", "waiting for 2 CPUs: 1 of 4 are free\n"), "t": log_of("text-3", STEPS)}
    assert match("text", waits, trains, logs=logs).found.job.submission_id == "t"


def test_a_stop_that_may_mean_several_jobs_stops_none():
    both = job("one", name="dup", start=1), job("two", "PENDING", name="dup", start=2)
    with pytest.raises(
        ConfigError, match=r"2 jobs .*'dup': job one \(run dup, running\), job two \(no run yet, pending\)"
    ) as e:
        stop_id("dup", *both, logs={"one": log_of("dup", STEPS)})
    assert e.value.exit_code == 2 and "nothing was stopped" in e.value.cure and "raypar stop one" in e.value.cure
    with pytest.raises(ConfigError, match=r"job one \(run dup-3, starting\), job two"):
        both = job("one", name="dup", start=3), job("two", name="dup", start=2)
        stop_id("dup", *both, logs={"one": log_of("dup-3"), "two": log_of("dup-2")})


def test_a_stop_of_a_run_that_has_ended_tells_the_other_job_of_its_name():
    both = job("one", "STOPPED", "dup", 1), job("two", "RUNNING", "dup", 2)
    logs = {"one": log_of("dup"), "two": log_of("dup-2", STEPS)}
    with pytest.raises(OtherJobIsActive, match=r"run dup had ended already .*job two \(run dup-2, running\)") as error:
        stop_id("dup", *both, logs=logs)
    assert error.value.exit_code == 1 and "`raypar stop two` stops that one" in error.value.cure
    assert stop_id("one", *both, logs=logs) == "one", "an id means one job only"
    assert match("dup", *both, logs=logs).others[0].job.submission_id == "two"


def test_no_more_logs_are_read_than_a_name_needs():
    read: list[str] = []

    def note(one):
        read.append(one.submission_id)
        return JobWithLog(one, read_log_facts(log_of("text")))

    jobs = [*(job(f"old{n}", "SUCCEEDED", "text", n) for n in range(1, 5)), job("else", name="other"), job("p", "PENDING", "z")]
    assert match_job("text", jobs, "s", note).found.job.submission_id == "old4" and read == ["old4"]


def test_a_failed_job_says_why():
    said = read_log_facts(log_of("a") + "error: no data\x1b[2J at all\n  cure: give some\n")
    assert describe_failure(job(status="FAILED"), said) == "no data\\x1b[2J at all"
    assert read_log_facts(log_of("a")).folder == "/home/me/raypar/runs/a"
    again = read_log_facts("[1/6] run text found in s3://b/runs/text: 9 steps ... 0.4 s\n")
    assert (again.run, again.folder) == ("text", "s3://b/runs/text")
    message = "Job entrypoint command failed with exit code 2, last available logs:\nerror: job.yaml: no key\n  cure: x\n"
    assert describe_failure(job(status="FAILED", message=message), read_log_facts("")) == "job.yaml: no key"
    message = "runtime_env setup failed\nno such package\n"
    assert describe_failure(job(status="FAILED", message=message), read_log_facts("")) == "no such package"
    assert describe_failure(job(status="FAILED"), read_log_facts("")) == "Ray does not say why"


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
