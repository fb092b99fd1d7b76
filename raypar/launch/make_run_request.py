"""Makes the request for the driver from a checked job and its plan, after all checks of the plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict

from raypar.errors import ConfigError
from raypar.files.json_type import Json
from raypar.job import FunctionConfig, Job
from raypar.job.contract import CHANGES, CODE, DATA_DIGEST, FINGERPRINT, FROZEN, SAMPLES, contract_of_job
from raypar.launch.choose_plan import ChosenPlan
from raypar.launch.launch_options import LaunchOptions
from raypar.launch.user_code_digests import code_of_job, describe_change_beside_training, describe_code_change
from raypar.launch.user_value_digests import FUNCTIONS_OF_DATA, value_digests_of_job
from raypar.plan.wording import count_noun
from raypar.storage.filesystems import pickle_registered_filesystems
from raypar.storage.run_folder import RunFolder
from raypar.user_code.stop_signals import reraise_ctrl_c
from raypar.user_code.user_code_errors import USER_CODE_ERRORS, error_text

if TYPE_CHECKING:
    from raypar.actors.messages import RunRequest
    from raypar.elastic.run_policy import RunPolicy
    from raypar.job.lr_schedule_metric import FollowedMetric
    from raypar.model.graph import Graph
    from raypar.plan import ModelOutline, ParallelPlan
    from raypar.record.events import Resumption
    from raypar.worker.job_preflight import PreflightResult


def make_run_request(
    checked: PreflightResult, chosen: ChosenPlan, options: LaunchOptions, contract: ContractFields
) -> Callable[[RunFolder, str | None], RunRequest]:
    """A function that makes the driver's request from the run folder and the address on which workers listen. `contract`: the
    job's `contract_fields`.

    Lowers the schedule, so that a bad schedule is refused before anything starts. Raises `ConfigError` or `PlanError`.
    """
    from ray import cloudpickle

    from raypar.actors.messages import RunRequest
    from raypar.callbacks import Callbacks
    from raypar.planner.plan_search import reachable_virtual_shard_counts
    from raypar.worker.backend import make_backend
    from raypar.worker.check_model_can_shard import check_other_shard_counts
    from raypar.worker.make_worker_assignments import make_worker_assignments

    spec, graph, plan, orders = options.job, checked.graph, chosen.plan, chosen.schedule_instructions
    shards = reachable_virtual_shard_counts(plan, spec.virtual_shards)
    check_worker_limits(spec, plan.world)
    if spec.elastic is not None:
        check_other_shard_counts(spec, checked, plan, shards)
    outline = _make_outline(spec, graph, shards)
    lowered = make_worker_assignments(spec, graph, plan, orders, validation_samples=checked.samples_of_sets)
    backend = make_backend(spec.device)
    policy = build_run_machine_policy(plan, options, backend.deadlines)
    backend.check_plan(spec, graph, plan, lowered, elastic=spec.elastic is not None)
    environment = backend.environment(spec, graph, plan, lowered)
    pickled_spec = pickle_for_workers(spec.for_workers(), given_parts(spec))
    pickled_callbacks = pickle_for_workers(Callbacks(options.callbacks), {"callbacks": options.callbacks})

    def request(folder: RunFolder, host: str | None) -> RunRequest:
        return RunRequest(
            run=folder.name,
            folder=str(folder.path.resolve()),
            policy=policy,
            plan=plan,
            schedule_name=chosen.schedule_name,
            predicted=chosen.predicted,
            crossing=lowered[0].crossing,
            batching=spec.batching,
            job=spec.for_driver(),
            spec=pickled_spec,
            assignments=cloudpickle.dumps(lowered),
            callbacks=pickled_callbacks,
            outline=outline,
            profile=chosen.profile.with_outline(outline),
            validation_batching=lowered[0].validation_microbatches,
            listen_host=host,
            traced_steps=choose_traced_steps(policy.steps_before_run, policy.end_step, spec.trace_every),
            placement=replace(spec.placement.to_constraints(), gpus=backend.gpus_per_worker),
            environment=environment,
            orphan_timeout_s=options.orphan_timeout_s,
            **contract,
            **resumption_fields(options),
            **storage_fields(folder, options),
        )

    return request


def _make_outline(spec: Job, graph: Graph, shards: Iterable[int]) -> ModelOutline:
    """The job's model as plain data, cut over these numbers of shards."""
    from raypar.model.tensor_parallel.compute_shard_layout import make_model_outline_with_layouts

    sequence, layout = spec.sequence_parallel, dict(spec.layout)
    outline = make_model_outline_with_layouts(graph, shards, dict(spec.styles), layout, sequence=sequence)
    return replace(outline, undivided=spec.undivided)


class ContractFields(TypedDict):
    """Those of a request that `contract_fields` makes."""

    contract: dict[str, Json]
    changes: tuple[str, ...]
    warnings: tuple[str, ...]


class ResumptionFields(TypedDict):
    """Those of a request that `resumption_fields` makes."""

    resumption: Sequence[Resumption] | None
    followed: FollowedMetric | None


class StorageFields(TypedDict, total=False):
    """Those of a request that `storage_fields` makes."""

    resume: str | None
    filesystems: Mapping[str, bytes]
    storage: str
    lease_owner: str
    lease_in_ray: bool


def contract_fields(options: LaunchOptions) -> ContractFields:
    """The fields of a request that say what the run's checkpoints hold of the job, and what has changed of its code and of the
    values that its functions hold. To be asked for before anything calls the user's code: a data set may keep what it has read.
    """
    code = code_of_job(options.job) | value_digests_of_job(options.job)
    said = {one.key.partition(".")[0] for one in options.changes.last}
    changed = describe_code_change(options.former_code, code, said)
    beside: dict[str, Json] = {CODE: code}
    if options.changes.history:
        beside[CHANGES] = options.changes.as_json()
    lines = (changed, describe_change_beside_training(options.former_code, code))
    warnings = tuple(line for line in lines if line is not None)
    return {"contract": {**contract_of_job(options.job), **beside}, "changes": options.changes.lines, "warnings": warnings}


def with_contract_of(contract: ContractFields, job: Job) -> ContractFields:
    """The fields with the contract of `job`, of which the checks before the run have found out more."""
    beside = {key: value for key, value in contract["contract"].items() if key in (CODE, CHANGES)}
    return {**contract, "contract": {**contract_of_job(job), **beside}}


def with_facts_of_data(contract: ContractFields, checked: PreflightResult, options: LaunchOptions) -> ContractFields:
    """The fields, with what the check of the job has found of the data: the number of training samples, a digest where there is
    one, the fingerprint, and a warning where this is another one than that of the checkpoint to resume from."""
    from raypar.worker.data.data_fingerprint import describe_changed_data

    facts: dict[str, Json] = {SAMPLES: checked.samples}
    facts |= {DATA_DIGEST: checked.data_digest} if checked.data_digest is not None else {}
    facts |= {FINGERPRINT: dict(checked.fingerprint)} if checked.fingerprint else {}
    said = {one.key.partition(".")[0] for one in options.changes.last}
    changed = describe_changed_data(options.former_fingerprint, checked.fingerprint, said, options.steps_done)
    return {**contract, "contract": {**contract["contract"], **facts}, "warnings": (*contract["warnings"], *changed)}


def with_frozen_values(contract: ContractFields, table: dict[str, Json]) -> ContractFields:
    """The fields of a run whose checkpoints leave out frozen values. `table`: where these are (`FrozenTable.as_json`)."""
    return {**contract, "contract": {**contract["contract"], FROZEN: table}}


def resumption_fields(options: LaunchOptions) -> ResumptionFields:
    """The fields of a request that say what the run has from before it begins."""
    return {"resumption": options.resumption, "followed": options.job.make_followed_metric(options.validated)}


def storage_fields(folder: RunFolder, options: LaunchOptions) -> StorageFields:
    """The fields of a request that say where the run and the checkpoint to load lie, and how other processes reach them."""
    resume = options.resume.absolute_location() if options.resume is not None else None
    place, weights = folder.shared, options.job.init_from.path if options.job.init_from is not None else ""
    found: StorageFields = {
        "resume": resume,
        "filesystems": pickle_registered_filesystems([folder.place, resume or "", weights]),
    }
    if place:
        found |= {"storage": str(place.uri), "lease_owner": place.owner, "lease_in_ray": place.lease_in_ray}
    return found


def given_parts(spec: Job) -> dict[str, FunctionConfig | None]:
    """Key of a job -> what the user gave for it, of those that may be objects."""
    parts = {"model": spec.model, "loss": spec.loss, "data": spec.data, "optimizer": spec.optimizer}
    more = {f"data.{name}": ref for name in FUNCTIONS_OF_DATA if (ref := getattr(spec.data, name)) is not None}
    more |= {f"metrics.{name}": metric for name, metric in spec.metrics.items()}
    sets = {f"validation.{name}" if name else "validation": one for name, one in spec.validation_sets.items()}
    return {**more, **parts, "lr_schedule": spec.lr_schedule, **sets}


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


def check_worker_limits(job: Job, world: int) -> None:
    """Raise `ConfigError` if a plan of `world` workers is outside of the job's limits on workers."""
    elastic, on_demand = job.elastic, job.placement.on_demand
    if on_demand > world:
        raise ConfigError(
            f"placement.on_demand is {on_demand}, but the plan has {count_noun(world, 'worker')}",
            cure=f"set it to {world} or less",
        )
    if elastic is None:
        return
    if elastic.min_workers > world:
        raise ConfigError(
            f"elastic.min_workers is {elastic.min_workers}, but the plan has {count_noun(world, 'worker')}",
            cure=f"set it to {world} or less",
        )
    if (elastic.max_workers or world) < world:
        raise ConfigError(
            f"elastic.max_workers is {elastic.max_workers}, but the plan has {count_noun(world, 'worker')}",
            cure=f"set it to {world} or more, or leave it out",
        )


def build_run_machine_policy(plan: ParallelPlan, options: LaunchOptions, deadlines: Mapping[str, Any]) -> RunPolicy:
    """The policy of the run machine: how far to train, when to save and validate, and deadlines.

    `deadlines`: those of the kind of device (`DeviceBackend.deadlines`).
    """
    from raypar.elastic.run_policy import RunPolicy

    job = options.job
    return RunPolicy(
        workers=plan.world,
        replica_size=max(stage.shards for stage in plan.stages),
        on_demand=job.placement.on_demand,
        job_steps=job.steps,
        steps_before_run=options.steps_done,
        forward_passes=options.forward_passes,
        validates=job.validation is not None,
        validate_every=job.validation.every if job.validation is not None else 0,
        rates_follow_validations=job.followed_metric is not None,
        validates_first=options.validates_first,
        save_every=job.checkpoint.every,
        save_at_end=job.checkpoint.at_end,
        stop_at=options.stop_at_step,
        block_work=tuple(len(job.batching.microbatches_of_block(block)) for block in range(job.batching.blocks)),
        **(job.elastic.to_policy_fields(job.wait_for_workers_s) if job.elastic is not None else {}),
        **deadlines,
    )


def choose_traced_steps(first: int, end: int, every: int) -> Collection[int]:
    """Numbers of the steps whose instructions are timed; the last one is drawn.

    Without `every` these are a few steps, with the first one among them, because the run may end early.
    """
    if every:
        return range(first, end, every)
    return frozenset(s for s in (first, first + 4, first + 20, first + 100, end - 1) if first <= s < end)
