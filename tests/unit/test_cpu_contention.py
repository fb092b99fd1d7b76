"""Which time no deadline may count, because processors were short; and where that is known from."""

import subprocess
import sys
import threading

import pytest

from raypar.elastic.deadlines import MAX_SHARE, CpuWaitDeadlineExtension
from raypar.worker.process.thread_activity import thread_cpu_wait_s


@pytest.mark.parametrize("share, counted", [(0.0, 1.0), (0.5, 1.0), (0.8, 0.2), (1.0, 1 - MAX_SHARE)])
def test_time_counts_as_far_as_the_one_who_is_shortest_of_processors_got_one(share, counted):
    crowding = CpuWaitDeadlineExtension()
    for tick in range(5):
        crowding.report(0, 0.1 * tick, 0.4 * tick)
        crowding.report(1, share * 0.4 * tick, 0.4 * tick)
    assert 1.0 - crowding.uncounted_s(1.6, 0.6) == pytest.approx(counted)


def test_who_is_stopped_or_waits_for_others_excuses_nothing():
    crowding = CpuWaitDeadlineExtension()
    crowding.report(0, 0.0, 0.0)
    crowding.report(0, 0.4, 0.4)
    assert crowding.uncounted_s(0.5, 0.25) > 0.2
    assert crowding.uncounted_s(1.75, 1.5) == 0.0, "stopped since"
    crowding.report(0, 0.4, 1.8)
    assert crowding.uncounted_s(1.9, 1.65) == 0.0, "it waits for somebody, not for a processor"


def test_a_first_report_and_one_of_another_thread_excuse_nothing():
    crowding = CpuWaitDeadlineExtension()
    crowding.report(0, 100.0, 1.0)
    assert crowding.uncounted_s(1.2, 0.95) == 0.0
    crowding.report(0, 0.3, 1.4)
    assert crowding.uncounted_s(1.5, 1.25) == 0.0


CROWD = """
import os, threading, time
from raypar.worker.process.thread_activity import thread_cpu_wait_s
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
if os.fork() == 0:
    until = time.monotonic() + 0.4
    while time.monotonic() < until: pass
    os._exit(0)
before, began = thread_cpu_wait_s(threading.get_native_id()), time.monotonic()
while time.monotonic() < began + 0.4: pass
print(thread_cpu_wait_s(threading.get_native_id()) - before, time.monotonic() - began)
"""


def test_the_kernel_says_how_long_a_thread_has_waited_for_a_processor():
    """Two processes that compute, on one processor: each waits half of the time, or longer where others compute too."""
    found = subprocess.run([sys.executable, "-c", CROWD], capture_output=True, text=True, check=True, timeout=60)
    waited_s, elapsed_s = map(float, found.stdout.split())
    assert 0.1 < waited_s < elapsed_s
    assert thread_cpu_wait_s(threading.get_native_id()) >= 0.0
    assert thread_cpu_wait_s(0) == 0.0, "no such thread, no excuse"
