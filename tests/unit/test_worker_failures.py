"""Events about workers that have failed are whole when they are posted, and keep their order."""

import asyncio
from types import SimpleNamespace

import pytest

from raypar.actors.worker_failures import WorkerFailures
from raypar.elastic.events import CallFailed
from raypar.errors import GroupAborted, NodeLost, OutOfMemory, WorkerLost
from raypar.plan import ParallelPlan

PLAN = ParallelPlan.mesh(dp=2, layers=2)
MACHINE = SimpleNamespace(membership=SimpleNamespace(plan=PLAN, members=(4, 7)))
PLANS = SimpleNamespace(memory=lambda plan, rank: (f"rank {rank} holds 3 GB", "2 stages would fit"))


async def events(posted):
    return [await event if isinstance(event, asyncio.Future) else event for event in posted]


@pytest.mark.parametrize(
    "kind, error, worker, preempted",
    [
        ("lost", WorkerLost("it died"), 4, False),
        ("lost", NodeLost("its node died"), 4, True),
        ("lost", WorkerLost("it died"), 7, True),
        ("aborted", GroupAborted("closed"), 7, False),
    ],
)
def test_the_death_of_a_worker_that_had_to_leave_or_of_its_node_is_no_fault(kind, error, worker, preempted):
    posted = []
    failures = WorkerFailures(MACHINE, PLANS, posted.append)
    failures.leaving.add(7)
    failures.post(kind, error, worker, 3)
    assert posted == [CallFailed(kind, error, worker, 3, preempted)]


@pytest.mark.parametrize("kind", ["lost", "user"])
def test_where_memory_was_short_the_event_says_what_for_and_later_events_wait_for_it(kind):
    async def scene():
        posted = []
        failures = WorkerFailures(MACHINE, PLANS, posted.append)
        failures.post(kind, OutOfMemory("killed", cure="more memory"), 7)
        failures.post("aborted", GroupAborted("closed"), 4, 1)
        return await events(posted)

    explained, later = asyncio.run(scene())
    assert (explained.kind, explained.worker, explained.generation) == (kind, 7, None)
    assert explained.error.what == "killed; rank 1 holds 3 GB"
    assert explained.error.cure == "2 stages would fit; else more memory"
    assert later.worker == 4


def test_a_worker_without_a_seat_has_nothing_to_explain():
    async def scene():
        posted, error = [], OutOfMemory("killed", cure="more memory")
        WorkerFailures(MACHINE, PLANS, posted.append).post("lost", error, 9)
        return error, await events(posted)

    error, found = asyncio.run(scene())
    assert [event.error for event in found] == [error]
