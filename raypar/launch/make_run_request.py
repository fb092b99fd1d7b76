"""Makes the request for the driver from a checked job and its plan, after all checks of the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raypar.errors import ConfigError
from raypar.launch.chosen_plan import ChosenPlan
from raypar.launch.code_of_job import code_of_job, describe_code_change
from raypar.launch.launch_options import LaunchOptions
from raypar.storage.filesystems import pickle_registered_filesystems
from raypar.storage.run_folder import RunFolder
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.job_spec import JobSpec, contract_of_job

if TYPE_CHECKING:
    from raypar.actors.run_request import RunRequest
    from raypar.elastic.run_policy import RunPolicy
    from raypar.plan import ParallelPlan
    from raypar.worker.job_preflight import PreflightResult

OPTIONS_OF_REQUESTS = (
    "keep_checkpoints", "max_time_s", "wait_for_workers_s", "orphan_timeout_s", "price_per_worker_hour", "resumption",
)  # fmt: skip
"""Options of a run that its request has too, under the same names."""


def make_run_request(
    spec: JobSpec, checked: PreflightResult, chosen: ChosenPlan, options: LaunchOptions
) -> Callable[[RunFolder, str | None], RunRequest]:
    """A function that makes the driver's request from the run folder and the address on which workers listen.

    Lowers the schedule, so that a bad schedule is refused before anything starts. Raises `ConfigError` or `PlanError`.
    """
    from ray import cloudpickle

    from raypar.actors.run_request import RunRequest
    from raypar.callbacks import Callbacks
    from raypar.model.tensor_parallel.layout import make_model_outline_with_layouts
    from raypar.planner.plan_search import possible_shard_counts
    from raypar.worker.backend import make_backend
    from raypar.worker.job_preflight import check_other_shard_counts
    from raypar.worker.worker_assignments import make_worker_assignments

    check_worker_limits(options, chosen.plan.world)
    shards = possible_shard_counts(chosen.plan)
    if options.elastic is not None:
        check_other_shard_counts(spec, checked, chosen.plan, shards)
    outline = make_model_outline_with_layouts(checked.graph, shards, dict(spec.styles))
    lowered = make_worker_assignments(
        spec, checked.graph, chosen.plan, chosen.schedule_instructions, validation_samples=checked.validation_samples
    )
    backend = make_backend(spec.device)
    policy = build_run_machine_policy(spec, chosen.plan, options, backend.deadlines)
    backend.check_plan(spec, checked.graph, chosen.plan, lowered, elastic=options.elastic is not None)
    pickled_spec = pickle_for_workers(spec, given_parts(spec))
    pickled_callbacks = pickle_for_workers(Callbacks(options.callbacks), {"callbacks": options.callbacks})
    code = code_of_job(spec)
    changed = describe_code_change(options.former_code, code)

    def request(folder: RunFolder, host: str | None) -> RunRequest:
        return RunRequest(
            run=folder.name,
            folder=str(folder.path.resolve()),
            policy=policy,
            plan=chosen.plan,
            schedule_name=chosen.schedule_name,
            predicted=chosen.predicted,
            crossing=lowered[0].crossing,
            batching=spec.batching,
            spec=pickled_spec,
            assignments=tuple(cloudpickle.dumps(a) for a in lowered),
            callbacks=pickled_callbacks,
            contract={**contract_of_job(spec), "code": code},
            warnings=() if changed is None else (changed,),
            outline=outline,
            profile=chosen.profile.with_outline(outline),
            validation_batching=lowered[0].validation_microbatches,
            listen_host=host,
            traced_steps=choose_traced_steps(policy.steps_before_run, policy.end, options.trace_every),
            placement=replace(options.placement, gpus=backend.gpus_per_worker),
            environment=backend.environment,
            **storage_fields(folder, options, spec),
            **{name: getattr(options, name) for name in OPTIONS_OF_REQUESTS},
        )

    return request


def storage_fields(folder: RunFolder, options: LaunchOptions, spec: JobSpec) -> dict[str, Any]:
    """The fields of a request that say where the run and the checkpoint to load lie, and how other processes reach them."""
    resume = options.resume.absolute_location() if options.resume is not None else None
    place, weights = folder.shared, spec.init_from.path if spec.init_from is not None else ""
    return {
        "resume": resume,
        "filesystems": pickle_registered_filesystems([folder.place, resume or "", weights]),
        **({"storage": str(place.uri), "lease_owner": place.owner, "lease_in_ray": place.lease_in_ray} if place else {}),
    }


def given_parts(spec: JobSpec) -> dict[str, Any]:
    """Key of a job -> what the user gave for it, of those that may be objects."""
    parts = {"model": spec.model, "loss": spec.loss, "data": spec.data, "optimizer": spec.optimizer}
    return {**parts, "lr_schedule": spec.lr_schedule, "validation": spec.validation}


def pickle_for_workers(value: Any, parts: Mapping[str, Any]) -> bytes:
    """`value` as bytes. Raises `ConfigError` that names the one of `parts` which holds what no other process can have."""
    from ray import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value))
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        which = "the job"
        for name, part in parts.items():
            try:
                cloudpickle.dumps(part)
            except USER_CODE_ERRORS:
                which = name
                break
        raise ConfigError(
            f"{which} cannot be sent to other processes: {error_text(error)}",
            cure="open files, locks and connections where they are used first, or give a function that makes the object there, "
            "with its arguments: (function, {...})",
        ) from error


def check_worker_limits(options: LaunchOptions, world: int) -> None:
    """Raise `ConfigError` if a plan of `world` workers is outside of the job's limits on workers."""
    elastic, on_demand = options.elastic, options.placement.on_demand
    if on_demand > world:
        raise ConfigError(
            f"placement.on_demand is {on_demand}, but the plan has {world} workers", cure=f"set it to {world} or less"
        )
    if elastic is None:
        return
    if elastic.min_workers > world:
        raise ConfigError(
            f"elastic.min_workers is {elastic.min_workers}, but the plan has {world} workers",
            cure=f"set it to {world} or less",
        )
    if (elastic.max_workers or world) < world:
        raise ConfigError(
            f"elastic.max_workers is {elastic.max_workers}, but the plan has {world} workers",
            cure=f"set it to {world} or more, or leave it out",
        )


def build_run_machine_policy(
    spec: JobSpec, plan: ParallelPlan, options: LaunchOptions, deadlines: Mapping[str, Any]
) -> RunPolicy:
    """The policy of the run machine: how far to train, when to save and validate, and deadlines.

    `deadlines`: those of the kind of device (`DeviceBackend.deadlines`).
    """
    from raypar.elastic.run_policy import RunPolicy

    return RunPolicy(
        workers=plan.world,
        replica_size=max(stage.shards for stage in plan.stages),
        on_demand=options.placement.on_demand,
        job_steps=spec.steps,
        steps_before_run=options.steps_done,
        validates=spec.validation is not None,
        validate_every=spec.validation.every if spec.validation is not None else 0,
        save_every=options.save_every,
        save_at_end=options.save_at_end,
        stop_at=options.stop_at_step,
        **(options.elastic.to_policy_fields(options.wait_for_workers_s) if options.elastic is not None else {}),
        **deadlines,
    )


def choose_traced_steps(first: int, end: int, every: int) -> Collection[int]:
    """Numbers of the steps whose instructions are timed; the last one is drawn.

    Without `every` these are a few steps, with the first one among them, because the run may end early.
    """
    if every:
        return range(first, end, every)
    return frozenset(s for s in (first, first + 4, first + 20, first + 100, end - 1) if first <= s < end)
