"""What a client tells of a driver's events: each event once, even if the driver is restarted. Ctrl-C reaches every driver."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnschedulableError, RayActorError

from raypar.actors import driver_client
from raypar.actors.driver_client import RunFollower
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import OutOfMemory, WorkerLost
from raypar.record.events import Event

END = {"kind": "end", "end": "done", "why": "all steps are done", "done": 3, "error": None}


def step(number: int) -> dict:
    return {"kind": "step", "step": number, "loss": 1.0, "seconds": 1.0, "samples_per_s": 8.0}


class Driver:
    """Answers polls with `answers`, in order; an exception stands for its death."""

    def __init__(self, *answers: list[dict] | Exception) -> None:
        self.answers, self.stops, self.starts = list(answers), [], 0
        self.events = SimpleNamespace(remote=lambda *given: "events")
        self.start = SimpleNamespace(remote=self._start)
        self.stop = SimpleNamespace(remote=lambda *given: self.stops.append(given[0]))

    def _start(self, request: object) -> str:
        self.starts += 1
        return "start"

    def get(self, call: str) -> object:
        answer = self.answers.pop(0) if call == "events" else None
        if isinstance(answer, Exception):
            raise answer
        return (answer, 1, 1) if call == "events" else None


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch):
    """Follows a driver to its end: (how it ended, the events told)."""

    def followed(driver: Driver, *asked: str, elastic: bool = True, tell=None):
        fake = SimpleNamespace(wait=lambda calls, timeout: (calls, []), get=driver.get)
        monkeypatch.setattr(driver_client, "ray", fake)
        monkeypatch.setattr(driver_client.time, "sleep", lambda seconds: None)
        told: list[Event] = []
        request = SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, elastic=elastic), folder="/r/tiny", storage="")
        end = RunFollower(driver, request, tell or told.append, list(asked)).follow()
        return end, told

    return followed


def test_a_restarted_driver_sends_events_again_and_each_is_told_once(follow):
    validation, checkpoint = (
        {"kind": "validation", "step": 2, "validation_loss": 1.0},
        {"kind": "checkpoint", "step": 2, "path": "c"},
    )
    before = [step(1), step(2), validation, checkpoint]
    driver = Driver(before, RayActorError(), [*before, {"kind": "note"}, step(3), END])
    end, told = follow(driver)
    assert [event.facts() for event in told] == [*before, {"kind": "note"}, step(3)]
    assert (end.end, end.done, driver.starts) == ("done", 3, 1)


def test_a_driver_that_died_before_it_began_gets_its_request_again(follow):
    driver = Driver(RayActorError(), [END])
    follow(driver)
    assert driver.starts == 2


def test_a_lost_driver_ends_a_run_that_is_not_elastic(follow):
    with pytest.raises(WorkerLost, match="the driver was lost"):
        follow(Driver(RayActorError()), elastic=False)


def test_a_driver_whose_node_ray_has_given_up_is_lost(follow):
    """The driver's machine was cut off for 45 s; the command ended with a traceback of Ray."""
    with pytest.raises(WorkerLost, match="the driver was lost") as raised:
        follow(Driver([step(1)], ActorUnschedulableError("the node does not exist any more")))
    assert "raypar resume" in raised.value.cure


def test_the_loss_of_a_driver_is_told_before_anything_is_removed(follow):
    """Without its control store Ray ended the command while that removed the run: its last lines were Ray's stack traces."""
    told = []
    with pytest.raises(WorkerLost) as raised:
        follow(Driver([step(1)], RayActorError()), elastic=False, tell=told.append)
    assert told[-1].kind == "warning"
    assert raised.value.what in told[-1].text and "raypar resume" in told[-1].text


def test_ctrl_c_is_passed_on_to_every_driver_once(follow):
    driver = Driver([step(1)], [step(2)], RayActorError(), [step(3)], [END])
    _, told = follow(driver, "Ctrl-C")
    assert driver.stops == ["Ctrl-C", "Ctrl-C"]
    assert [event.kind for event in told] == ["step", "stopping", "step", "step", "stopping"]


def test_a_second_ctrl_c_ends_the_run_at_once(follow):
    end, _ = follow(Driver([step(1)]), "Ctrl-C", "Ctrl-C")
    assert (end.end, end.why) == ("interrupted", "Ctrl-C again: ended without waiting")


def test_a_driver_that_dies_again_and_again_in_the_same_step_ends_the_run_and_one_that_gets_on_does_not(follow):
    """A callback ended its process: Ray started 33 drivers in three minutes, and a Ctrl-C ended none of it."""
    with pytest.raises(
        WorkerLost, match=r"the driver was lost: its process has died 4 times in a row without reporting step 3"
    ) as raised:
        follow(Driver([step(1), step(2)], *[RayActorError(), [{"kind": "driver"}, step(2)]] * 99), "Ctrl-C")
    assert "callbacks" in raised.value.cure and "begin the run anew" in raised.value.cure
    end, _ = follow(Driver([step(1)], *(a for n in range(2, 50) for a in (RayActorError(), [step(n)])), [END]))
    assert end.end == "done"


def test_a_terminal_that_is_gone_does_not_keep_the_driver_from_saving(follow):
    def gone(event: Event) -> None:
        raise OSError("the terminal is gone")

    end, _ = follow(Driver([step(1)], [END]), "SIGHUP", tell=gone)
    assert end.end == "done"
    with pytest.raises(OSError, match="the terminal is gone"):
        follow(Driver([step(1)], [END]), tell=gone)


def test_a_driver_whose_process_has_not_begun_is_not_waited_for_after_a_signal(monkeypatch):
    """It was waited for up to half a minute, to be told to save what was not there."""
    driver, asked = Driver([]), []

    def never(calls, timeout):
        asked.append("SIGTERM")
        return [], calls

    monkeypatch.setattr(driver_client, "ray", SimpleNamespace(wait=never, get=driver.get))
    request = SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, steps_before_run=7, elastic=True))
    end = RunFollower(driver, request, lambda event: None, asked).follow()
    assert (end.end, end.why, end.done, driver.stops) == ("interrupted", "SIGTERM", 7, [])


@pytest.mark.parametrize("short_at, waited_s", [((1, 2), 40), ((1, 3, 4), 80), ((), None)])
def test_a_driver_that_does_not_begin_on_a_node_without_memory_is_not_waited_for_until_the_end(short_at, waited_s, monkeypatch):
    """Ray killed every one as it started; after six minutes it was said that the driver does not answer."""
    now_s, looks, told = [0.0], [], []

    def never(calls, timeout):
        now_s[0] += timeout
        return [], calls

    def shortage():
        looks.append(now_s[0])
        return "23 of 24 GB are in use" if len(looks) in short_at else ""

    monkeypatch.setattr(driver_client, "ray", SimpleNamespace(wait=never, get=None))
    monkeypatch.setattr(driver_client, "kill_actor", lambda handle, *, no_restart: None)
    monkeypatch.setattr(driver_client, "memory_shortage_here", shortage)
    request = SimpleNamespace(policy=RunPolicy(workers=2, job_steps=9, elastic=True))
    follower = RunFollower(Driver([]), request, told.append, [])
    if waited_s is None:
        with pytest.raises(WorkerLost, match="the driver does not answer for 300 s, nor another one 60 s later"):
            follower.follow()
        return
    end = follower.follow()
    assert end.end == "failed" and isinstance(end.error, OutOfMemory)
    assert end.why.startswith(f"no process of the driver has begun within {waited_s} s: 23 of 24 GB are in use, on this node")
    assert now_s[0] == pytest.approx(waited_s, abs=2.0)
