"""What a run changes of the process that started it is put back: that may be a notebook, or a script with more to do."""

import logging
import os
import random
import signal

import numpy
import pytest
import torch

from raypar.actors import ray_connection
from raypar.actors.ray_connection import connect_ray, without_ray_leftovers
from raypar.errors import ConfigError
from raypar.launch import launch_run as launch
from raypar.launch.launch_run import keep_callers_state, launch_run
from raypar.model.random_state import seed_all
from raypar.worker.process.torch_state_guard import TorchStateGuard, read_global_torch_state


@pytest.fixture
def own_settings():
    """Settings that a user may have made, put back after the test."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(3)
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_num_threads(before[0])
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision(before[1])
    torch.use_deterministic_algorithms(before[2])


def drawn() -> list[float]:
    """The next numbers of all generators."""
    return [random.random(), float(numpy.random.random()), float(torch.rand(1))]


def test_settings_and_generators_of_the_caller_are_as_before(own_settings: None):
    seed_all(5)
    wanted, numbers = read_global_torch_state(), drawn()
    seed_all(5)
    with torch.no_grad(), torch.device("meta"), keep_callers_state():
        TorchStateGuard(threads=1).establish()
        seed_all(9)
        assert torch.get_num_threads() == 1 and torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()
        assert torch.zeros(1).device.type == "cpu"
    assert read_global_torch_state() == wanted and drawn() == numbers


def test_the_default_device_of_the_caller_is_as_before():
    torch.set_default_device("meta")
    try:
        with keep_callers_state():
            TorchStateGuard(threads=torch.get_num_threads()).establish()
            assert torch.zeros(1).device.type == "cpu"
        assert torch.zeros(1).device.type == "meta"
    finally:
        torch.set_default_device(None)


def test_a_run_that_fails_in_its_checks_puts_back_too(monkeypatch: pytest.MonkeyPatch, own_settings: None):
    def check(*given: object) -> None:
        TorchStateGuard(threads=1).establish()
        raise ConfigError("wrong")

    monkeypatch.setattr(launch, "_check_and_plan", check)
    wanted = read_global_torch_state()
    with pytest.raises(ConfigError, match="wrong"):
        launch_run(None, None, lambda event: None)  # type: ignore[arg-type]
    assert read_global_torch_state() == wanted


def test_what_ray_leaves_behind_is_put_back(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    logger, handler = logging.getLogger("ray"), signal.getsignal(signal.SIGTERM)
    level = logger.level
    with without_ray_leftovers():  # as ray.init does
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"
        logger.setLevel(logging.ERROR - 1)
    assert (signal.getsignal(signal.SIGTERM), os.environ.get("PYTHONBREAKPOINT"), logger.level) == (handler, None, level)


@pytest.mark.parametrize("address, same", [("auto", True), ("here:6379", True), (None, True), ("10.0.0.9:6380", False)])
def test_an_address_beside_a_ray_that_is_joined_already(
    address: str | None, same: bool, monkeypatch: pytest.MonkeyPatch, tmp_path
):
    class Context:
        gcs_address = "10.0.0.1:6379"

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", Context)
    monkeypatch.setattr("raypar.actors.removed_working_dir.wait_until_working_dir_unpacked", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect = connect_ray(address, 1, tmp_path)
    if same:
        with connect as connection:
            assert (connection.kind, connection.address) == ("found", Context.gcs_address)
        return
    with pytest.raises(ConfigError, match=r"has joined the Ray at 10\.0\.0\.1:6379 already, and address is '10\.0\.0\.9:6380'"):
        ray_connection.contextlib.ExitStack().enter_context(connect)
