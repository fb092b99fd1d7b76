"""Agents of nodes, by way of which the driver calls its workers, die, stop and come back: no worker and no step is lost."""

import asyncio

import pytest
from helpers.agent_histories import STEP_S, STEPS, World, run_virtually

from raypar.actors.node_agent import FAILURE_LINGER_S, LINGER_S, REPLY_S
from raypar.actors.node_agents import GATHER_S
from raypar.elastic.events import CallFailed


def seeds(few):
    """A few in the default suite, all of them in `.ci/run`."""
    return [*range(few), *(pytest.param(seed, marks=pytest.mark.ci) for seed in range(few, 380))]


def test_undisturbed_the_driver_calls_one_agent_of_each_group_and_no_worker(monkeypatch):
    async def scene():
        world = World(0, monkeypatch)
        keeping = asyncio.ensure_future(world.keep_agents())
        await asyncio.sleep(2.0)
        world.calls.clear()
        await world.train()
        keeping.cancel()
        assert world.calls["workers"] == STEPS * len(world.workers), "each by an agent, once"
        assert not world.told and {*world.asked.values()} == {1}
        return len({*world.nodes.values()})

    assert run_virtually(scene) > 3


@pytest.mark.parametrize("seed", seeds(12))
def test_agents_die_or_stop_at_any_moment_and_every_worker_does_every_step_once_and_is_heard_once(seed, monkeypatch):
    async def scene():
        world = World(seed, monkeypatch)
        keeping = asyncio.ensure_future(world.keep_agents())
        await asyncio.sleep(world.chance.uniform(0.0, 1.0))
        training = asyncio.ensure_future(world.train())
        faults = world.chance.randint(1, 4)
        for _ in range(faults):
            await asyncio.sleep(world.chance.choice([0.0, 0.001, 0.003, world.chance.uniform(0, 3 * STEP_S)]))
            if alive := [agent for agent in world.agents_made if not agent.dead.done()]:
                victim = world.chance.choice(alive)
                victim.going.clear() if world.chance.random() < 0.3 else victim.kill()
        await training
        keeping.cancel()
        everybody = sorted(world.workers)
        assert not [event for _, event in world.posted if not isinstance(event, tuple)]
        assert [world.answers(step) for step in range(STEPS)] == [everybody] * STEPS
        assert len(world.posted) == STEPS * len(everybody) and world.driver.unanswered == set()
        assert {*world.executed.values()} == {1} and len(world.executed) == STEPS * len(everybody)
        late_s = faults * (GATHER_S + 2 * REPLY_S + LINGER_S)
        assert world.loop.time() < 6.0 + STEPS * 2 * STEP_S + late_s

    run_virtually(scene)


@pytest.mark.parametrize("seed", seeds(6))
def test_a_worker_that_dies_is_told_of_at_once_and_not_after_the_answers_of_others(seed, monkeypatch):
    async def scene():
        world = World(seed, monkeypatch)
        keeping = asyncio.ensure_future(world.keep_agents())
        await asyncio.sleep(2.0)
        training = asyncio.ensure_future(world.train())
        await asyncio.sleep(world.chance.uniform(0.05, 3 * STEP_S))
        if world.chance.random() < 0.3:
            world.chance.choice(world.agents_made).kill()
        victim, died_s = world.chance.choice(sorted(world.workers)), world.loop.time()
        world.kill_worker(victim)
        await training
        keeping.cancel()
        at_s, lost = next((at_s, event) for at_s, event in world.posted if isinstance(event, CallFailed))
        assert (lost.kind, lost.worker) == ("lost", victim)
        assert at_s - died_s < 5 * FAILURE_LINGER_S + 0.03

    run_virtually(scene)


def test_an_agent_that_stops_below_another_one_is_given_up_and_its_workers_are_called_directly(monkeypatch):
    async def scene():
        world = World(0, monkeypatch)
        keeping = asyncio.ensure_future(world.keep_agents())
        await asyncio.sleep(2.0)
        below = {node for route in world.agents.routes(world.workers).values() for node in route.below}
        stopped = next(agent for agent in world.agents_made if agent.node in below)
        stopped.going.clear()
        await world.train()
        keeping.cancel()
        assert [len(world.answers(step)) for step in range(STEPS)] == [len(world.workers)] * STEPS
        assert [event.text.splitlines()[0] for event in world.told] == [
            f"the agent of node {stopped.node} has not replied to another agent: its workers are called directly until another "
            "one is there"
        ]
        assert stopped.dead.done(), "it was ended"
        assert world.loop.time() < 2.0 + STEPS * STEP_S + 2 * (GATHER_S + REPLY_S)

    run_virtually(scene)
