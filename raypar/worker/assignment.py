"""A job's layer graph, and the assignments that the driver sends to the workers once per plan."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from raypar.errors import ModelError, RayparError, UserCodeError
from raypar.model.build import named_state
from raypar.model.capture import capture, layers_in, without_values
from raypar.model.deferred import Recording, Undeferrable, run_deferred
from raypar.model.graph import Graph
from raypar.model.initial_values import ByNameValues, CallGuard
from raypar.model.model_call import WHOLE_BYTES, TooLarge, call_watched
from raypar.model.random_state import RandomState, generators_preserved, seed_all
from raypar.model.shared_memory import Replaced
from raypar.plan import Microbatches, ParallelPlan
from raypar.schedule.assignment import Assignment, assign
from raypar.schedule.instructions import Schedule
from raypar.user_code import USER_CODE_ERRORS, error_text, reraise_ctrl_c
from raypar.worker.spec import JobSpec
from raypar.worker.weights_initial import weights_from_file

__all__ = ["Assignment", "assignments", "make_graph", "validation_cut"]


LOADS_BYTES = 1 << 20
"""The user is told of a model function that copies more than this from files and arrays."""


def make_graph(spec: JobSpec, guard: CallGuard = contextlib.nullcontext) -> Graph:
    """The layer graph of the user's model, with its initial values in `Graph.initial`.

    Calls the model function as one process would, after seeding Python, numpy and torch with the job's seed; restores the
    generators. A small model is built whole, a large one with deferred initialisation. `guard`: entered around calls of the
    user's code. Raises `ModelError` if the function does not return layers, `UserCodeError` if it raises.
    """
    replaced: Replaced = "all" if spec.init_from is not None else "parameters" if spec.init == "by-name" else "nothing"
    with generators_preserved():
        with guard(f"the model function {spec.model.label}"):
            made, recording, notes = _call_as_deferred_init_says(spec)
        if isinstance(made, Graph):
            graph = without_values(made, seed=spec.seed, state=RandomState.now(), guard=guard, replaced=replaced)
        else:
            again = partial(_values_again, spec)
            captured = partial(capture, input=spec.data.input or "x", again=again, replaced=replaced)
            try:
                graph = captured(made, recording=recording, notes=notes)
            except Undeferrable as error:
                with guard(f"the model function {spec.model.label}"):
                    made, _, notes = _call_whole(spec, str(error))
                graph = captured(made, notes=notes)
    if spec.init == "by-name":
        assert graph.initial is not None
        graph = replace(graph, initial=ByNameValues(graph, spec.seed, graph.initial))
    if spec.init_from is not None:
        assert graph.initial is not None
        graph = replace(graph, initial=weights_from_file(spec, graph, graph.initial))
    return graph


def _call_as_deferred_init_says(spec: JobSpec) -> tuple[Any, Recording | None, tuple[str, ...]]:
    """(what the model function returns, the recording of its values if they are deferred, lines for the user)."""
    reason = ""
    if spec.deferred_init != "always":
        seed_all(spec.seed)
        try:
            made, loaded = call_watched(partial(_call_model, spec), WHOLE_BYTES if spec.deferred_init == "auto" else None)
            return made, None, _note_of_loads(loaded)
        except TooLarge:
            pass
    seed_all(spec.seed)
    try:
        made, recording = run_deferred(partial(_call_model, spec))
        if not isinstance(made, Graph):
            return made, recording, _note_of_loads(recording.loaded_bytes)
    except Undeferrable as error:
        reason = str(error)
    except UserCodeError as error:
        if spec.deferred_init == "always":
            raise UserCodeError(
                f"with deferred initialisation {error.what}",
                cure=f"{error.cure}; if it does not raise there, set deferred_init: never",
            ) from error
        reason = f"with deferred initialisation {error.what.splitlines()[0]}"  # if that is the function's own, it raises again
    if not reason:  # a hand-written graph: its layers are built one by one
        seed_all(spec.seed)
        return call_watched(partial(_call_model, spec))[0], None, ()
    return _call_whole(spec, reason)


def _call_whole(spec: JobSpec, reason: str) -> tuple[Any, None, tuple[str, ...]]:
    """As `_call_as_deferred_init_says`, whole for this `reason`. Raises `ModelError` under `deferred_init: always`."""
    if spec.deferred_init == "always":
        raise ModelError(
            f"the model function {spec.model.label} does what cannot be deferred: {reason}",
            cure="set deferred_init: never, which builds the whole model in every worker",
        )
    seed_all(spec.seed)
    made, loaded = call_watched(partial(_call_model, spec))
    line = f"the model cannot be made in parts ({reason}): every worker builds all of it, then keeps only its part"
    return made, None, (line, *_note_of_loads(loaded))


def _note_of_loads(nbytes: int) -> tuple[str, ...]:
    """The line for the user, if there is one, about values that the model function loads itself."""
    if nbytes < LOADS_BYTES:
        return ()
    return (
        f"the model function loads {nbytes / 2**20:.0f} MiB of values itself: every worker reads and holds all of them while "
        "it starts; with init_from: FILE a worker reads only what it owns",
    )


def _call_model(spec: JobSpec) -> Any:
    try:
        made = spec.model.call()
    except RayparError:
        raise
    except USER_CODE_ERRORS as error:
        reraise_ctrl_c(error)
        raise UserCodeError(
            f"the model function {spec.model.label} raised {error_text(error)}",
            cure="it is called with model.args, as one process would call it",
        ) from error
    if made is None:
        raise ModelError(f"the model function {spec.model.label} returned None", cure="return nn.Sequential, layers or a Graph")
    return made


def _values_again(spec: JobSpec) -> Mapping[str, Tensor]:
    """Name -> tensor of every parameter and buffer, from calling the model function again."""
    with generators_preserved():
        seed_all(spec.seed)
        made, _ = call_watched(partial(_call_model, spec))
        return dict(named_state(layers_in(made)))


def validation_cut(spec: JobSpec, samples: int) -> Microbatches | None:
    """The validation samples in microbatches of at most the training size; None if the job has no validation."""
    if spec.validation is None or samples == 0:
        return None
    size = -(-spec.batch_size // spec.microbatches)
    count = -(-samples // size)
    return Microbatches(count, count, samples)


def assignments(
    spec: JobSpec, graph: Graph, plan: ParallelPlan, schedule: Schedule, *, validation_samples: int = 0
) -> tuple[Assignment, ...]:
    """One assignment per rank, lowered from the schedule. Raises `ScheduleError` if the result would not run."""
    return assign(schedule, plan, graph.crossing(plan), spec.cut, validation_cut(spec, validation_samples))
