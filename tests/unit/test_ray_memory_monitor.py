"""Ray's hundred lines about a process that it has killed for want of memory become one line and a cure."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import OutOfMemoryError
from test_run_follower import END, Driver, follow, step  # noqa: F401 - a fixture

from raypar.actors.driver_client import MOST_DRIVER_DEATHS, unanswering_driver_error
from raypar.actors.worker_calls import WorkerCalls
from raypar.elastic.run_policy import RunPolicy
from raypar.errors import OutOfMemory, WorkerLost
from raypar.fences.private_api_fence import warnings_sent_to
from raypar.ray_compat import actor_errors
from raypar.ray_compat.actor_errors import memory_monitor_kill_error

RAYS = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: 4dcb) was \
4.76GB used / 23.54GB limit (0.202116)
OOM kill reason: Memory usage 5086560256B exceeded threshold of 1263825536B (5.0% of 25276510208B limit)
Object store memory usage: [- objects spillable: 0
Top 10 memory users: PID	MEM(GB)	COMMAND
28321	0.23	python -m raypar train --set model.args.password=hunter2"""


def test_a_killed_process_is_one_line_with_the_numbers():
    error = memory_monitor_kill_error("worker 3", OutOfMemoryError(RAYS))
    assert error.what == (
        "worker 3 was killed by Ray because its node ran out of memory: 4.76 of 23.54 GB were in use, and Ray kills from 5 % on"
    )
    assert "fewer workers on a node" in error.cure and "RAY_memory_usage_threshold" in error.cure
    assert str(error).count("\n") == 1 and "hunter2" not in str(error)
    assert memory_monitor_kill_error("w", "other words").what == "w was killed by Ray because its node ran out of memory"


@pytest.mark.parametrize("elastic", [True, False])
def test_a_worker_that_ray_has_killed_for_memory_is_a_lost_worker(elastic):
    calls = SimpleNamespace(machine=SimpleNamespace(policy=RunPolicy(workers=1, job_steps=9, elastic=elastic)))
    failure = WorkerCalls._failure(calls, "worker 3 (stage 1)", OutOfMemoryError(RAYS))
    assert failure.kind == "lost" and isinstance(failure.error, OutOfMemory)
    assert failure.error.what.startswith("worker 3 (stage 1) was killed by Ray")


def test_a_driver_that_ray_has_killed_for_memory_is_a_failed_run(follow):  # noqa: F811
    end, told = follow(Driver([step(1)], OutOfMemoryError(RAYS)), elastic=False)
    assert (end.end, end.done, [event.step for event in told]) == ("failed", 1, [1]) and isinstance(end.error, OutOfMemory)
    assert end.why.startswith("the driver was lost: its process died before it had reported step 2; it was killed by Ray")


def test_the_driver_of_an_elastic_run_is_started_again_but_not_for_ever(follow):  # noqa: F811
    killed = [OutOfMemoryError(RAYS), []] * (MOST_DRIVER_DEATHS - 1)
    end, _ = follow(Driver([step(1)], *killed, [step(2)], *killed, [step(3), END]))
    assert end.end == "done", "a step lies between them"
    end, _ = follow(Driver([step(1)], *killed, OutOfMemoryError(RAYS)))
    assert end.end == "failed" and isinstance(end.error, OutOfMemory) and "4.76 of 23.54 GB" in end.why
    assert f"its process has died {MOST_DRIVER_DEATHS} times" in end.why


def test_a_driver_that_does_not_answer_on_a_full_node_is_out_of_memory(monkeypatch):
    monkeypatch.setattr("ray._private.utils.get_used_memory", lambda: 23 * 2**30)
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: 24 * 2**30)
    monkeypatch.delenv("RAY_memory_usage_threshold", raising=False)
    error = unanswering_driver_error("it does not answer", "look")
    assert isinstance(error, OutOfMemory) and "23.0 of 24.0 GiB are in use, and Ray kills from 95 % on" in error.what
    monkeypatch.setattr("ray._private.utils.get_used_memory", lambda: 22 * 2**30)
    assert actor_errors.memory_shortage_here() == ""
    assert isinstance(unanswering_driver_error("it does not answer", "look"), WorkerLost)


def test_where_ray_does_not_say_how_much_memory_is_in_use_a_line_names_its_release_and_what_is_not_known(monkeypatch):
    """It was silent: a driver that was killed for memory was one that does not answer."""
    warnings = []
    monkeypatch.delattr("ray._private.utils.get_used_memory")
    actor_errors.MEMORY_IN_USE.reset()
    with warnings_sent_to(warnings.append):
        assert isinstance(unanswering_driver_error("it does not answer", "look"), WorkerLost)
    actor_errors.MEMORY_IN_USE.reset()
    (line,) = warnings
    assert line.startswith(
        f"Ray {ray.__version__}: ray._private.utils.get_used_memory is missing or has changed (AttributeError: "
    )
    assert "so seeing whether Ray's memory monitor kills on this node is off: " in line and "cure: use Ray 2.60" in line
