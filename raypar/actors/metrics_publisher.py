"""Publishes a run's metrics through Ray, from where Prometheus scrapes them. Never raises: no run depends on it."""

from __future__ import annotations

from typing import Any

from raypar.telemetry.metric_definitions import METRICS
from raypar.telemetry.run_telemetry import Labels, RunTelemetry

PUBLISH_S = 2.0
"""Time from one publication to the next. Ray hands metrics on every 10 s, unless the cluster is set to less."""


class MetricsPublisher:
    """The metrics of one run in `ray.util.metrics`; call it from one thread at a time.

    Counters are given the difference to what this process has given them before, so that the first publication of a driver
    which takes over gives the run's totals.
    """

    def __init__(self, run: str, job_steps: int, price_per_worker_hour: float | None) -> None:
        self.run = run
        """The run's name, a label of every metric."""
        self.job_steps = job_steps
        """Steps of the job."""
        self.price_per_worker_hour = price_per_worker_hour
        """The price of a worker; None: costs are not published."""
        self.failed = False
        """Whether Ray has refused a metric; then nothing more is published."""
        self._metrics: dict[str, Any] = {}
        """Name -> Ray's metric; empty before the first publication."""
        self._given: dict[tuple[str, Labels], float] = {}
        """(counter, labels) -> what it was given so far."""
        self._shown: set[tuple[str, Labels]] = set()
        """Gauges with labels that were set at the last publication."""

    def publish(self, telemetry: RunTelemetry) -> str | None:
        """Publish the values of a run. Returns the reason when that fails for the first time."""
        durations = telemetry.take_durations()
        if self.failed:
            return None
        try:
            if not self._metrics:
                self._metrics = make_ray_metrics()
            self._publish(telemetry, durations)
        except Exception as error:  # whatever it is, training goes on
            self.failed = True
            return f"{type(error).__name__}: {error}"
        return None

    def _publish(self, telemetry: RunTelemetry, durations: list[float]) -> None:
        """Give Ray all values. Raises what Ray raises."""
        shown = set()
        for name, labels, value in telemetry.values(self.job_steps, self.price_per_worker_hour):
            metric, tags = self._metrics[name], {"run": self.run, **dict(labels)}
            if name.endswith("_total"):
                before = self._given.get((name, labels))
                if before is None:
                    show_counter_at_zero(metric, tags)
                if value > (before or 0.0):
                    metric.inc(value - (before or 0.0), tags=tags)
                self._given[name, labels] = max(value, before or 0.0)
            else:
                metric.set(value, tags=tags)
                if labels:
                    shown.add((name, labels))
        for name, labels in self._shown - shown:  # a seat that is no more
            self._metrics[name].set(0.0, tags={"run": self.run, **dict(labels)})
        self._shown = shown
        for seconds in durations:
            self._metrics["raypar_step_duration_seconds"].observe(seconds, tags={"run": self.run})


def make_ray_metrics() -> dict[str, Any]:
    """Name -> metric of `ray.util.metrics`."""
    from ray.util.metrics import Counter, Gauge, Histogram

    made: dict[str, Any] = {}
    for one in METRICS:
        given = {"name": one.name, "description": one.description, "tag_keys": ("run", *one.labels)}
        if one.kind == "histogram":
            made[one.name] = Histogram(**given, boundaries=list(one.buckets))
        else:
            made[one.name] = (Counter if one.kind == "counter" else Gauge)(**given)
    return made


def show_counter_at_zero(counter: Any, tags: dict[str, str]) -> None:
    """Have a counter appear with the value 0, so that Prometheus sees its first increment.

    Ray's `inc` takes no 0, the method below it does. Without that method the counter appears when it is not 0 any more.
    """
    record = getattr(counter, "_record", None)
    if record is not None:
        record(0.0, tags=tags)
