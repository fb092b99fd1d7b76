"""Counts the steps of a job whose length is given in epochs, before anything else is made of it."""

from __future__ import annotations

from raypar.errors import ConfigError
from raypar.job import Job
from raypar.launch.activity_reporter import ActivityReporter
from raypar.launch.launch_options import EventHandler
from raypar.plan.wording import count_noun
from raypar.user_code.user_code_errors import make_importable


def with_steps_of_epochs(job: Job, tell: EventHandler) -> Job:
    """The job with its number of steps. Where it gives `epochs`, its data set is made, and asked for its length.

    Raises what makes no data set of `data`, and `ConfigError` for epochs of no whole step, or of too many steps.
    """
    if job.epochs is None or job.steps is not None:
        return job
    from raypar.launch.launch_run import keep_callers_state
    from raypar.worker.data.sample_order import SampleOrder
    from raypar.worker.data.user_dataset import is_stream, make_dataset
    from raypar.worker.process.torch_state_guard import TorchStateGuard

    make_importable(job.source_dir)
    with ActivityReporter(tell).reporting(), keep_callers_state():
        guard = TorchStateGuard(job.threads)
        guard.establish()
        with guard.watching("the job's data"):
            dataset = make_dataset(job.data)
            if is_stream(dataset):
                raise ConfigError(
                    f"epochs is {job.epochs:g}, and data set {job.data.label} is iterable: its samples are not counted",
                    cure=f"set steps in the place of epochs: samples x {job.epochs:g} / {job.batch_size}",
                )
            order = SampleOrder.of_job(job, dataset, guard)
            assert isinstance(order, SampleOrder), "a job has no epochs of a mixture"
            samples = order.epoch_samples
    return job.replace(steps=job.steps_of_epochs(samples))


def length_in_words(job: Job) -> str:
    """The length of a job's run: `300 steps (3 epochs)`, or `300 steps` where the job gives steps."""
    steps = count_noun(job.steps, "step")
    return steps if job.epochs is None else f"{steps} ({count_noun(f'{job.epochs:g}', 'epoch')})"
