"""Agents of nodes on a real Ray: they are killed, and then a worker is; the result does not change by a bit."""

import time
from pathlib import Path

import psutil
import pytest
from helpers.agent_driver import AgentDriver
from helpers.full_disk import no_bytecode
from helpers.node_loss import assert_undisturbed
from helpers.trainee import Trainee, Undisturbed, as_soon_as

from raypar.actors import driver_client, node_agents
from raypar.actors.ray_connection import connect_ray

LIMIT_S = 300.0
LEFT_S = 10.0
"""Ray ends an actor that is killed by a message to its process, on which nobody waits."""


def agents() -> list[psutil.Process]:
    """The processes of agents below this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "NodeAgent" in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.ci
def test_killed_agents_cost_no_worker_and_no_step_and_the_death_of_a_worker_is_seen_beside_them(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_client, "DriverActor", AgentDriver)
    undisturbed, slow = Undisturbed.of(tmp_path), tmp_path / "slow"
    slow.touch()
    (tmp_path / "run").mkdir()
    trainee = Trainee(
        tmp_path / "run", "plan.stages=2", "plan.replicas=2", "elastic.min_workers=1", f"model.args.slow_while={slow}"
    )
    killed, losses_before = [], []

    def kill_agents_of(nodes: set[str]) -> None:
        """Those that call workers: in use since the driver has seen them start."""
        for process in agents():
            killed.append(process.pid)
            process.kill()

    def lost_agents() -> list[str]:
        return [event["text"] for event in trainee.told("warning") if "the agent of node" in event["text"]]

    def then_a_worker(lines: list[str]) -> None:
        losses_before.extend(trainee.told("lost") + trainee.told("recovery"))
        psutil.Process(trainee.pids[1]).kill()
        slow.unlink()

    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1], nodes=2):
        with (
            as_soon_as(lambda: trainee.told("step") and len(agents()) == 2 and {1}, kill_agents_of, LIMIT_S),
            as_soon_as(lost_agents, then_a_worker, LIMIT_S),
        ):
            trainee.result = trainee.run()
        assert trainee.result.end == "done", (trainee.result.error, trainee.events[-8:])
        assert_undisturbed(trainee, undisturbed)
        assert len(killed) == 2 and losses_before == [] and len(trainee.told("lost")) == 1
        ends_s = time.monotonic() + LEFT_S
        while agents() and time.monotonic() < ends_s:
            time.sleep(0.05)
        assert not agents(), f"Ray has not ended an agent that the driver killed within {LEFT_S:.0f} s"
        assert node_agents.MOST_DIRECT == 32, "small runs call their workers directly"
