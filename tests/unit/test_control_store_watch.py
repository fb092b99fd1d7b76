"""A client whose Ray calls block for ever gives up by itself, in time, with one error; a store that answers is kept."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from raypar.actors import driver_client
from raypar.actors.control_store_watch import (
    ControlStoreLost,
    ControlStoreWatch,
    answers_http2,
    call_ray,
    silence_limit_s,
    watch_control_store,
)
from raypar.elastic.run_policy import RunPolicy

FAST = {"interval_s": 0.01, "limit_s": 0.3, "report_after_s": 0.1}
DEADLINE_S = 10.0
"""Limit for what takes a third of a second on a quiet machine."""


def blocks(*given: object, **more: object) -> None:
    threading.Event().wait()


def in_time(call) -> float:
    """Seconds until the control store is given up."""
    began_s = time.monotonic()
    with pytest.raises(ControlStoreLost) as raised:
        call()
    assert "control store at 10.0.0.7:6379 has not answered for" in raised.value.what
    assert "raypar resume" in raised.value.cure and "Redis" in raised.value.cure
    return time.monotonic() - began_s


def answers(*said: bool):
    """A probe with these answers, the last one for ever."""
    left = list(said)
    return lambda address: left.pop(0) if len(left) > 1 else left[0]


def test_a_ray_call_that_blocks_for_ever_ends_with_the_error_in_time():
    with watch_control_store("10.0.0.7:6379", probe=answers(True, False), **FAST):
        assert in_time(lambda: call_ray(blocks)) < DEADLINE_S


def test_a_client_whose_ray_calls_all_block_ends_with_the_error_in_time(monkeypatch):
    """`raypar train` waited for more than three minutes after the control store's machine had vanished."""
    call = SimpleNamespace(remote=blocks)
    driver = SimpleNamespace(start=call, events=call, stop=call, leave_without_control_store=call)
    actor = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=lambda run: driver))
    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    fake = SimpleNamespace(wait=blocks, get=blocks, kill=blocks, remote=lambda made: actor, get_runtime_context=lambda: context)
    monkeypatch.setattr(driver_client, "ray", fake)
    monkeypatch.setattr(driver_client, "LEAVE_S", 0.2)
    policy = RunPolicy(workers=2, job_steps=9, elastic=True)
    told: list[dict] = []
    with watch_control_store("10.0.0.7:6379", probe=answers(True, False), **FAST):
        assert in_time(lambda: driver_client.follow_run(SimpleNamespace(run="r", policy=policy), told.append)) < DEADLINE_S


def test_one_line_says_what_is_waited_for_and_for_how_long(monkeypatch):
    watch = ControlStoreWatch("10.0.0.7:6379", limit_s=75, report_after_s=10)
    watch.note_probe(True, 3)
    assert watch.new_lines() == []
    for _ in range(4):
        watch.note_probe(False, 3)
    (line,) = watch.new_lines()
    assert "has not answered for 12 s" in line and "75 s" in line
    watch.note_probe(False, 3)
    assert watch.new_lines() == []
    watch.note_probe(True, 3)
    (line,) = watch.new_lines()
    assert "answers again, after 15 s" in line
    assert not watch.is_lost


def test_a_store_that_commits_steps_or_has_never_answered_a_probe_is_not_given_up():
    """A firewall may let Ray's connections through and no new ones."""
    watch = ControlStoreWatch("10.0.0.7:6379", limit_s=75)
    for _ in range(100):
        watch.note_probe(False, 3)
    assert not watch.is_lost
    watch.note_probe(True, 3)
    for _ in range(100):
        watch.note_probe(False, 3)
        watch.note_progress()
    assert not watch.is_lost
    for _ in range(25):
        watch.note_probe(False, 3)
    assert watch.is_lost


def test_time_in_which_this_process_was_stopped_does_not_count():
    watch = ControlStoreWatch("10.0.0.7:6379", limit_s=75, interval_s=3)
    watch.note_probe(True, 3)
    watch.note_probe(False, 3600)
    assert watch.silent_s < 10 and not watch.is_lost


def test_the_limit_is_longer_than_what_ray_itself_allows():
    assert silence_limit_s({}) == 75
    assert silence_limit_s({"RAY_gcs_rpc_server_reconnect_timeout_s": "300"}) == 315
    assert silence_limit_s({"RAY_gcs_rpc_server_reconnect_timeout_s": "?"}) == 75


@pytest.mark.parametrize("reply, alive", [(b"\0\0\0\4\0\0\0\0\0", True), (b"", True), (None, False)])
def test_a_store_answers_if_it_sends_bytes_or_refuses_to_speak_without_tls(reply, alive, monkeypatch):
    """A stopped process's connections are still accepted, by the kernel: it must say something."""
    monkeypatch.setattr("raypar.actors.control_store_watch.PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            with server.accept()[0] as accepted:
                accepted.recv(100)
                if reply is None:
                    over.wait(DEADLINE_S)
                else:
                    accepted.sendall(reply)

        over = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        assert answers_http2(address) is alive
        over.set()
        thread.join()
    assert not answers_http2(address)  # nobody listens


def test_without_a_watch_and_with_one_a_call_returns_and_raises_as_it_would_itself():
    def wrong() -> None:
        raise ValueError("mine")

    def check() -> None:
        assert call_ray(lambda: 3) == 3
        with pytest.raises(ValueError, match="mine"):
            call_ray(wrong)

    check()
    with watch_control_store("10.0.0.7:6379", probe=answers(True), **FAST):
        check()
    assert not [thread for thread in threading.enumerate() if thread.name == "raypar-control-store"]


@pytest.mark.parametrize("lost_before", [True, False])
def test_a_driver_is_told_to_end_even_if_the_store_is_given_up_while_it_is_being_removed(lost_before, monkeypatch):
    told: list[str] = []
    driver = SimpleNamespace(leave_without_control_store=SimpleNamespace(remote=told.append))
    monkeypatch.setattr(driver_client, "ray", SimpleNamespace(wait=lambda calls, timeout: (calls, [])))
    monkeypatch.setattr(driver_client, "kill_actor", blocks)
    with watch_control_store("10.0.0.7:6379", probe=answers(True, False), **FAST) as watch:
        until_s = time.monotonic() + DEADLINE_S
        while lost_before and not watch.is_lost and time.monotonic() < until_s:
            time.sleep(0.01)
        driver_client.remove_run_from_cluster(driver, "r")
    assert len(told) == 1 and "has not answered for" in told[0]
