"""The metrics that a run publishes for Prometheus: name, kind, labels and meaning of each.

Ray publishes them on the metrics page of the node on which the run's driver is, with `ray_` before their names and with labels
of its own (`WorkerId`, ...). A driver that takes over publishes series of its own, which begin with the run's totals, beside
those of the former driver, which stay where they ended. So take the largest over all labels but these: `max by (run) (...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCRAPED_PREFIX = "ray_"
"""What Ray puts before the name of every metric."""


@dataclass(frozen=True)
class MetricDefinition:
    """One metric."""

    name: str
    """Its name, with the unit at its end."""
    kind: Literal["gauge", "counter", "histogram"]
    """What Prometheus takes it for."""
    description: str
    """What it counts, for the metrics page."""
    labels: tuple[str, ...] = ()
    """Names of its labels, beside `run`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    @property
    def scraped_names(self) -> tuple[str, ...]:
        """The names of its samples on a metrics page."""
        name = SCRAPED_PREFIX + self.name
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if self.kind == "histogram" else (name,)


SEAT = ("stage", "replica", "shard")
"""Labels of a worker's seat. Numbers of workers would be new series after every loss."""

STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Bounds of the histogram of step times. Ray hands on how many steps were in each bucket, not their times, so that the sum of
the histogram is an estimate; `raypar_step_seconds_total` is exact."""

METRICS: tuple[MetricDefinition, ...] = (
    MetricDefinition("raypar_committed_steps", "gauge", "Steps of the run that are done, those before a resumption too"),
    MetricDefinition("raypar_job_steps", "gauge", "Steps of the job"),
    MetricDefinition("raypar_generation", "gauge", "Number of the present generation of workers"),
    MetricDefinition("raypar_loss", "gauge", "Loss of the last step"),
    MetricDefinition("raypar_validation_loss", "gauge", "Loss of the last validation"),
    MetricDefinition("raypar_gradient_norm", "gauge", "Norm of the last step's gradient before clipping"),
    MetricDefinition("raypar_samples_per_second", "gauge", "Samples a second in the last steps, pauses not counted"),
    MetricDefinition("raypar_bubble_ratio", "gauge", "Share of the last steps' worker time in which workers did not compute"),
    MetricDefinition(
        "raypar_goodput_ratio", "gauge", "Worker time in steps that count over all worker time since the first step"
    ),
    MetricDefinition("raypar_workers", "gauge", "Workers by state: seated, spare, starting, pending", ("state",)),
    MetricDefinition("raypar_pending_replicas", "gauge", "Replicas for whose workers the cluster has no room yet"),
    MetricDefinition(
        "raypar_cost_per_sample", "gauge", "Cost of all worker time over all samples; needs price_per_worker_hour"
    ),
    MetricDefinition("raypar_worker_busy_ratio", "gauge", "Share of the last steps in which the worker computed", SEAT),
    MetricDefinition(
        "raypar_worker_memory_bytes",
        "gauge",
        "Memory of the worker: rss, peak_rss, gpu_allocated, gpu_reserved",
        (*SEAT, "kind"),
    ),
    MetricDefinition("raypar_step_duration_seconds", "histogram", "Times of steps, pauses not counted", (), STEP_BUCKETS_S),
    MetricDefinition("raypar_steps_total", "counter", "Committed steps, each once"),
    MetricDefinition("raypar_skipped_steps_total", "counter", "Committed steps that changed nothing: loss or norm not finite"),
    MetricDefinition("raypar_samples_total", "counter", "Samples of committed steps"),
    MetricDefinition("raypar_step_seconds_total", "counter", "Time in committed steps, pauses not counted"),
    MetricDefinition("raypar_useful_worker_seconds_total", "counter", "Time in committed steps times their workers"),
    MetricDefinition("raypar_worker_seconds_total", "counter", "Time for which the run has held workers, idle ones too"),
    MetricDefinition("raypar_recoveries_total", "counter", "Changes of workers or plan during the run"),
    MetricDefinition("raypar_recovery_pause_seconds_total", "counter", "Time without a step because of such changes"),
    MetricDefinition("raypar_replayed_steps_total", "counter", "Steps that were executed again because of such changes"),
    MetricDefinition("raypar_lost_workers_total", "counter", "Workers that were lost"),
    MetricDefinition("raypar_joined_workers_total", "counter", "Workers that have joined during the run"),
    MetricDefinition("raypar_driver_failovers_total", "counter", "Drivers that were lost and replaced"),
    MetricDefinition(
        "raypar_communication_bytes_total", "counter", "Payload that workers have sent each other, by operation", ("kind",)
    ),
    MetricDefinition("raypar_cost_total", "counter", "Cost of all worker time; needs price_per_worker_hour"),
)
"""All metrics of a run."""

BY_NAME = {metric.name: metric for metric in METRICS}
"""Name -> metric."""


def scraped_names() -> frozenset[str]:
    """The names of all samples that a run's metrics have on a metrics page."""
    return frozenset(name for metric in METRICS for name in metric.scraped_names)
