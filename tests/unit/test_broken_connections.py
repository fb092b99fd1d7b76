"""The network to a worker breaks and comes back: what Ray says of that is no death, and no worker is given up for it."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raypar.actors import worker_calls
from raypar.actors.background_tasks import BackgroundTasks
from raypar.actors.worker_calls import AnswerLost, WorkerCalls
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic.events import CallFailed, Tick

BROKEN = ActorUnavailableError("The actor is temporarily unavailable: recvmsg:Connection reset by peer", None)


class Scene:
    """Calls to worker 0 of generation 2, with what they post."""

    def __init__(self, *answers) -> None:
        self.answers, self.posted = list(answers), []
        self.membership = SimpleNamespace(members=(0,), plan=None, generation=2)
        self.pool = SimpleNamespace(workers={0: SimpleNamespace(ping=SimpleNamespace(remote=self.answer))})
        machine = SimpleNamespace(membership=self.membership, policy=SimpleNamespace(elastic=True))
        self.calls = WorkerCalls(machine, self.pool, None, BackgroundTasks(self.posted.append), {0})

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
        scene.calls.call(0, 2, scene.answer(), lambda number, answer: Tick())
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


def test_a_ping_whose_connection_broke_is_silence():
    class Ref:
        def __init__(self, error) -> None:
            self.error = error

        def future(self):
            import concurrent.futures

            found = concurrent.futures.Future()
            found.set_exception(self.error)
            return found

    async def run():
        posted = []
        worker = SimpleNamespace(ping=SimpleNamespace(remote=lambda: Ref(errors.pop(0))))
        registry = WorkerRegistry(SimpleNamespace(workers={0: worker}), None, posted.append, None, lambda number: True)
        await registry._ping(0, worker)
        assert posted == []
        await registry._ping(0, worker)
        assert [event.kind for event in posted] == ["lost"]

    errors = [BROKEN, ActorDiedError()]
    asyncio.run(run())
