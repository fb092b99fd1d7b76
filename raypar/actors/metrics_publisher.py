"""Publishes a run's metrics through `ray.util.metrics`, for Prometheus. It never raises, so that no run fails because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raypar.telemetry.metric_definitions import METRIC_DEFINITIONS
from raypar.telemetry.run_telemetry import Labels, RunTelemetry

if TYPE_CHECKING:
    from ray.util.metrics import Metric

PUBLISH_S = 2.0
"""Time between two publications. Ray exports metrics every 10 s, unless the cluster is configured otherwise."""
PUBLISH_S_PER_WORKER = 0.01
"""With many workers, who have series of their own, the time between two publications is longer, by their number. Ray hands on
what is published every 10 s."""


class MetricsPublisher:
    """The metrics of one run in `ray.util.metrics`; call it from one thread at a time.

    A counter is increased by the difference to its last published total. So a new driver's first publication adds the whole
    total of the run.
    """

    def __init__(self, run: str, job_steps: int, price: float | None) -> None:
        self.run = run
        """The run's name, a label of every metric."""
        self.job_steps = job_steps
        """Steps of the job."""
        self.price = price
        """Price of one worker for an hour; None: no costs are published."""
        self.failed = False
        """Whether Ray has refused a metric; then nothing more is published."""
        self._metrics: dict[str, Any] = {}
        """Name -> Ray's metric; empty before the first publication."""
        self._given: dict[tuple[str, Labels], float] = {}
        """(counter, labels) -> its total so far."""
        self._shown: set[tuple[str, Labels]] = set()
        """(gauge, labels) of the last publication, of gauges with labels."""

    def publish(self, telemetry: RunTelemetry) -> str | None:
        """Publish the values of a run. Returns the reason when that fails for the first time."""
        durations = telemetry.take_durations()
        if self.failed:
            return None
        try:
            if not self._metrics:
                self._metrics = make_ray_metrics()
            self._publish(telemetry, durations)
        except Exception as error:  # training goes on, whatever the error
            self.failed = True
            return f"{type(error).__name__}: {error}"
        return None

    def _publish(self, telemetry: RunTelemetry, durations: list[float]) -> None:
        """Set Ray's metrics to the present values. Raises what Ray raises."""
        gauges: dict[tuple[str, Labels], float] = {}
        for name, labels, value in telemetry.values(self.job_steps, self.price):
            metric, tags = self._metrics[name], {"run": self.run, **dict(labels)}
            if name.endswith("_total"):
                before = self._given.get((name, labels))
                if before is None:
                    show_counter_at_zero(metric, tags)
                if value > (before or 0.0):
                    metric.inc(value - (before or 0.0), tags=tags)
                self._given[name, labels] = max(value, before or 0.0)
            else:
                gauges[name, labels] = value
        before_or_now = {**dict.fromkeys(self._shown, 0.0), **gauges}  # 0 for seats that do not exist any more
        for (name, labels), value in before_or_now.items():
            self._metrics[name].set(value, tags={"run": self.run, **dict(labels)})
        self._shown = {(name, labels) for name, labels in gauges if labels}
        for seconds in durations:
            self._metrics["raypar_step_duration_seconds"].observe(seconds, tags={"run": self.run})


def make_ray_metrics() -> dict[str, Metric]:
    """Name -> metric of `ray.util.metrics`."""
    from ray.util.metrics import Counter, Gauge, Histogram

    made: dict[str, Metric] = {}
    for one in METRIC_DEFINITIONS:
        given: dict[str, Any] = {"name": one.name, "description": one.description, "tag_keys": ("run", *one.labels)}
        if one.kind == "histogram":
            made[one.name] = Histogram(**given, boundaries=list(one.buckets))
        else:
            made[one.name] = (Counter if one.kind == "counter" else Gauge)(**given)
    return made


def show_counter_at_zero(counter: Metric, tags: dict[str, str]) -> None:
    """Make a counter appear with the value 0, so that Prometheus sees its first increase.

    Ray's `inc` refuses 0, but its private `_record` does not. Without `_record` the counter first appears with a larger value.
    """
    record = getattr(counter, "_record", None)
    if record is not None:
        record(0.0, tags=tags)
