"""Ctrl-C while Ray starts ends the start, also where Ray's own code swallows it."""

import os
import signal
import time

import pytest
import ray

from raypar.actors.ray_connection import start_local_ray


def test_a_ctrl_c_that_ray_swallows_still_ends_the_start(monkeypatch, tmp_path):
    def swallowing(**arguments):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            pass

    monkeypatch.setattr(ray, "init", swallowing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    # A background job of a shell script ignores SIGINT, and so would these tests in one.
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), start_local_ray(1):
            pytest.fail("the run went on")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, outside)
