"""Which files of a run folder lie on shared storage too, and in which form.

s3://bucket/runs/mine/  lease.json  job.yaml  plan.json  members.json  ...      documents, replaced whole
                        metrics.jsonl/000000000001.jsonl  ...                   lines, in numbered chunks
                        checkpoints/step_00000050/manifest.json  ...            written by the workers and the driver
"""

DOCUMENTS = (
    "job.yaml", "plan.json", "members.json", "cluster.json", "totals.json", "trace.json", "swimlane.svg", "wandb.id",
    "mlflow.id", "error.txt",
)  # fmt: skip
"""Files that are replaced whole."""
LINE_FILES = ("metrics.jsonl", "events.jsonl")
"""Files to which lines are added."""
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints."""
DOCUMENT_BYTES = 64 << 20
"""Size limit of a document."""
SENT_MARK = ".sent"
"""A file in a working folder all of which is on the storage: its driver has ended in order."""
ROOM_PREFIX = "raypar-"
"""How the name of the temporary folder begins in which a working folder lies."""
TEMPORARY = (".tmp", ".new")
"""Endings of files that are being written."""
