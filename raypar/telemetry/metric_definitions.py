"""The metrics that a run publishes for Prometheus: name, kind, labels and meaning of each.

Ray publishes them on the metrics page of the driver's node, with the prefix `ray_` and labels of its own (`WorkerId`, ...).
A new driver of the same run publishes new series, which start at the run's totals, while the series of the former driver stay
at their last values. So queries take the maximum over Ray's labels: `max by (run) (...)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SCRAPED_PREFIX = "ray_"
"""The prefix that Ray gives the name of every metric."""


@dataclass(frozen=True)
class MetricDefinition:
    """The definition of one metric."""

    name: str
    """Its name, which ends with the unit."""
    kind: Literal["gauge", "counter", "histogram"]
    """Its type in Prometheus."""
    description: str
    """Its help text on the metrics page."""
    labels: tuple[str, ...] = ()
    """Names of its labels, beside `run`."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""

    @property
    def scraped_names(self) -> tuple[str, ...]:
        """The names of its samples on a metrics page."""
        name = SCRAPED_PREFIX + self.name
        return (f"{name}_bucket", f"{name}_sum", f"{name}_count") if self.kind == "histogram" else (name,)


SEAT_LABELS = ("stage", "replica", "shard")
"""Labels of a worker's seat. Labels with worker numbers would begin new series after every loss of a worker."""

STEP_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
"""Bounds of the histogram of step times. Ray exports only the count of each bucket, so the histogram's sum is an estimate;
`raypar_step_seconds_total` is exact."""

METRIC_DEFINITIONS: tuple[MetricDefinition, ...] = (
    MetricDefinition("raypar_committed_steps", "gauge", "Steps of the run that are done, those before a resumption too"),
    MetricDefinition("raypar_job_steps", "gauge", "Steps of the job"),
    MetricDefinition("raypar_generation", "gauge", "Number of the present generation of workers"),
    MetricDefinition("raypar_loss", "gauge", "Loss of the last step"),
    MetricDefinition("raypar_validation_loss", "gauge", "Loss of the last validation"),
    MetricDefinition("raypar_metric", "gauge", "Last value of each of the job's metrics, by name", ("metric",)),
    MetricDefinition("raypar_gradient_norm", "gauge", "Norm of the last step's gradient before clipping"),
    MetricDefinition("raypar_learning_rate", "gauge", "Learning rate of the last step, without those of groups of their own"),
    MetricDefinition("raypar_loss_scale", "gauge", "Scale of the last step's loss; with float16 alone"),
    MetricDefinition("raypar_samples_per_second", "gauge", "Samples a second in the last steps, pauses not counted"),
    MetricDefinition("raypar_bubble_ratio", "gauge", "Share of the last steps' worker time in which workers did not compute"),
    MetricDefinition("raypar_data_wait_ratio", "gauge", "Share of the last steps in which a worker waited for samples"),
    MetricDefinition(
        "raypar_goodput_ratio", "gauge", "Worker time in steps that count over all worker time since the first step"
    ),
    MetricDefinition("raypar_workers", "gauge", "Workers by state: seated, spare, starting, pending", ("state",)),
    MetricDefinition("raypar_pending_replicas", "gauge", "Replicas for whose workers the cluster has no room yet"),
    MetricDefinition(
        "raypar_cost_per_sample", "gauge", "Cost of all worker time over all samples; needs price_per_worker_hour"
    ),
    MetricDefinition("raypar_worker_busy_ratio", "gauge", "Share of the last steps in which the worker computed", SEAT_LABELS),
    MetricDefinition(
        "raypar_worker_memory_bytes",
        "gauge",
        "Memory of the worker: rss, peak_rss, empty (before the model), gpu_allocated, gpu_reserved; of its tensors parameter, "
        "master, optimizer, average, buffer, mirror",
        (*SEAT_LABELS, "kind"),
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
    MetricDefinition(
        "raypar_replayed_steps_total", "counter", "Steps that were executed again because of such changes or resumptions"
    ),
    MetricDefinition("raypar_lost_workers_total", "counter", "Workers that were lost"),
    MetricDefinition("raypar_joined_workers_total", "counter", "Workers that have joined during the run"),
    MetricDefinition("raypar_driver_failovers_total", "counter", "Drivers that were lost and replaced"),
    MetricDefinition(
        "raypar_communication_bytes_total", "counter", "Payload that workers have sent each other, by operation", ("kind",)
    ),
    MetricDefinition("raypar_cost_total", "counter", "Cost of all worker time; needs price_per_worker_hour"),
)
"""All metrics of a run."""

DEFINITION_BY_NAME = {metric.name: metric for metric in METRIC_DEFINITIONS}
"""Name -> metric."""


def scraped_names() -> frozenset[str]:
    """The names of all samples that a run's metrics have on a metrics page."""
    return frozenset(name for metric in METRIC_DEFINITIONS for name in metric.scraped_names)
