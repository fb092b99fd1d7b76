"""Describes in words what a thread is doing, by known functions in its stack, and how long it has waited for a processor.

The thread itself reports nothing, so this costs nothing until somebody asks.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType

WAITING_FOR_WORKERS = "waiting for other workers"
"""The activity of a worker whose turn it is not."""

STARTING = "starting up"
"""The activity of a worker whose process has not begun to load its code."""
IDLE = "idle"
"""The activity of a worker that executes no call."""

READING_SAMPLE, WAITING_FOR_DATA = "reading sample", "waiting for its data processes"
"""How the activities of a worker begin whose data set has the turn."""

ORDERING, COLLATING = "computing the order", "calling data.collate"
"""The same of a worker in the job's sampler, or its collate function."""

ACTIVITIES: tuple[tuple[str, str, str], ...] = (
    ("torch/__init__.py", "<module>", "loading PyTorch"),
    ("ray/__init__.py", "<module>", "loading Ray"),
    ("raypar/job/function_section.py", "resolve", "importing {self.function}"),
    ("raypar/worker/layer_graph_of_job.py", "_call_model", "calling the model function {spec.model.label}"),
    ("raypar/worker/data/user_dataset.py", "make_dataset", "making the data set {spec.label}"),
    ("raypar/worker/data/sample_reader.py", "_sample", READING_SAMPLE + " {index}"),
    ("raypar/worker/data/stream_source.py", "read", READING_SAMPLE + " {self._index} of stream {self.stream}"),
    ("raypar/worker/data/stream_source.py", "skip", READING_SAMPLE + " {self._index} of stream {self.stream}"),
    ("raypar/worker/data/sampler_weights_group_by.py", "_drawn", ORDERING + " of epoch {epoch} ({self.key} {self.label})"),
    ("raypar/worker/data/sampler_weights_group_by.py", "_numbers", ORDERING + " of all epochs ({key} {ref.label})"),
    ("raypar/worker/data/collate.py", "values", COLLATING + " {self.label}"),
    ("raypar/worker/data/microbatch_loader.py", "_wait", WAITING_FOR_DATA + " to read {where}"),
    (
        "raypar/worker/data/fed_stream_reader.py",
        "_wait_for",
        WAITING_FOR_DATA + " to read sample {position} of stream {self.stream}",
    ),
    ("raypar/worker/metrics/stage_metrics.py", "measure", "computing the metric {name}"),
    ("raypar/worker/metrics/stage_metrics.py", "add", "merging states of the metric {name}"),
    ("raypar/worker/metrics/stage_metrics.py", "values", "computing the metric {name}"),
    ("raypar/worker/stage/loss.py", "make_loss_function", "making the loss {ref.label}"),
    ("raypar/worker/job_preflight.py", "_check_lr_schedule", "calling the lr_schedule {ref.label}"),
    ("raypar/worker/check_layer_shapes.py", "check_layer_shapes", "checking the shapes of layer {layer.name}"),
    ("raypar/model/tensor_parallel/meta_check.py", "check_shards_on_meta", "checking the layers on shards"),
    ("raypar/worker/measure_profile.py", "_profile_layer", "measuring layer {index} (from 0)"),
    ("raypar/worker/measure_profile.py", "profile_loopback", "measuring a connection between two workers"),
    ("raypar/planner/plan_search.py", "search_plans", "comparing plans"),
    ("raypar/actors/ray_connection.py", "start_ray_with_retries", "starting Ray on this machine"),
    ("raypar/actors/ray_connection.py", "join_cluster", "joining the Ray cluster at {address}"),
    ("raypar/actors/ray_connection.py", "leave_cluster", "leaving the Ray cluster"),
    ("raypar/actors/local_nodes.py", "start_local_nodes", "starting the nodes of the local Ray cluster"),
    ("raypar/actors/local_cluster_temp_folder.py", "remove_local_ray_on_exit", "ending the local Ray cluster"),
    ("raypar/actors/driver_client.py", "wait_for_driver_answer", "waiting for the driver's process"),
    ("raypar/actors/driver_client.py", "remove_run_from_cluster", "removing the run from the cluster"),
    ("raypar/actors/run_state_in_ray_kv.py", "commit", "waiting for Ray's control store"),
    ("raypar/worker/pretrained/weights_file.py", "read", "reading the weights {name}"),
    ("raypar/worker/pretrained/weights_file.py", "fingerprint", "computing the fingerprint of the weights file"),
    ("raypar/worker/state/checkpoint_snapshot.py", "restore_from_checkpoint", "loading the checkpoint"),
    ("raypar/worker/state/checkpoint_snapshot.py", "take_snapshot", "copying its state for the checkpoint"),
    ("raypar/worker/state/checkpoint_snapshot.py", "_wait", "writing its part of the checkpoint"),
    ("raypar/worker/checkpoint/checkpoint_files.py", "verify_checkpoint", "checking the files of {checkpoint}"),
    ("raypar/worker/checkpoint/checkpoint_files.py", "commit_checkpoint", "committing the checkpoint"),
    ("raypar/worker/checkpoint/checkpoint_files.py", "checkpoint_weights_hash", "computing the hash of all weights"),
    ("raypar/launch/launch_run.py", "generate_text_with_checkpoint", "generating the sample text"),
    ("raypar/worker/process_warm_up.py", "warm_up_process", "warming up"),
    ("raypar/comm/tcp/rendezvous.py", "connect", "connecting to the other workers"),
    ("raypar/comm/nccl/connect.py", "connect_nccl", "setting up NCCL"),
    ("raypar/comm/transport.py", "wait_named", WAITING_FOR_WORKERS),
    ("raypar/worker/stage/layer_call.py", "__call__", "computing {self.label}"),
    ("raypar/worker/stage/backward.py", "run_autograd_backward", "computing gradients"),
    ("raypar/actors/run_recorder.py", "start_callbacks", "starting callbacks"),
    ("raypar/actors/run_recorder.py", "_call", "running callbacks: {hook}"),
)
"""(file, function, activity of a thread that executes the function, with the function's variables in braces)."""

PURPOSES: tuple[tuple[str, str, str], ...] = (
    ("raypar/worker/measure_profile.py", "_load_before_run", " (read before the run: {what})"),
    ("raypar/worker/data/stream_reader.py", "_skip", " ({search})"),
)
"""The same of functions that say for what an activity further in is; their words are added."""

COMPUTING = {"raypar/worker/stage/layer_call.py", "raypar/worker/stage/backward.py"}
"""Files whose activities count only if no frame further out has one: a layer is also computed while it is measured."""


def describe_thread_activity(thread: int) -> str | None:
    """What the thread with this `ident` is doing, such as `reading sample 17`; None if none of its frames is in `ACTIVITIES`.

    The innermost known frame counts: a sample is read in the middle of a step.
    """
    frame = sys._current_frames().get(thread)
    return describe_activity(frame)


def reads_samples(thread: int) -> bool:
    """Whether the thread with this `ident` reads samples of the user's data set, or waits for data processes that do; with the
    job's sampler and collate function."""
    return (describe_thread_activity(thread) or "").startswith((READING_SAMPLE, WAITING_FOR_DATA, ORDERING, COLLATING))


def describe_activity(frame: FrameType | None) -> str | None:
    """What the thread with this innermost frame is doing."""
    found: str | None = None
    computing: str | None = None
    while frame is not None:
        code = frame.f_code
        for file, function, words in ACTIVITIES if found is None else PURPOSES:
            if code.co_name == function and code.co_filename.replace(os.sep, "/").endswith(f"/{file}"):
                if found is not None:
                    return found + _fill_in(words, frame)
                if file in COMPUTING:
                    computing = computing or _fill_in(words, frame)
                else:
                    found = _fill_in(words, frame)
                break
        frame = frame.f_back
    return found or computing


def _fill_in(words: str, frame: FrameType) -> str:
    """The words with the function's variables filled in; only those before the first brace if a variable is not set yet."""
    try:
        return words.format(**frame.f_locals)
    except Exception:  # also what a user's `__repr__` raises
        return words.partition("{")[0].rstrip(" (:")


def thread_cpu_wait_s(thread: int) -> float:
    """Seconds since its start in which `thread` (native id, of this process) was runnable but had no processor.

    0 where the kernel does not report it.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
