"""Events about workers and generations, as sentences for users and as facts for programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, TypedDict

from raypar.elastic.actions import AdoptPlan, ReportStraggler
from raypar.elastic.user_messages import plain_failure_text
from raypar.files.json_type import Json
from raypar.plan import ParallelPlan
from raypar.plan.wording import after_steps, count_noun
from raypar.record.events import WorkerLoss
from raypar.record.field_types import WorkerFacts


class GenerationFacts(TypedDict):
    """What events say of a new generation."""

    generation: int
    """Its number."""
    workers: list[int]
    """Its workers, by rank."""
    plan: str
    """Its plan, in words."""
    shards: str
    """The number of shards of its layers (`format_shards`)."""
    schedule: str
    """Its schedule's name."""
    step: int
    """Steps done when it begins."""
    moved_elements: int
    """Elements of parameters that move between workers."""
    state: str
    """Where its state comes from: beginning, checkpoint, cut (the mirror's) or live."""


def training_facts(contract: Mapping[str, Any]) -> dict[str, Any]:
    """What a job trains with, as data for the event of a start: optimizer, batch, precision and reduction. `contract`: the
    job's."""
    optimizer, precision = contract.get("optimizer") or {}, contract.get("precision")
    of = "parameters, gradients" if precision and "gradients" in precision else "parameters"
    name = precision and (precision.get("compute") or f"{precision['parameters']} ({of})")
    facts: dict[str, Json] = {"precision": name} if precision else {}
    if contract.get("reduction") == "fast":
        facts["reduction"] = "fast"
    if optimizer.get("function"):
        name, given = str(optimizer["function"]), _options_in_words(optimizer)
        if several := optimizer.get("entries"):
            name = ", ".join(dict.fromkeys(re.split("[:.]", str(one["function"]))[-1] for one in several))
            given = "; ".join(f"{one['match']}: {_options_in_words(one)}" for one in several)
        facts |= {"optimizer": name[:200], "optimizer_args": given[:400]}
    return facts | {key: contract[key] for key in ("batch_size", "microbatches") if key in contract}


def _options_in_words(optimizer: Mapping[str, Any]) -> str:
    """The arguments of one optimizer of a contract, and how many groups have others."""
    groups = len(optimizer.get("groups") or ())
    given = [f"{name}={value}" for name, value in (optimizer.get("args") or {}).items()]
    given += [f"{count_noun(groups, 'group')} with other arguments"] if groups else []
    return ", ".join(given)


def describe_generation(order: AdoptPlan) -> str:
    """A new generation in words: number of workers, plan, and where the state comes from."""
    moved = sum(move.piece.size for move in order.moves)
    state = f"{moved:,} parameters and their optimizer state move"
    if order.from_checkpoint:
        where = f"from the checkpoint {after_steps(order.done)}" if order.done else "from the initial weights"
        state = f"no copy is left in memory, so all begin again {where}"
    elif order.from_mirror:
        state = f"the last copy was lost, so all go back to the mirror's cut {after_steps(order.done)}; {state}"
    return f"{count_noun(len(order.members), 'worker')}, {order.plan.describe()}; {state}"


def generation_facts(order: AdoptPlan, schedule: str) -> GenerationFacts:
    """A new generation as data."""
    if order.from_checkpoint:
        state = "checkpoint" if order.done else "beginning"
    else:
        state = "cut" if order.from_mirror else "live"
    return {
        "generation": order.generation,
        "workers": list(order.members),
        "plan": order.plan.describe(),
        "shards": format_shards(order.plan),
        "schedule": schedule,
        "step": order.done,
        "moved_elements": sum(move.piece.size for move in order.moves),
        "state": state,
    }


def format_shards(plan: ParallelPlan) -> str:
    """The number of shards of a plan's layers as text: `2`, or `2/1` where stages differ."""
    return "/".join(str(count) for count, _ in groupby(plan.shards_by_layer))


def recovery_finished_text(order: AdoptPlan, seconds: float, again: int) -> str:
    """The line for the user when a new generation has committed its first step. `again`: steps to replay, reported before."""
    text = f"training goes on with {count_noun(len(order.members), 'worker')}, {order.plan.describe()}, after {seconds:.2f} s"
    return f"{text}; {count_noun(again, 'step')} {'is' if again == 1 else 'are'} executed again" if again else text


def worker_lost_event(coordinate: str, worker_facts: WorkerFacts, why: str) -> WorkerLoss:
    """The event of a lost worker. `worker_facts`: facts of the worker (`WorkerRegistry.worker_facts`)."""
    why = plain_failure_text(why)
    where = f", node {worker_facts['node']}, pid {worker_facts['pid']}" if "pid" in worker_facts else ""
    text = f"{coordinate} (worker {worker_facts['worker']}{where}) is lost: {why}"
    return WorkerLoss(text=text, coordinate=coordinate, why=why, **worker_facts)


def describe_why_worker_given_up(why: str) -> str:
    """The reason, in words, why a worker that has not died is given up: it hangs, cannot be reached, or computes wrongly."""
    cause = "did not answer (it hangs, or cannot be reached)" if why == "did not answer" else why
    return f"{cause}; its process is killed"


def straggler_text(found: ReportStraggler, coordinate: str, worker_facts: WorkerFacts) -> str:
    """The line for the user when a worker has become slow, or is not slow any more."""
    place = coordinate.partition("(")[2].rstrip(")")
    at = f"worker {found.worker} ({place}, node {worker_facts.get('node', 'unknown')})"
    like = "in its first steps" if found.alone else "its replicas"
    if found.recovered:
        return f"{at} is as fast as {like} again"
    text = f"{at} takes {found.slowdown:.1f} times as long as {like} for {count_noun(found.steps, 'step')}"
    return f"{text}; it is asked to leave" if found.leaves else text
