"""Every metric of the dashboard is on the metrics page of a real Ray; counters outlive a worker and a driver."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from helpers.tiny_job import write_job

from raypar.actors.ray_connection import make_short_temp_dir, worker_python_path

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "cluster/grafana/raypar.json"
PATIENCE_S = 150.0
SAMPLE = re.compile(r"^(ray_raypar_\w+)\{([^}]*)\} (\S+)", re.MULTILINE)

pytestmark = pytest.mark.chaos


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]


class Head:
    """`ray start --head`, whose metrics are on a page, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        port, self.metrics_port, agent = free_ports(3)
        self.address = f"127.0.0.1:{port}"
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([worker_python_path(ROOT), str(ROOT / "tests")]),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        words = ["--port", str(port), "--node-ip-address", "127.0.0.1", "--temp-dir", str(folder), "--num-cpus", "6"]
        words += ["--include-dashboard", "false", "--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]
        words += ["--metrics-export-port", str(self.metrics_port), "--dashboard-agent-listen-port", str(agent)]
        words += ["--system-config", json.dumps({"metrics_report_interval_ms": 1000})]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *words]
        subprocess.run(ray, check=True, env=self.environment, stdout=subprocess.DEVNULL, timeout=90)

    def page(self) -> str:
        """The metrics page; empty while nobody serves it."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as found,
        ):
            return str(found.read().decode())
        return ""

    def close(self) -> None:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and str(self.folder) in " ".join(process.cmdline()):
                    for one in [*process.children(recursive=True), process]:
                        one.kill()


@pytest.fixture
def head() -> Iterator[Head]:
    folder = make_short_temp_dir()
    made = Head(folder)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def run(head: Head, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of many steps with validation and a price, on four workers."""
    job = write_job(tmp_path)
    settings = ["steps=100000", "model.args.sleep_s=0.02", "plan.stages=2", "plan.replicas=2", "elastic.min_workers=1",
                "price_per_worker_hour=2.5", "validation.every=5", "checkpoint.every=0"]  # fmt: skip
    words = [word for one in settings for word in ("--set", one)]
    command = [sys.executable, "-m", "raypar", "train", str(job), "--address", head.address, *words]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=head.environment, cwd=tmp_path)
    try:
        yield process
    finally:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)


def wait_for(what: str, process: subprocess.Popen[bytes], log: Path, look: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert process.poll() is None, f"the run ended before {what}:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:.0f} s:\n{log.read_text()[-3000:]}"
        time.sleep(0.5)


def samples(page: str, name: str) -> list[float]:
    """The values of all series of a metric."""
    return [float(value) for found, _, value in SAMPLE.findall(page) if found == name]


def test_the_page_has_every_metric_of_the_dashboard_and_counters_outlive_a_worker_and_a_driver(head, run, tmp_path):
    log = tmp_path / "log"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in re.findall(r"\bray_\w+", target["expr"])}

    def missing() -> set[str]:
        return asked - {name for name, _, _ in SAMPLE.findall(head.page())}

    try:
        wait_for("page with all metrics", run, log, lambda: not missing())
    except AssertionError as error:
        raise AssertionError(f"missing: {sorted(missing())}") from error
    page = head.page()
    (folder,) = (tmp_path / "runs").iterdir()
    run_labels = {re.search(r'run="([^"]*)"', labels)[1] for _, labels, _ in SAMPLE.findall(page)}
    assert run_labels == {folder.name}
    assert samples(page, "ray_raypar_lost_workers_total") == [0.0] and samples(page, "ray_raypar_driver_failovers_total") == [
        0.0
    ]
    assert (
        sum(
            'state="seated"' in labels and float(value) == 4
            for name, labels, value in SAMPLE.findall(page)
            if name == "ray_raypar_workers"
        )
        == 1
    )
    seats = {
        tuple(re.findall(r'(?:stage|replica)="(\d)"', labels))
        for name, labels, _ in SAMPLE.findall(page)
        if name == "ray_raypar_worker_busy_ratio"
    }
    assert len(seats) == 4
    assert 0.3 < max(samples(page, "ray_raypar_goodput_ratio")) <= 1.0

    told = json.loads((folder / "members.json").read_text())
    os.kill(told["members"][1]["pid"], signal.SIGKILL)
    wait_for("recovery on the page", run, log, lambda: max(samples(head.page(), "ray_raypar_recoveries_total"), default=0) >= 1)
    assert max(samples(head.page(), "ray_raypar_lost_workers_total")) == 1
    before = max(samples(head.page(), "ray_raypar_steps_total"))

    os.kill(json.loads((folder / "members.json").read_text())["driver_pid"], signal.SIGKILL)
    wait_for(
        "new driver on the page",
        run,
        log,
        lambda: max(samples(head.page(), "ray_raypar_driver_failovers_total"), default=0) >= 1,
    )
    wait_for("more steps on the page", run, log, lambda: max(samples(head.page(), "ray_raypar_steps_total")) > before + 5)
    steps, done = max(samples(head.page(), "ray_raypar_steps_total")), max(samples(head.page(), "ray_raypar_committed_steps"))
    assert abs(steps - done) <= 60, "each step was counted once, also over the driver's death"
    assert max(samples(head.page(), "ray_raypar_lost_workers_total")) >= 1
