"""The files of a run folder. Pure.

`events.py` defines the lines of metrics.jsonl and events.jsonl. Documents may have unknown keys; a known key has a value of its
type, or is null or absent where that is allowed.
"""

from __future__ import annotations

from pathlib import Path

JOB = "job.yaml"
"""The job with its overrides and defaults written out; loads like any job file."""
PLAN = "plan.json"
"""The plan of the last start, or of the last generation with another plan."""
METRICS = "metrics.jsonl"
"""One line per committed step or validation."""
EVENTS = "events.jsonl"
"""One line per event of the run."""
MEMBERS = "members.json"
"""The present phase, plan and workers; replaced as a whole at every change."""
CLUSTER = "cluster.json"
"""Address of the last start's Ray cluster, and the raylets of a local one."""
TOTALS = "totals.json"
"""Totals since the run's first start (`totals.RunTotals`); replaced as a whole."""
SAMPLES = "samples.bin"
"""Digests of the samples of iterable data, and where its epochs begin; 8 bytes for each microbatch and stream of a step."""
CURSORS = "cursors.json"
"""From where streams of iterable data can be read on: states of data sets that keep their place; replaced as a whole."""
TRACE = "trace.json"
"""Chrome/Perfetto trace of a measured step, with the data of the drawing in its `otherData`."""
SWIMLANE = "swimlane.svg"
"""Drawing of the predicted and the measured step."""
ERROR = "error.txt"
"""The error of a failed run, with all frames."""
WHY_NO_JOB = "why_no_job.txt"
"""Functions and objects of a job given in Python that a job file cannot name. Written instead of job.yaml."""
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints."""
OUTPUTS = "outputs"
"""The folder of what a run of forward passes keeps: a file for each microbatch (`output_file`), until they are taken."""
TRACKER_IDS = ("wandb.id", "mlflow.id")
"""The run's ids in trackers."""
LINE_FILES = (METRICS, EVENTS)
"""Files to which lines are added."""
RECORD_FILES = (SAMPLES,)
"""Files of bytes that grow at their end, where what was written last may be written again."""
DOCUMENTS = (JOB, PLAN, MEMBERS, CLUSTER, TOTALS, CURSORS, TRACE, SWIMLANE, *TRACKER_IDS, ERROR, WHY_NO_JOB)
"""Files that are replaced whole."""


def output_file(folder: Path, microbatch: int) -> Path:
    """The file of a run folder with what was kept of a microbatch of the whole data set."""
    return folder / OUTPUTS / f"{microbatch:012d}"
