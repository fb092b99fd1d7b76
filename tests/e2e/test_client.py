"""What the client makes of signals and of errors, without a cluster."""

import os
import signal

import pytest

from raypar.actors.client import interrupts
from raypar.errors import DataError
from raypar.launch import Result, raise_failure


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_run_is_collected_so_that_the_run_can_save(number):
    before = signal.getsignal(number)
    with interrupts() as asked:
        os.kill(os.getpid(), number)
        assert len(asked) == 1
    assert signal.getsignal(number) == before


def test_ctrl_c_is_heard_by_a_background_job_of_a_shell_script():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts() as asked:
            os.kill(os.getpid(), signal.SIGINT)
            assert asked == ["Ctrl-C"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_bad_input_found_during_a_run_is_a_failed_run():
    failed = Result({}, "runs/x", "failed", 3, error=DataError("sample 3 is short", cure="pad it"))
    with pytest.raises(DataError) as caught:
        raise_failure(failed)
    assert caught.value.exit_code == 1 and DataError.exit_code == 2
