"""No secret in what raypar writes and prints: run folder, logs, status, top, report, errors, metrics. Each test plants some."""

import asyncio
import io
import json
from types import SimpleNamespace

import pytest

from raypar.actors.events_for_client import EventFeed
from raypar.actors.members_file_text import MembersFileText
from raypar.actors.run_recorder import RunRecorder
from raypar.cli import main
from raypar.console.event_printer import EventPrinter
from raypar.console.json_stdout import json_text
from raypar.elastic.phases import Phase
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import UserCodeError
from raypar.files.redact_secrets import REMOVED
from raypar.launch.result import Result
from raypar.launch.run_failure import keep_full_error
from raypar.launch.start_new_run import warnings_about_secrets
from raypar.plan import ParallelPlan
from raypar.record.events import RunWarning, SavedCheckpoint
from raypar.record.parse_events import parse_event, parse_metrics
from raypar.storage.run_folder import RunFolder
from raypar.telemetry.run_telemetry import RunTelemetry

ENVIRONMENT = {
    "RAY_AUTH_TOKEN": "c0ffee00c0ffee00",
    "AWS_SECRET_ACCESS_KEY": "abcdEFGH1234+/abcdEFGH1234",
    "WANDB_API_KEY": "0123456789abcdef0123",
    "DB_PASSWORD": "correct horse",
}
IN_TEXTS = {
    "password of a URL": "hunter2hunter2",
    "token of Hugging Face": "hf_abcdefghijklmnopqrstuv",
    "key of AWS": "AKIAABCDEFGHIJKLMNOP",
    "private key": "MIIEpAIBAAKCAQEA",
}
SECRETS = {**ENVIRONMENT, **IN_TEXTS}
PLANTED = (
    f"cannot reach https://user:{IN_TEXTS['password of a URL']}@host/x with {IN_TEXTS['token of Hugging Face']}, "
    f"{IN_TEXTS['key of AWS']} and " + ", ".join(ENVIRONMENT.values()) + ": unexpected token: '}'"
)
PRIVATE = f"-----BEGIN RSA PRIVATE KEY-----\n{IN_TEXTS['private key']}\n-----END RSA PRIVATE KEY-----"


def found_in(text: str) -> set[str]:
    """The names of the planted secrets in a text."""
    return {name for name, secret in SECRETS.items() if secret in text}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def folder(tmp_path):
    """A run folder as a driver writes it whose users' code has put secrets into all of its messages."""
    folder = RunFolder.create(tmp_path, "tiny")
    folder.job.write_text("steps: 4\n")
    policy = RunPolicy(workers=1, job_steps=4)
    recorder = RunRecorder(SimpleNamespace(folder=str(folder.path), run="tiny", policy=policy))
    recorder.note(parse_event({"kind": "started", "text": f"1 worker {PLANTED}"}))
    recorder.note(parse_event({"kind": "lost", "worker": 0, "why": PLANTED, "coordinate": PLANTED}))
    recorder.note(parse_event({"kind": "warning", "text": f"{PLANTED}\n{PRIVATE}"}))
    step = {"step": 1, "loss": 1.0, "seconds": 1.0, "samples_per_s": 8.0, "note_of_a_callback": PLANTED}
    recorder._write(parse_metrics(step))
    recorder._save_totals(0.0)
    machine = RunMachine(policy)
    machine.phase, machine.recovery.why = Phase.WAITING, PLANTED
    status = MembersFileText(SimpleNamespace(plan=ParallelPlan.mesh(layers=1), policy=policy))
    text = status.text_if_changed(machine, lambda number: {"worker": number}, lambda plan: "1f1b")
    assert text is not None
    recorder.write_members_file(text)
    recorder.note(parse_event({"kind": "end", "end": "failed", "why": PLANTED, "step": 1}))
    recorder.metrics.close()
    recorder.events.close()
    error = UserCodeError(PLANTED, cure="")
    try:
        raise error
    except UserCodeError:
        keep_full_error(Result({}, str(folder.path), "failed", 1, error=error))
    return folder


def test_no_file_of_a_run_folder_has_a_secret_and_messages_still_say_what_is_wrong(folder):
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {"events.jsonl", "metrics.jsonl", "members.json", "error.txt", "totals.json"} <= {path.name for path in files}
    assert {path.name: found_in(path.read_text()) for path in files if found_in(path.read_text())} == {}
    told = (folder.path / "error.txt").read_text()
    assert REMOVED in told and "unexpected token: '}'" in told and "https://[removed]@host/x" in told


@pytest.mark.parametrize(
    "command", [["status"], ["status", "--json"], ["logs"], ["logs", "--json"], ["top", "--once"], ["report"]]
)
def test_no_command_shows_a_secret_of_a_folder_that_has_some(tmp_path, capsys, command):
    """The folder may be one of an older release."""
    folder = RunFolder.create(tmp_path, "tiny")
    folder.job.write_text("steps: 4\n")
    folder.append_line(
        folder.metrics, {"step": 1, "loss": 1.0, "seconds": 1.0, "samples_per_s": 8.0, "time": 5.0, "x": PLANTED}
    )
    for event in ({"kind": "note", "text": f"{PLANTED} {PRIVATE}"}, {"kind": "end", "end": "failed", "why": PLANTED}):
        folder.append_line(folder.events, event | {"time": 6.0})
    told = {"time": 5.5, "phase": "running", "why": PLANTED, "plan": PLANTED, "schedule": PLANTED}
    folder.members.write_text(
        json.dumps(told | {"members": [{"worker": 0, "coordinate": PLANTED, "node": "n", "host": PLANTED}]})
    )
    out = tmp_path / "report.html"
    more = ["--out", str(out)] if command == ["report"] else []
    assert main([command[0], str(folder.path), *command[1:], *more]) == 0
    shown = capsys.readouterr().out
    assert found_in(shown + (out.read_text() if out.exists() else "")) == set() and (REMOVED in shown or out.exists())
    if "--json" in command:
        for line in shown.splitlines():
            json.loads(line)


def test_no_event_for_the_client_has_a_secret():
    async def told() -> str:
        feed = EventFeed()
        feed.tell(RunWarning(text=PLANTED))
        feed.pass_on([parse_event({"kind": "lost", "worker": 0, "why": f"{PLANTED} {PRIVATE}"})])
        events, _, _ = await feed.after(feed.epoch, 0, 0.01)
        return json_text(events)

    shown = asyncio.run(told())
    assert found_in(shown) == set() and shown.count(REMOVED) > 10


def test_the_path_of_a_checkpoint_comes_to_the_client_as_it_is_and_is_printed_without_its_password():
    """The client opens it. A container before an @ is no password."""
    secret = f"s3://key:{IN_TEXTS['password of a URL']}@bucket/runs/tiny/step_4"

    async def told(path: str) -> dict:
        feed = EventFeed()
        feed.tell(SavedCheckpoint(step=4, path=path))
        events, _, _ = await feed.after(feed.epoch, 0, 0.01)
        return events[0]

    for as_json in (False, True):
        for path, shown in ((secret, "s3://[removed]@bucket/runs"), ("abfs://box@account/runs", "abfs://box@account/runs")):
            event = asyncio.run(told(path))
            assert event["path"] == path
            out = io.StringIO()
            EventPrinter(steps=4, as_json=as_json, out=out)(parse_event(event))
            assert shown in out.getvalue() and found_in(out.getvalue()) == set()


def test_no_error_that_a_command_prints_has_a_secret(tmp_path, capsys):
    """It stands in the log of a submitted job, which others read."""
    assert main(["train", str(tmp_path / f"{ENVIRONMENT['RAY_AUTH_TOKEN']}.yaml")]) == 2
    shown = capsys.readouterr().err
    assert found_in(shown) == set() and REMOVED in shown


def test_metrics_have_names_and_numbers_only():
    telemetry = RunTelemetry()
    telemetry.totals.add_event(parse_event({"kind": "lost", "worker": 0, "why": PLANTED}))
    assert found_in(json_text(telemetry.values(4, 1.0))) == set()


def test_a_secret_in_the_job_itself_is_warned_of_by_the_name_of_its_key_alone():
    job = f"""
trackers: [{{tracker: wandb, args: {{api_key: {SECRETS["WANDB_API_KEY"]}}}}}]
data: {{function: 'm:text', args: {{token: some-long-token, url: 'https://u:{SECRETS["password of a URL"]}@h/x', path: a}}}}
"""
    found = warnings_about_secrets(job)
    assert [line.split()[0] for line in found] == ["trackers.0.args.api_key", "data.args.token", "data.args.url"]
    assert all("cure: have your function read it" in line for line in found) and found_in("".join(found)) == set()


def test_jobs_without_secrets_are_not_warned_of():
    for job in ("data: {function: 'm:tokens', args: {token_file: /data/tokens.bin, tokens: 100000, eos_token: '</s>'}}",
                "plan: {styles: {'embed.token': column-gathered}}", "name: secret", "steps: 3"):  # fmt: skip
        assert warnings_about_secrets(job) == [], job
    assert warnings_about_secrets(None) == []
