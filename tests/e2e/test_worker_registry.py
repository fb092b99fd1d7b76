"""Who still answers, without a cluster."""

import asyncio
import concurrent.futures
import socket
import time
from types import SimpleNamespace

import pytest

from raypar.actors.messages import WorkerHello
from raypar.actors.worker_failures import WorkerFailures
from raypar.actors.worker_registry import WorkerRegistry
from raypar.elastic import events as on
from raypar.record.events import Event

ANSWER_S = 0.2


class Call:
    """A call as `ray.wait` and `ray.get` see it."""

    def __init__(self, answer: concurrent.futures.Future) -> None:
        self.answer = answer

    def future(self) -> concurrent.futures.Future:
        return self.answer

    @staticmethod
    def wait(refs, num_returns, timeout):
        concurrent.futures.wait([ref.answer for ref in refs], timeout)
        return [ref for ref in refs if ref.answer.done()], [ref for ref in refs if not ref.answer.done()]

    @staticmethod
    def get(ref):
        return [one.answer.result() for one in ref] if isinstance(ref, list) else ref.answer.result()


class Worker:
    """Answers pings after `ANSWER_S`, as long as it is well."""

    well = True

    def __init__(self) -> None:
        self.asked_while_unwell: list[concurrent.futures.Future] = []
        self.ping = SimpleNamespace(remote=self.asked)

    def asked(self):
        answer = concurrent.futures.Future()
        if self.well:
            asyncio.get_running_loop().call_later(ANSWER_S, answer.set_result, (0, "idle", False, 0.0, None))
        else:
            self.asked_while_unwell.append(answer)
        return Call(answer)

    def wake(self) -> None:
        """Answers what it was asked meanwhile, as a process does that was stopped."""
        self.well = True
        for answer in self.asked_while_unwell:
            answer.set_result((0, "idle", False, 0.0, None))


@pytest.mark.ci
def test_a_driver_that_stood_still_does_not_take_everybody_for_silent(monkeypatch):
    """All workers were said not to have answered for 10 s, which ended a run that is not elastic."""
    monkeypatch.setattr("raypar.actors.worker_registry.list_draining_nodes", set)
    monkeypatch.setattr("raypar.actors.worker_registry.list_live_and_dead_nodes", lambda: (set(), set()))
    monkeypatch.setattr("raypar.actors.answer_batch.ray", Call)
    workers, told = {number: Worker() for number in range(3)}, []

    async def scene():
        over = []
        failures, pool = WorkerFailures(None, None, told.append), SimpleNamespace(workers=workers)
        registry = WorkerRegistry(pool, None, told.append, lambda event: None, workers.__contains__, failures)
        for number in workers:
            registry.add_started_worker(number, WorkerHello("127.0.0.1:1", "node", 1, {}))
        watching = asyncio.ensure_future(registry.watch(1.0, lambda: bool(over)))
        await asyncio.sleep(0.5)
        time.sleep(1.5)
        await asyncio.sleep(0.9)
        assert not told and not registry.unheard_workers()
        workers[1].well = False
        await asyncio.sleep(2.5)
        workers[1].wake()
        await asyncio.sleep(0.5)
        over.append(True)
        await watching

    asyncio.run(scene())
    assert told == [on.WorkerSilent(1, 1.0), on.WorkerAnswered(1)], "who is silent while the others answer, and answers then"


@pytest.mark.parametrize("lives", [True, False])
def test_a_node_whose_workers_are_all_lost_is_told_as_lost_only_if_it_answers_no_more(lives, monkeypatch):
    monkeypatch.setattr("raypar.actors.worker_registry.NODE_ENDS_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as raylet:
        address = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": raylet.getsockname()[1]}
        monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": "other"} | address, {"NodeID": "855ce93100ff"} | address])
        if not lives:
            raylet.close()
        told: list[Event] = []

        async def scene():
            pool = SimpleNamespace(workers={})
            registry = WorkerRegistry(pool, None, told.append, told.append, {}.__contains__, None)
            registry.node_of_worker |= dict.fromkeys((0, 3), "855ce93100ff")
            for number in (0, 3):
                registry.note_lost_worker(number, with_node=False)
            assert not told
            await asyncio.gather(*registry._background)

        asyncio.run(scene())
    texts = [each.text for each in told]
    assert texts == [] if lives else texts == ["no worker is left on node 855ce931: workers 0, 3 were lost together"]


def test_people_are_told_of_nodes_that_flap_whenever_the_age_that_new_ones_have_to_reach_changes():
    told = []
    pool = SimpleNamespace(workers={})
    registry = WorkerRegistry(
        pool,
        None,
        told.append,
        lambda event: told.append((event.kind, event.line().removeprefix("warning: "))),
        {}.__contains__,
        WorkerFailures(None, None, told.append),
    )
    registry._look_for_flapping_nodes({"head"}, {"dead before"})
    for number in range(1, 7):
        registry._look_for_flapping_nodes({"head", f"{number}"}, {"dead before"} | {f"{n}" for n in range(1, number)})
        assert registry.suspect_nodes_now() == (frozenset() if number < 3 else {f"{number}"})
    registry._drained.add("6")
    registry._look_for_flapping_nodes({"head"}, {"dead before"} | {f"{n}" for n in range(1, 7)})
    assert [(kind, text.splitlines()[0]) for kind, text in told] == [
        ("warning", f"node {n} was lost soon after it had joined: a new node gets no worker before it is {age} s old")
        for n, age in ((2, 30), (3, 60), (4, 120))
    ]
