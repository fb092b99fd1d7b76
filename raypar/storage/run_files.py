"""Which files of a run folder are copied to shared storage, and in which form.

s3://bucket/runs/mine/  lease.json  job.yaml  plan.json  members.json  ...      documents, replaced whole
                        metrics.jsonl/000000000001.jsonl  ...                   lines, in numbered chunks
                        checkpoints/step_00000050/manifest.json  ...            written by the workers and the driver
"""

SENT_DOCUMENT_BYTES = 64 << 20
"""Size limit of a document (`record.folder.DOCUMENTS`)."""
ALL_SENT_FILE = ".sent"
"""An empty file that the driver makes in the working folder once all of the folder is on the storage."""
TEMPORARY_FOLDER_PREFIX = "raypar-"
"""Beginning of the name of the temporary folder that contains a working folder."""
TEMPORARY_SUFFIXES = (".tmp", ".new")
"""Endings of files that are being written."""
