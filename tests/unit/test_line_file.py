"""Whatever befalls metrics.jsonl and events.jsonl: the run goes on, and in the end every step stands there once."""

import asyncio
import errno
import json
import math
import os
import shutil
from io import StringIO
from types import SimpleNamespace

import pytest

from raypar.actors import jsonl_file
from raypar.actors import run_state_in_ray_kv as store
from raypar.actors.generation_change import GenerationChange
from raypar.actors.jsonl_file import BLOCK_LINES, MIRRORED_LINES, JsonlFile
from raypar.actors.messages import StepCall
from raypar.actors.metrics_lines import format_step_ranges
from raypar.actors.run_recorder import RunRecorder
from raypar.actors.run_state_in_ray_kv import KEPT_STEPS, STEPS_IN_BLOCK, DriverReplaced, Journal
from raypar.actors.step_actions import StepActions
from raypar.actors.step_reports import StepReports
from raypar.console.event_printer import EventPrinter
from raypar.elastic.actions import EmitValidation, ForgetValidations, RunStep, Teardown
from raypar.elastic.events import GenerationClaimed
from raypar.elastic.run_machine import RunMachine
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import ConfigError
from raypar.job.lr_schedule_metric import FollowedMetric
from raypar.plan import ParallelPlan
from raypar.record.events import RunWarning
from raypar.record.parse_events import parse_event
from raypar.storage.read_run_lines import jsonl_line_sort_key, parse_jsonl_lines, read_lines_file
from raypar.storage.run_folder import RunFolder

pytestmark = pytest.mark.part(4)

PLAN = ParallelPlan.mesh(dp=2)
DONE, END = 40, 60
REAL_OPEN = open


@pytest.fixture(autouse=True)
def keys(monkeypatch) -> dict[str, bytes]:
    """Ray's key-value store."""
    kept: dict[str, bytes] = {}

    def put(key, value, overwrite):
        there = key in kept
        if overwrite or not there:
            kept[key] = value
        return there

    def delete(key, prefix=False):
        for one in [k for k in kept if k == key or (prefix and k.startswith(key))]:
            del kept[one]

    monkeypatch.setattr(store, "kv_put", put)
    monkeypatch.setattr(store, "kv_get", kept.get)
    monkeypatch.setattr(store, "kv_delete", delete)
    monkeypatch.setattr(store, "kv_list", lambda prefix: [k.encode() for k in kept if k.startswith(prefix)])
    return kept


@pytest.fixture
def full(monkeypatch) -> SimpleNamespace:
    """A disk that is full while `now`: of every file ten bytes more are written."""
    disk = SimpleNamespace(now=False)

    def opened(path, mode="r", **options):
        if disk.now and mode in ("a", "w", "wb"):
            with REAL_OPEN(path, mode) as file:
                file.write("0123456789" if mode != "wb" else b"0123456789")
            raise OSError(errno.ENOSPC, "No space left on device")
        return REAL_OPEN(path, mode, **options)

    monkeypatch.setattr(jsonl_file, "open", opened, raising=False)
    monkeypatch.setattr("raypar.files.atomic_write.open", opened, raising=False)
    return disk


class Driver:
    """As much of a driver as writes: each one after the first takes over."""

    def __init__(self, folder, *, first=0, last=END) -> None:
        self.journal = Journal("tiny")
        policy = RunPolicy(workers=2, steps_before_run=first, job_steps=last)
        request = SimpleNamespace(
            folder=folder, run="tiny", policy=policy, plan=PLAN, traced_steps=frozenset(), validation_batching=None
        )
        request.batching = SimpleNamespace(batch_size=8)
        request.job = SimpleNamespace(best_rules=[], metrics_every=0)
        self.recorder = RunRecorder(request, self.journal)
        self.recorder.restart_step_timer()
        machine = RunMachine(policy, plan=PLAN)
        machine.membership.generation = 1
        self.reports = StepReports(machine, SimpleNamespace(passes=lambda plan: (4, 4)))

    def take_over(self) -> int:
        """The steps that people have seen; those that are committed beyond are seen now."""
        known = self.journal.committed_steps()
        seen = self.recorder.take_over()
        self.reports.in_journal = dict(seen.unseen)
        for step in range(seen.steps, (known or [-1])[-1] + 1):
            self.reports.mark_committed(step)
            self.recorder.record_step(step, self.reports.take_reports(step))
        return seen.steps

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            report = {"loss": 1 / (step + 1), "norm": 2.0 + step, "count": 8.0, "skipped": False, "seconds": 0.5}
            report |= {"busy_seconds": 0.4, "peak_rss_bytes": 9, "mirror_seconds": 0.0, "digest": None, "spans": []}
            self.reports.keep_step_reports(1, step, dict.fromkeys((0, 1), report))
            self.reports.mark_committed(step)
            self.journal.commit(step, {"time": 1000.0 + step, **self.reports.merged_report(step)})
            self.recorder.record_step(step, self.reports.take_reports(step))
            if (step + 1) % 10 == 0:
                self.recorder.record_validation(step + 1, [{"losses": {0: (3.0 + step, 1.0)}, "seconds": 0.1}])

    def end(self) -> None:
        self.recorder.record_end(Teardown("done", "all steps are done", END, None), None)

    def warnings(self) -> list[str]:
        return [event.text for event in self.recorder.new_events() if isinstance(event, RunWarning)]


def check(folder, last=END) -> None:
    """Every line is JSON, every step there once, in order, with its loss."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["norm"]) for line in lines if "loss" in line] == [
        (step, 1 / step, 1.0 + step) for step in range(1, last + 1)
    ]
    assert [(line["step"], line["validation_loss"]) for line in lines if "validation_loss" in line] == [
        (done, 2.0 + done) for done in range(10, last + 1, 10)
    ]
    assert lines == sorted(lines, key=jsonl_line_sort_key)
    assert not list(folder.glob("*.tmp")) and not list(folder.glob(".*.tmp"))


def torn(file) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def another_runs(file) -> None:
    lines = [{**json.loads(line), "loss": 7.5} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines * 2))


def longer_run(file) -> None:
    line = json.loads(file.read_text().splitlines()[-1])
    with file.open("a") as out:
        out.writelines(json.dumps({**line, "step": step}) + "\n" for step in range(DONE + 1, 200))


def lines_changed(change):
    def damage(file) -> None:
        file.write_text("".join(line + "\n" for line in change(file.read_text().splitlines())))

    return damage


def replaced_by(make):
    def damage(file) -> None:
        file.unlink()
        make(file)

    return damage


def link_to_elsewhere(file) -> None:
    elsewhere = file.parent / "elsewhere"
    elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(elsewhere)


DAMAGES = {
    "nothing": lambda file: None,
    "a last line that is torn": torn,
    "cut in the middle of a line": lambda file: os.truncate(file, file.stat().st_size // 2 + 7),
    "emptied": lambda file: os.truncate(file, 0),
    "deleted": lambda file: file.unlink(),
    "a folder in its place": replaced_by(lambda file: (file / "sub").mkdir(parents=True)),
    "a pipe in its place": replaced_by(os.mkfifo),
    "a link to nowhere": replaced_by(lambda file: file.symlink_to("/nowhere/at/all")),
    "a link to a device": replaced_by(lambda file: file.symlink_to("/dev/full")),
    "a link to a file like it": link_to_elsewhere,
    "a terabyte of zeros": lambda file: os.truncate(file, 1 << 40),
    "a line of 2 MiB": lambda file: file.write_bytes(b"x" * (2 << 20) + b"\n" + file.read_bytes()),
    "100,000 brackets": lambda file: file.write_bytes(b"[" * 100_000 + b"]" * 100_000 + b"\n" + file.read_bytes()),
    "brackets that are not closed": lambda file: file.write_bytes(file.read_bytes() + b"\xff{{{[" * 99),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "garbage behind it": lambda file: file.write_bytes(file.read_bytes() + b"\xff\xfe\x00{{{" * 9),
    "zeros, as after a crash of the machine": lambda file: file.write_bytes(file.read_bytes()[:3000] + bytes(4096)),
    "JSON of something else": lambda file: file.write_text('3\nnull\n[]\n"x"\n{}\n{"step": "1"}\n{"step": 1, "loss": {}}\n'),
    "another text": lambda file: file.write_text("# Notes\nnothing of ours\n"),
    "lines out of order": lines_changed(lambda lines: lines[20:] + lines[:20]),
    "lines backwards": lines_changed(lambda lines: lines[::-1]),
    "steps twice": lines_changed(lambda lines: lines + lines[5:15]),
    "lines in the middle gone": lines_changed(lambda lines: lines[:10] + lines[-2:]),
    "the first lines gone": lines_changed(lambda lines: lines[-3:]),
    "the last lines gone": lines_changed(lambda lines: lines[:-5]),
    "another run's": another_runs,
    "a longer run's behind it": longer_run,
    "no line break at the end": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "the same length, other bytes": lambda file: file.write_bytes(b"x" * file.stat().st_size),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_driver_that_finds_the_file_damaged_goes_on_and_every_step_is_there_once(damage, tmp_path):
    Driver(tmp_path).steps(0, DONE)
    DAMAGES[damage](tmp_path / "metrics.jsonl")
    driver = Driver(tmp_path)
    assert DONE - 2 <= driver.take_over() <= DONE, "all but the last two have been seen for certain"
    driver.steps(DONE, END)
    driver.end()
    check(tmp_path)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_under_a_driver_is_written_again(damage, tmp_path):
    driver = Driver(tmp_path)
    driver.steps(0, DONE)
    DAMAGES[damage](tmp_path / "metrics.jsonl")
    driver.steps(DONE, END)
    driver.end()
    check(tmp_path)
    harmless = damage in ("nothing", "the same length, other bytes")
    assert any("shortened, replaced or removed" in text for text in driver.warnings()) != (harmless and damage == "nothing")


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_the_events_ends_nothing(damage, alive, tmp_path):
    driver = Driver(tmp_path)
    driver.recorder.note(parse_event({"kind": "started"}))
    for worker in range(DONE):
        driver.recorder.note(parse_event({"kind": "lost", "worker": worker, "step": worker + 1, "loss": 1.0}))
    DAMAGES[damage](tmp_path / "events.jsonl")
    if not alive:
        driver = Driver(tmp_path)
        driver.take_over()
    driver.recorder.note(parse_event({"kind": "driver"}))
    driver.end()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events[-2:]] == ["driver", "end"]
    lost = [event["worker"] for event in events if event["kind"] == "lost"]
    assert lost == [*range(DONE)] if alive else sorted(set(lost)) == [*range(DONE)]


@pytest.mark.parametrize("alive", [False, True])
def test_a_link_in_the_place_of_the_file_is_neither_read_nor_written_through(alive, tmp_path):
    driver = Driver(tmp_path)
    driver.steps(0, DONE)
    link_to_elsewhere(tmp_path / "metrics.jsonl")
    before = (tmp_path / "elsewhere").read_bytes()
    assert read_lines_file(tmp_path / "metrics.jsonl") is None
    if not alive:
        driver = Driver(tmp_path)
        driver.take_over()
    driver.steps(DONE, END)
    driver.end()
    check(tmp_path)
    assert (tmp_path / "elsewhere").read_bytes() == before and not (tmp_path / "metrics.jsonl").is_symlink()
    assert (tmp_path / "metrics.jsonl.damaged").is_symlink(), "it is kept aside"


def test_a_validation_that_was_not_finite_and_steps_that_lack_what_is_printed_are_told_again(tmp_path):
    """`count` and `bubble` of a line may be gone; the client prints them."""
    driver = Driver(tmp_path)
    driver.steps(0, 1)
    driver.recorder.record_validation(1, [{"losses": {0: (math.nan, 1.0)}, "seconds": 0.1}])
    driver.journal.erase()
    line, validation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    del line["count"], line["bubble"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(validation) + "\n")
    driver = Driver(tmp_path)
    driver.journal.commit(0, {"loss": line["loss"], "norm": line["norm"]})
    driver.take_over()
    said = StringIO()
    console = EventPrinter(steps=4, out=said)
    for event in driver.recorder.new_events():
        console(event)
    assert "step 1/4" in said.getvalue() and "step 1: validation loss nan" in said.getvalue()


@pytest.mark.parametrize("steps", [1, 3, 4, 7, BLOCK_LINES, 3 * BLOCK_LINES + 1])
def test_lines_of_a_full_disk_outlive_the_driver(steps, full, keys, tmp_path):
    """It ended with a KeyError where the disk had been full for more than three steps."""
    first = Driver(tmp_path)
    first.steps(0, 20)
    full.now = True
    first.steps(20, 20 + steps)
    first.recorder.note(parse_event({"kind": "lost", "worker": 3}))
    assert sum("cannot be written" in text for text in first.warnings()) == 2, "once for each file"
    for _ in range(2):  # it is killed, and the next one as well, and the disk is still full
        driver = Driver(tmp_path, last=END + steps)
        assert driver.take_over() == 20 + steps
        assert not any("lacked" in text or "no lines" in text for text in driver.warnings())
    full.now = False
    driver.steps(20 + steps, END + steps)
    driver.end()
    check(tmp_path, END + steps)
    events = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events == ["lost", "end"] and not [key for key in keys if "/lines/metrics" in key]


def test_a_file_that_is_removed_while_the_disk_is_full_comes_back_whole(full, tmp_path):
    Driver(tmp_path).steps(0, 10)
    driver = Driver(tmp_path)
    driver.take_over()
    full.now = True
    driver.steps(10, 20)
    (tmp_path / "metrics.jsonl").unlink()
    driver.steps(20, 30)
    driver = Driver(tmp_path)
    driver.take_over()
    full.now = False
    driver.steps(30, END)
    driver.end()
    check(tmp_path)


def test_steps_that_nobody_knows_any_more_are_named_in_one_line_and_the_run_goes_on(tmp_path):
    Driver(tmp_path, last=KEPT_STEPS + STEPS_IN_BLOCK + 60).steps(0, KEPT_STEPS + STEPS_IN_BLOCK + 50)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[11:13]))
    driver = Driver(tmp_path, last=KEPT_STEPS + STEPS_IN_BLOCK + 60)
    assert driver.take_over() >= KEPT_STEPS + STEPS_IN_BLOCK + 48
    gaps = [text for text in driver.warnings() if "has no lines of" in text]
    assert len(gaps) == 1 and "steps 1-10, 13-100 any more" in gaps[0] and "cure: " in gaps[0]
    driver.steps(KEPT_STEPS + STEPS_IN_BLOCK + 50, KEPT_STEPS + STEPS_IN_BLOCK + 60)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == [11, 12, *range(101, KEPT_STEPS + STEPS_IN_BLOCK + 61)]
    assert "has no lines of steps 1-10" in (tmp_path / "events.jsonl").read_text()


def test_the_journal_knows_so_many_steps_and_no_more(keys, tmp_path):
    steps = KEPT_STEPS + STEPS_IN_BLOCK + 50
    Driver(tmp_path, last=steps).steps(0, steps)
    kept = sorted(int(key.split("/")[-1]) for key in keys if "/step/" in key)
    assert kept == list(range(STEPS_IN_BLOCK, steps)) and len(kept) >= KEPT_STEPS
    assert len([key for key in keys if "/validation/" in key]) <= KEPT_STEPS / 10 + 1
    assert not [key for key in keys if "/lines/" in key], "nothing while the disk has room"


def test_the_journal_knows_so_many_events_and_no_more(keys, tmp_path):
    for _ in range(3):
        driver = Driver(tmp_path)
        driver.take_over()
        for worker in range(MIRRORED_LINES):
            driver.recorder.note(parse_event({"kind": "lost", "worker": worker}))
        blocks = [key for key in keys if "/lines/events" in key]
        assert MIRRORED_LINES / BLOCK_LINES <= len(blocks) <= MIRRORED_LINES / BLOCK_LINES + 2
    (tmp_path / "events.jsonl").unlink()
    assert len(Driver(tmp_path).recorder.events.open()) >= MIRRORED_LINES


def test_a_run_that_was_resumed_keeps_the_lines_of_before(tmp_path):
    Driver(tmp_path).steps(0, 30)
    for key in (store.kv_list)(""):
        store.kv_delete(key.decode())
    driver = Driver(tmp_path, first=30)
    driver.steps(30, DONE)
    DAMAGES["deleted"](tmp_path / "metrics.jsonl")
    driver.steps(DONE, DONE + 1)
    driver = Driver(tmp_path, first=30)
    assert driver.take_over() == DONE + 1
    driver.steps(DONE + 1, END)
    driver.end()
    check(tmp_path)


def test_memory_for_lines_is_bounded_and_what_did_not_fit_is_said(full, keys, tmp_path):
    said = []
    file = JsonlFile(tmp_path / "metrics.jsonl", lambda kind, text: said.append(text), Journal("tiny"), kept_bytes=20_000)
    lines = [{"step": n, "validation_loss": 0.5, "text": "x" * 50} for n in range(1, 501)]
    file.append(lines[0])
    full.now = True
    for line in lines[1:]:
        file.append(line)
    assert file.recent.size <= 20_000
    kept = sum(len(value) for key, value in keys.items() if "/lines/" in key)
    assert kept <= 20_000 + BLOCK_LINES * 100, "nor is the journal's memory without bounds"
    full.now = False
    file.append({"step": 501, "validation_loss": 0.5})
    steps = [line["step"] for line in parse_jsonl_lines("metrics.jsonl", (tmp_path / "metrics.jsonl").read_bytes())]
    assert steps[0] == 1 and steps[1:] == [*range(502 - len(steps[1:]), 502)] and len(steps) + file.lost == 501
    assert len(said) == 3 and "the oldest are dropped" in said[1] and f"{file.lost} lines are lost" in said[2]


def test_older_lines_than_those_in_memory_stay_in_the_file_when_it_is_written_again(tmp_path):
    file = JsonlFile(tmp_path / "metrics.jsonl", lambda kind, text: None, kept_bytes=2_000)
    for step in range(1, 201):
        file.append({"step": step, "validation_loss": 0.5})
    assert file.recent.trimmed and len(file.recent) < 100
    os.truncate(file.path, file.path.stat().st_size - 100)
    file.append({"step": 201, "validation_loss": 0.5})
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [*range(1, 202)]


def test_a_driver_that_wakes_after_its_successor_has_written_removes_nothing(tmp_path):
    old = Driver(tmp_path)
    old.steps(0, 20)
    new = Driver(tmp_path)
    new.take_over()
    new.steps(20, END)
    new.recorder.note(parse_event({"kind": "driver"}))
    old.recorder.note(parse_event({"kind": "note", "text": "it has slept"}))
    old.recorder.record_step(19, {0: {**new.journal.step_report(19), "spans": [], "ledger": {}}})
    new.end()
    check(tmp_path)
    assert '"driver"' in (tmp_path / "events.jsonl").read_text()


def test_a_run_folder_that_is_removed_costs_lines_and_not_the_run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    driver = Driver(folder)
    driver.steps(0, 20)
    shutil.rmtree(folder)
    driver.steps(20, 30)
    assert sum("put the run folder back" in text for text in driver.warnings()) == 1
    folder.mkdir()
    driver.steps(30, END)
    driver.end()
    check(folder)


def test_what_the_disk_still_does_not_take_at_the_end_is_said(full, tmp_path):
    driver = Driver(tmp_path)
    driver.steps(0, DONE)
    full.now = True
    driver.steps(DONE, END)
    driver.end()
    assert sum(f"has no lines of steps {DONE + 1}-{END} any more" in text for text in driver.warnings()) == 1
    check(tmp_path, DONE)


@pytest.mark.parametrize("damage", DAMAGES)
def test_readers_take_what_is_whole(damage, tmp_path):
    """`raypar status`, `raypar resume` and early stopping read the same file."""
    Driver(tmp_path).steps(0, DONE)
    DAMAGES[damage](tmp_path / "metrics.jsonl")
    folder = RunFolder(tmp_path)
    if damage == "a terabyte of zeros":
        with pytest.raises(ConfigError, match="more than the 4,294,967,296 that are read"):
            list(folder.read_lines(folder.metrics))
        return
    places = [jsonl_line_sort_key(line) for line in folder.read_lines(folder.metrics)]
    assert places == sorted(set(places))


def test_spans_are_short():
    assert format_step_ranges([4]) == "step 4" and format_step_ranges([1, 2, 3, 7, 9, 10]) == "steps 1-3, 7, 9-10"


def test_a_step_whose_loss_was_not_finite_is_told_again_as_it_was(tmp_path):
    """Its line has null, which nobody can print as a number."""
    driver = Driver(tmp_path)
    driver.steps(0, 3)
    report = {"loss": math.nan, "norm": math.inf, "count": 8.0, "skipped": True, "seconds": 0.5, "busy_seconds": 0.4}
    driver.reports._open[3] = {0: {**report, "peak_rss_bytes": 9, "spans": []}}
    driver.reports.mark_committed(3)
    driver.journal.commit(3, {"time": 1003.0, **driver.reports.merged_report(3)})
    driver.recorder.record_step(3, driver.reports.take_reports(3))
    driver = Driver(tmp_path)
    driver.take_over()
    said = StringIO()
    console = EventPrinter(steps=4, out=said)
    for event in driver.recorder.new_events():
        console(event)
    assert "step 4/4  loss nan" in said.getvalue()


def test_a_value_that_the_learning_rates_follow_is_in_the_store_before_anyone_sees_the_validation():
    """So a new driver has it for the next step's call, which every worker gets with it."""
    journal, posted, sent = Journal("tiny"), [], []
    machine = RunMachine(RunPolicy(workers=2, job_steps=END), plan=PLAN)
    reports = StepReports(machine, SimpleNamespace(), None, FollowedMetric("validation_loss", 10))
    worker = SimpleNamespace(step=SimpleNamespace(remote=lambda call: sent.append(StepCall.from_bytes(call).validated)))
    actions = StepActions(
        machine,
        SimpleNamespace(call_all=lambda call, keep, by_agent: call(worker)),
        reports,
        journal,
        SimpleNamespace(
            request=SimpleNamespace(validation_batching=None),
            record_validation=lambda done, found: (Journal("tiny").validated(), 0),
        ),
        SimpleNamespace(perform=lambda call, event: posted.append(call()[0])),
        SimpleNamespace(post=posted.append),
        SimpleNamespace(),
        SimpleNamespace(),
        (),
    )
    for done, loss in ((10, 1.0), (20, 3.0)):
        reports.validations = {0: {"losses": {0: (loss, 2.0)}}}
        actions.emit_validation(EmitValidation(done), "")
    assert posted == [{10: 0.5}, {10: 0.5, 20: 1.5}]
    for step in (9, 10, 11, 20):
        actions.run_step(RunStep(step, False), "")
    assert sent == [None, 0.5, None, 1.5]
    actions.run_step(RunStep(30, False), "")
    assert len(sent) == 4 and "after 30 steps was lost with a driver" in str(posted[-1].error)


def test_a_validation_that_is_run_again_gives_the_learning_rates_its_value_and_nobody_sees_it_twice():
    """A driver that takes over in between must not go on with the value of wrong state: it has none, which ends the run."""
    journal, told = Journal("tiny"), []
    machine = RunMachine(RunPolicy(workers=2, job_steps=END), plan=PLAN)
    reports = StepReports(machine, SimpleNamespace(), None, FollowedMetric("validation_loss", 10))
    actions = StepActions(
        machine,
        SimpleNamespace(),
        reports,
        journal,
        SimpleNamespace(request=SimpleNamespace(validation_batching=None)),  # it cannot record a validation
        SimpleNamespace(
            perform=lambda call, event: event(call()), note=lambda event: told.append(event.text), after_telling_client=id
        ),
        SimpleNamespace(),
        SimpleNamespace(),
        SimpleNamespace(),
        (),
    )
    reports.followed.values.update({10: 0.5, 20: 1.5, 30: 2.5})
    actions.forget_validations(ForgetValidations(20), "")
    assert reports.followed.values == journal.validated() == {10: 0.5}
    for done, loss in ((20, 3.0), (30, 4.0)):
        reports.validations = {0: {"losses": {0: (loss, 2.0)}}}
        actions.emit_validation(EmitValidation(done, again=True), "")
    assert reports.followed.values == journal.validated() == {10: 0.5, 20: 1.5, 30: 2.0}
    assert told == ["validation_loss after 30 steps: 2.5 was seen, 2.0 is right and used from now on"]


def test_a_driver_that_was_replaced_commits_nothing_more_than_the_steps_of_a_quarter_of_a_second(monkeypatch, keys):
    """A look at the store for every step was a tenth of a driver's processor time at 20 steps a second."""
    now, looks = [1000.0], []
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(store, "kv_get", lambda key: looks.append(key) or keys.get(key))
    old, new = Journal("r"), Journal("r")
    for step in range(10):
        old.commit(step)
        now[0] += 0.05
    assert len(looks) == 2, "every 0.25 s"
    assert old.claim(2)
    old.commit(10)
    now[0] += store.CLAIM_CHECK_S
    old.commit(11)  # its own claim is none of another's
    assert new.claim(3)
    old.commit(12)
    now[0] += store.CLAIM_CHECK_S
    with pytest.raises(DriverReplaced, match="another driver of this run has claimed generation 3"):
        old.commit(13)
    with pytest.raises(DriverReplaced):
        old.commit(13)
    assert not old.claim(3) and old.committed_steps() == list(range(13))


def test_a_driver_that_was_replaced_overwrites_no_value_that_learning_rates_follow(keys):
    """It was stopped in a validation; its successor has validated twice when it goes on, and is lost."""
    old, new = Journal("r"), Journal("r")
    assert old.claim(1) and new.claim(2)
    assert new.validated() == {}
    old.store_validated({10: 0.5})
    assert new.validated() == {10: 0.5}, "a successor that has stored none goes on with those of its predecessor"
    new.store_validated({10: 0.5, 20: 1.5})
    assert [key for key in keys if "validated" in key] == ["raypar/r/validated/2"]
    old.store_validated({10: 0.5})
    assert Journal("r").validated() == {10: 0.5, 20: 1.5}
    new.store_validated({})  # all are run again
    assert Journal("r").validated() == {}


def test_a_driver_that_was_replaced_tells_nobody_of_a_validation_and_calls_for_no_step_after_it():
    """What it has stored before its successor's claim is read after that claim, so that the two agree."""
    (driver, new), made = (Journal("tiny"), Journal("tiny")), []
    machine, followed = RunMachine(RunPolicy(workers=2, job_steps=END), plan=PLAN), FollowedMetric("validation_loss", 10)
    reports, request = StepReports(machine, None, None, followed), SimpleNamespace(validation_batching=None)
    recorder = SimpleNamespace(request=request, record_validation=lambda *_: made.append("line"))
    side_effects = SimpleNamespace(perform=lambda call, event: made.append(call))
    actions = StepActions(machine, None, reports, driver, recorder, side_effects, None, None, None, ())
    reports.validations = {0: {"losses": {0: (1.0, 2.0)}}}
    assert driver.claim(1)
    actions.emit_validation(EmitValidation(10), "")
    assert new.claim(2)
    with pytest.raises(DriverReplaced):
        made.pop()()
    assert made == [] and new.validated() == {10: 0.5}


def test_a_new_driver_reads_the_values_that_learning_rates_follow_once_it_has_claimed_its_first_generation():
    """Until then its predecessor may store more. Later its own are newer than those in the store, which it may be changing."""
    old, new, posted = Journal("tiny"), Journal("tiny"), []
    assert old.claim(1)
    old.store_validated({10: 0.5})
    followed = FollowedMetric("validation_loss", 10)
    change = GenerationChange.__new__(GenerationChange)
    change.journal, change.reports = new, SimpleNamespace(followed=followed)
    change.tasks = SimpleNamespace(post=lambda event: posted.append((event, dict(followed.values))))
    asyncio.run(change._claim_generation(2))
    followed.values.clear()
    asyncio.run(change._claim_generation(3))
    assert posted == [(GenerationClaimed(2, True), {10: 0.5}), (GenerationClaimed(3, True), {})]
