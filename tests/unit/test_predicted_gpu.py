"""The predicted step of a GPU, with numbers that are worked out by hand, and what it is predicted from."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

before = signal.getsignal(signal.SIGTERM)
from helpers.shapes_device import Asked  # noqa: E402
from predicted_gpu import READ_S, Gpu, Predicted, step_s  # noqa: E402

signal.signal(signal.SIGTERM, before)  # a bench ends its contenders on SIGTERM; a test run does not

GPU = Gpu(10e12, 100e12, 1e12, float32_share=0.5, bf16_share=0.5, memory_share=0.5, least_s=2e-6)
"""5 TFLOP/s of float32, 50 of bf16, 0.5 TB/s."""
MATRIX, COPY, TINY = Asked("mm", 50_000_000, 4), Asked("copy_", 0, 2_500_000), Asked("add", 0, 4)
READ = Asked("item", read=True)
"""10 us of arithmetic; 5 us of bytes; the least; a read."""


def test_a_kernel_takes_the_longer_of_arithmetic_and_bytes_and_never_less_than_the_least():
    assert GPU.kernel_s(MATRIX) == pytest.approx(10e-6)
    assert GPU.kernel_s(Asked("mm", 50_000_000, 4, bf16=True)) == GPU.kernel_s(TINY) == 2e-6
    assert GPU.kernel_s(COPY) == pytest.approx(5e-6)


def test_a_step_takes_what_the_device_takes_where_the_host_runs_ahead():
    assert step_s([MATRIX, COPY, TINY], GPU, host_us=1.0) == pytest.approx(17e-6)


def test_a_step_takes_what_the_host_takes_where_the_device_waits_for_it():
    assert step_s([MATRIX, COPY, TINY], GPU, host_us=20.0) == pytest.approx(60e-6)


def test_a_read_waits_for_the_device_and_what_follows_it_leaves_the_device_idle():
    """Asked at 1, read when the device has done (at 11 us), numbers at 31, in use until 38; the last is asked for at 39, done
    at 41. The next step's first operation is asked for at 40, and begins at 41."""
    assert step_s([MATRIX, READ, TINY], GPU, host_us=1.0, after_read_s=7e-6, steps=1) == pytest.approx(21e-6 + READ_S)
    assert step_s([MATRIX, READ, TINY], GPU, host_us=1.0, after_read_s=7e-6) == pytest.approx(20e-6 + READ_S)


def test_a_slower_host_shows_only_where_the_host_sets_the_pace():
    found = Predicted("model", "plan", [MATRIX] * 3, [MATRIX] * 3, vote_s=0.0, host=2.0)
    assert found.steps(GPU, 4.0) == pytest.approx((30e-6, 30e-6))
    assert found.steps(GPU, 8.0) == pytest.approx((48e-6, 30e-6))
