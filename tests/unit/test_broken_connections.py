"""The network to a worker breaks and comes back: what Ray says of that is no death, and no worker is given up for it."""

import asyncio
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raypar.actors import answer_batch, worker_calls
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.worker_calls import AnswerLost, WorkerCalls
from raypar.actors.worker_failures import WorkerFailures
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic.events import CallFailed, GroupsAborted, Tick
from raypar.elastic.run_policy import RunPolicy
from raypar.plan import ParallelPlan

BROKEN = ActorUnavailableError("The actor is temporarily unavailable: recvmsg:Connection reset by peer", None)


class Scene:
    """Calls to worker 0 of generation 2, with what they post."""

    def __init__(self, *answers) -> None:
        self.answers, self.posted = list(answers), []
        self.membership = SimpleNamespace(members=(0,), plan=None, generation=2)
        self.pool = SimpleNamespace(workers={0: SimpleNamespace(ping=SimpleNamespace(remote=self.answer))})
        machine = SimpleNamespace(membership=self.membership, policy=RunPolicy(workers=1, job_steps=9, elastic=True))
        failures = WorkerFailures(machine, None, self.posted.append)
        self.calls = WorkerCalls(machine, self.pool, failures, BackgroundTasks(self.posted.append), {0})

    async def answer(self):
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def until_posted(self):
        for _ in range(200):
            if self.posted:
                return
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("error, kind, generation", [(BROKEN, "aborted", 2), (ActorDiedError(), "lost", None)])
def test_a_call_whose_connection_broke_is_aborted_and_only_the_call_of_a_dead_worker_says_that_it_is_lost(
    error, kind, generation
):
    """After a partition of the driver's node all workers, alive and well, were given up with the only copies of the state."""

    async def run():
        scene = Scene(error)
        scene.calls.post_answer(0, 2, scene.answer(), lambda number, answer: Tick())
        await scene.until_posted()
        (found,) = scene.posted
        assert isinstance(found, CallFailed) and (found.kind, found.worker, found.generation) == (kind, 0, generation)
        assert isinstance(found.error, AnswerLost) == (kind == "aborted")

    asyncio.run(run())


@pytest.mark.parametrize("left_behind", [False, True])
def test_where_a_worker_stands_is_asked_again_until_it_answers_or_the_generation_is_over(monkeypatch, left_behind):
    monkeypatch.setattr(worker_calls, "REPEAT_CALL_S", 0.01)

    async def run():
        scene = Scene(BROKEN, BROKEN, "its status")
        scene.calls.call_until_answered(0, 2, scene.answer, lambda number, answer: (number, answer))
        if left_behind:
            scene.membership.generation = 3
        await scene.until_posted()
        if left_behind:
            assert scene.posted[0].kind == "aborted" and len(scene.answers) == 2
        else:
            assert scene.posted == [(0, "its status")]

    asyncio.run(run())


class Refs:
    """Calls as `ray.wait` and `ray.get` see them: a value, an exception, or None as long as there is no answer."""

    def __init__(self, monkeypatch) -> None:
        self.answers: dict[str, object] = {}
        monkeypatch.setattr(answer_batch.ray, "wait", self.wait)
        monkeypatch.setattr(answer_batch.ray, "get", self.get)

    def wait(self, refs, num_returns, timeout):
        assert num_returns == len(refs) and timeout == answer_batch.BATCH_WAIT_S
        there = [ref for ref in refs if self.answers[ref.name] is not None]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref):
        found = [self.get(one) for one in ref] if isinstance(ref, list) else self.answers[ref.name]
        if isinstance(found, Exception):
            raise found
        return found


class Ref:
    """One call, which a task may await too."""

    def __init__(self, name) -> None:
        self.name, self.late = name, asyncio.get_running_loop().create_future()

    def __await__(self):
        return self.late.__await__()


def test_the_answers_of_all_members_come_together_and_a_late_or_failed_one_keeps_none_of_the_others_back(monkeypatch):
    """Awaiting each by itself cost the driver a quarter of its processor time: it was woken for every worker."""
    refs = Refs(monkeypatch)

    async def run(*answers):
        scene = Scene()
        scene.membership.members = (4, 5, 6)
        asked = {number: Ref(number) for number in (4, 5, 6)}
        refs.answers = dict(zip(asked, answers, strict=True))
        scene.pool.workers = asked
        scene.calls.call_all(lambda ref: ref, dict)
        await asyncio.sleep(0)
        assert scene.calls.unanswered == {4, 5, 6}
        await scene.until_posted()
        return scene, asked, scene.posted

    async def all_there():
        scene, _, posted = await run("a", "b", "c")
        assert posted == [{4: "a", 5: "b", 6: "c"}] and scene.calls.unanswered == set()

    async def one_is_late():
        scene, asked, posted = await run("a", None, "c")
        assert posted == [{4: "a", 6: "c"}]
        await asyncio.sleep(0)
        assert scene.calls.unanswered == {5}
        asked[5].late.set_result(None)
        await asyncio.sleep(0.01)
        assert posted[1:] == [{5: None}] and scene.calls.unanswered == set()

    async def one_fails():
        _, _, posted = await run("a", "b", ActorDiedError())
        assert posted[0] == {4: "a", 5: "b"}
        assert (posted[1].kind, posted[1].worker) == ("lost", 6) and "worker 6 was lost" in posted[1].error.what

    for case in (all_there, one_is_late, one_fails):
        asyncio.run(case())


def test_a_call_of_all_members_when_none_is_left_ends_nothing():
    """`ray.wait` raises for an empty list, which would have ended the run as a fault of the driver."""

    async def run():
        scene = Scene()
        scene.pool.workers = {}
        scene.calls.call_all(lambda worker: worker, dict)
        await asyncio.sleep(0.05)
        assert scene.posted == []

    asyncio.run(run())


def registry_of(workers, posted):
    """Pings `workers` (number -> what its ping returns); appends what it posts to `posted`."""
    handles = {number: SimpleNamespace(ping=SimpleNamespace(remote=answer)) for number, answer in workers.items()}
    seats = SimpleNamespace(plan=ParallelPlan.mesh(dp=2, layers=1), members=(0, 1))
    machine = SimpleNamespace(membership=seats, policy=RunPolicy(workers=2, job_steps=9))
    failures, pool = WorkerFailures(machine, None, posted.append), SimpleNamespace(workers=handles)
    return WorkerRegistry(pool, None, posted.append, None, lambda number: True, failures), handles


def test_a_ping_whose_connection_broke_is_silence_and_one_that_cannot_be_sent_keeps_none_of_the_others_back(monkeypatch):
    refs = Refs(monkeypatch)

    async def run():
        posted = []
        registry, handles = registry_of({0: lambda: Ref(0), 1: lambda: Ref(1), 2: lambda: 1 / 0}, posted)
        refs.answers = {0: BROKEN, 1: (3, "in step 3", False, 0.0, None)}
        await registry._ping(handles)
        assert posted == [] and set(registry._answered_s) == {1} and not registry._unanswered_pings
        refs.answers[0] = ActorDiedError()
        await registry._ping(handles)
        (event,) = posted
        assert (event.kind, event.worker) == ("lost", 0)
        assert "worker 0 (stage 0, replica 0) was lost" in str(event.error), "as the error of a call, which may come later"
        assert "`elastic: true`" in event.error.cure

    asyncio.run(run())


def test_a_worker_that_is_late_is_not_pinged_again_meanwhile_and_keeps_none_of_the_others_back(monkeypatch):
    refs = Refs(monkeypatch)

    async def run():
        posted, answer = [], Future()
        late = Ref(1)
        late.future = lambda: answer
        registry, handles = registry_of({0: lambda: Ref(0), 1: lambda: late}, posted)
        refs.answers = {0: (3, "in step 3", False, 0.0, None), 1: None}
        pinging = asyncio.ensure_future(registry._ping(handles))
        await asyncio.sleep(0.05)
        assert set(registry._answered_s) == {0} and registry._unanswered_pings == {1} and not pinging.done()
        answer.set_result((3, "in step 3", True, 0.0, None))
        registry.note = lambda kind, **facts: None
        await pinging
        assert set(registry._answered_s) == {0, 1} and not registry._unanswered_pings
        assert [type(event).__name__ for event in posted] == ["DrainRequested"]

    asyncio.run(run())


def test_the_late_answer_of_a_worker_that_was_dismissed_meanwhile_counts_for_nothing(monkeypatch):
    refs = Refs(monkeypatch)

    async def run():
        posted, answer = [], Future()
        late = Ref(0)
        late.future = lambda: answer
        registry, handles = registry_of({0: lambda: late}, posted)
        refs.answers = {0: None}
        pinging = asyncio.ensure_future(registry._ping(dict(handles)))
        await asyncio.sleep(0.05)
        registry._reported_silent.add(0)
        del handles[0]
        answer.set_result((3, "in step 3", True, 0.0, None))
        await pinging
        assert posted == [] and not registry._answered_s and not registry._unanswered_pings

    asyncio.run(run())


class Answered:
    """Ray's reference of a call that has its answer."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def future(self) -> Future:
        found: Future = Future()
        found.set_result(self.answer)
        return found


def test_an_abort_waits_for_a_late_step_before_it_asks_how_many_steps_are_done(monkeypatch):
    """A late answer is awaited by itself, no more with those of the others; the worker may still apply the step meanwhile."""
    monkeypatch.setattr(worker_calls, "wait_for_answers", lambda refs, timeout_s: time.sleep(0.05) or [answer_batch.UNANSWERED])
    seen: list[str] = []

    async def step() -> str:
        await asyncio.sleep(0.3)
        seen.append("the step is answered")
        return "report"

    def ping() -> Answered:
        seen.append("asked how far it is")
        return Answered((5,))

    async def run() -> None:
        scene = Scene()
        scene.pool.workers[0] = SimpleNamespace(
            abort=SimpleNamespace(remote=lambda why: Answered(None)), ping=SimpleNamespace(remote=ping)
        )
        scene.calls.call_all(lambda worker: step(), lambda reports: reports[0])
        await asyncio.sleep(0)
        await scene.calls.abort("a test")
        assert seen == ["the step is answered", "asked how far it is"]
        assert scene.posted == ["report", GroupsAborted((5,))]

    asyncio.run(run())
