"""A driver by itself, without a cluster."""

import threading
from types import SimpleNamespace

from ray.exceptions import ActorUnavailableError

from raypar.actors import driver_actor as module
from raypar.actors.driver_actor import DriverActor


def test_a_driver_that_is_started_again_begins_even_if_ray_does_not_know_yet_that_it_lives(monkeypatch):
    """Its call to itself failed once with `The actor is restarting`, and the run hung for good."""
    begun, calls = threading.Event(), []

    def get(ref):
        calls.append(ref)
        if len(calls) < 3:
            raise ActorUnavailableError("The actor is restarting.", None)
        begun.set()

    me = SimpleNamespace(begin_again=SimpleNamespace(remote=lambda: "a call"))
    context = SimpleNamespace(was_current_actor_reconstructed=True, current_actor=me)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module.ray, "get", get)
    DriverActor("tiny")
    assert begun.wait(5.0), calls
