"""The fingerprint of a job's data and module, by which a resume knows that these are others: digests of a few microbatches.

Who replaces a file, or what a function reads, changes no key of the job and no code. The first microbatch of training is
read before every run, and few others tell mostly whether the rest is the same; files that come with raypar have digests of all
that they hold (`raypar_content_digest`), which are compared too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from raypar.data.batch_fields import digest_of_fields
from raypar.errors import RayparError
from raypar.files.json_type import Json
from raypar.files.printable_text import shorten
from raypar.job import Job
from raypar.job.contract import contract_of_validation_set
from raypar.plan.microbatches import Microbatches
from raypar.plan.wording import word_form
from raypar.worker.data.microbatch_loader import MicrobatchLoader
from raypar.worker.data.mixed_order import MixedOrder
from raypar.worker.data.sample_order import SampleOrder
from raypar.worker.data.user_dataset import MapStyleDataset, content_digest
from raypar.worker.process.torch_state_guard import TorchStateGuard

BUDGET_S = 0.5
"""No further microbatch is read where this would probably take longer."""
PARTS = (0, 8, 4, 2, 6, 1, 3, 5, 7)
"""Where the microbatches lie, in eighths of an epoch, in the order in which they are read as long as there is time."""

ORDER, MICROBATCHES, VALIDATION, JOB, CONTENT = "order", "microbatches", "validation", "job", "content"
MODULE = "module"
"""Keys of a fingerprint, and of that of a validation set inside it: `job` is the section that it was taken of."""


def fingerprint_of_samples(
    spec: Job,
    dataset: MapStyleDataset,
    order: SampleOrder | MixedOrder,
    fields: Sequence[str],
    guard: TorchStateGuard,
) -> dict[str, Json]:
    """The fingerprint of map-style training data: of the first microbatches of steps. `fields`: those that are read."""
    if spec.forward_passes is not None:
        return {}
    data = spec.training_data.replace(processes=0)
    loader = MicrobatchLoader(dataset, data, order, spec.batching, seed=spec.seed, fields=fields, guard=guard)
    steps = max(1, len(dataset) // spec.batch_size)
    found: dict[str, Json] = {MICROBATCHES: _digest_microbatches(lambda step: loader.get(step, 0), steps)}
    if (digest := order.digest(0, 1)) is not None:
        found[ORDER] = f"{digest:016x}"
    return found


def fingerprint_of_streams(spec: Job, first: Mapping[str, Tensor]) -> dict[str, Json]:
    """The fingerprint of iterable training data: of its first microbatch."""
    return {} if spec.forward_passes is not None else {MICROBATCHES: _digest_microbatches(lambda _: first, 1)}


def fingerprint_of_validation_set(
    spec: Job, name: str, dataset: MapStyleDataset, batching: Microbatches, fields: Sequence[str], guard: TorchStateGuard
) -> dict[str, Json]:
    """The fingerprint of a map-style validation set, which is read in the microbatches `batching`."""
    if spec.forward_passes is not None:
        return {}
    data = spec.data_of_set(spec.validation_sets[name]).replace(processes=0)
    in_order = SampleOrder(spec.seed, len(dataset), shuffle=False)
    loader = MicrobatchLoader(dataset, data, in_order, batching, seed=spec.seed, fields=fields, guard=guard)
    return {
        JOB: contract_of_validation_set(spec, name),
        CONTENT: content_digest(dataset),
        MICROBATCHES: _digest_microbatches(lambda number: loader.get(0, number), batching.count),
    }


def _digest_microbatches(get: Callable[[int], Mapping[str, Tensor]], count: int) -> dict[str, Json]:
    """Number -> digest, of a few of `count` microbatches. `get` reads one.

    One that cannot be read is left out: the run may never come to it, and says what is wrong if it does.
    """
    found: dict[str, Json] = {}
    begun_s, longest_s = time.monotonic(), 0.0
    for number in dict.fromkeys(part * (count - 1) // max(PARTS) for part in PARTS):
        before_s = time.monotonic()
        if before_s - begun_s + longest_s > BUDGET_S:
            break
        with contextlib.suppress(RayparError):
            found[str(number)] = f"{digest_of_fields(get(number)):016x}"
        longest_s = max(longest_s, time.monotonic() - before_s)
    return found


def describe_changed_data(then: Json, now: Mapping[str, Json], said: Collection[str], steps_done: int) -> list[str]:
    """A line for the training data, and one for each validation set, that gives other samples than when the fingerprint `then`
    was taken, though the job names the same ones; and one for a module with other options. What only one of both says is not
    compared.

    `said`: sections of the job that the user has changed on purpose; `steps_done`: steps before this resume.
    """
    if not isinstance(then, Mapping):
        return []
    lines = []
    if MODULE in then and MODULE in now and then[MODULE] != now[MODULE] and "model" not in said:
        lines.append(
            "the model function makes a module of other classes or options (its configuration, eps, dropout, heads, ...) than "
            "when the checkpoint was written, though the job names the same; the run goes on with those of now, so that from "
            f"step {steps_done + 1} on its results are those of an undisturbed run neither of the former ones nor of these\n"
            "  cure: put the files that it reads back as they were, and resume again; or begin a new run"
        )
    if {"data", "batch_size", "microbatches", "collate"} & {*said}:
        return lines
    if (parts := _changed_training(then, now)) is not None:
        lines.append(
            f"data gives other samples than when the checkpoint was written, though the job names the same: {parts}; the run "
            f"goes on with those of now, so that from step {steps_done + 1} on its results are those of an undisturbed run "
            "neither of the former data nor of this\n"
            "  cure: put the data back as it was, and resume again; or begin a new run"
        )
    former, present = (one.get(VALIDATION) for one in (then, now))
    if isinstance(former, Mapping) and isinstance(present, Mapping):
        lines += [
            f"validation{f' set {shorten(name)}' if name else ''} gives other samples than when the checkpoint was written, "
            "though the job names the same: its losses and metrics do not compare with those before, nor what is chosen by "
            "them (best checkpoint, early stopping, learning rates)\n"
            "  cure: put the data back as it was, and resume again; or begin a new run"
            for name in sorted({*former} & {*present})
            if _is_changed_set(former[name], present[name])
        ]
    return lines


def _changed_training(then: Mapping[str, Json], now: Mapping[str, Json]) -> str | None:
    """What of the training data is other than it was, in words; None if nothing is known to be."""
    parts = []
    if ORDER in then and ORDER in now and then[ORDER] != now[ORDER]:
        parts.append("their order")
    if steps := _differing(then.get(MICROBATCHES), now.get(MICROBATCHES)):
        named = ", ".join(str(step + 1) for step in steps)
        parts.append(f"{word_form(steps, 'step', 'steps')} {named} would read others now")
    return "; ".join(parts) or None


def _is_changed_set(then: Json, now: Json) -> bool:
    """Whether a validation set of the same section gives other samples than it did."""
    if not isinstance(then, Mapping) or not isinstance(now, Mapping) or then.get(JOB) != now.get(JOB):
        return False
    whole = [one.get(CONTENT) for one in (then, now)]
    return bool(_differing(then.get(MICROBATCHES), now.get(MICROBATCHES))) or (None not in whole and whole[0] != whole[1])


def _differing(then: Json, now: Json) -> Sequence[int]:
    """Numbers of the microbatches whose digests both have, and that differ."""
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return ()
    return sorted(int(number) for number in now if number in then and then[number] != now[number])
