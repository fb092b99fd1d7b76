"""Tries the models of a package for `capture.py --package`, each in a process of its own: `capture_package_tries.py PACKAGE`.

Prints a line of JSON for each model: what became of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import re
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch
from helpers.captured_stages import Captured, capture_as_a_job, differences, make_stages, run_plain, run_stages
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from unseen_models.case import Batch, Case, let_torchvision_be_imported

from raypar.errors import ModelError, RayparError
from raypar.model.capture.module_graph import parameters_added_by_layer
from raypar.model.python_state import PythonState
from raypar.model.random_state import seed_all
from raypar.worker.check_state_between_microbatches import ComputedMicrobatch, compute_with_and_without_state

STAGES, MICROBATCHES = 3, 3
MOST_BYTES = 6 << 30
"""A process that tries one model and has more memory than this is ended."""


def loss_of(output: Any) -> Tensor:
    """The mean square of every tensor of numbers in the output, added up."""
    found = [each for each in _tensors(output) if each.is_floating_point() or each.is_complex()]
    return sum((each.abs().float() ** 2).mean() if each.is_complex() else (each.float() ** 2).mean() for each in found)  # type: ignore[return-value]


def _tensors(output: Any) -> list[Tensor]:
    """The tensors in an output; those of objects into which PyTorch does not look are their attributes."""
    found: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)):
            found += [each for value in vars(leaf).values() for each in tree_leaves(value) if isinstance(each, Tensor)]
    return found


def tried(given: Case) -> dict[str, Any]:
    """What became of a model: the verdict, and why."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        made = given.make().float()
        made.train()  # which may return nothing
        return made

    try:
        plain, probe, batch = make(), make(), given.batch()
        before = torch.random.get_rng_state()
        loss = loss_of(probe(**{key: value.clone() for key, value in batch.items()}))
        loss.backward()
    except Exception as error:
        return {"verdict": "not tried", "why": f"the plain module: {said(error)}"}
    if not bool(torch.isfinite(loss)):
        return {"verdict": "not tried", "why": "the plain module: the loss is not finite"}
    draws = not torch.equal(before, torch.random.get_rng_state())
    facts = {"class": type(plain).__name__, "parameters": sum(p.numel() for p in plain.parameters()), "draws": draws}
    start = time.process_time()
    try:
        captured = capture_as_a_job(plain, batch)
    except RayparError as error:
        by_raypar = isinstance(error, ModelError) and " raised " in error.what.split("\n")[0]
        return facts | {"verdict": "crashed" if by_raypar else "refused", "why": said(error), "all": str(error)[-3000:]}
    except Exception as error:
        return facts | {"verdict": "crashed", "why": said(error), "all": traceback.format_exc()[-3000:]}
    facts |= {"capture_s": time.process_time() - start, "layers": len(captured.layers), "largest": largest_share(captured)}
    try:
        facts["unread"] = check_state(make(), batch)
        differ = compared(captured, plain, batch, STAGES, draws=draws)
        in_one = compared(captured, plain, batch, 1, draws=draws) if differ else []
    except ModelError as error:
        return facts | {"verdict": "refused", "why": said(error), "all": str(error)[-3000:]}
    except Exception as error:
        return facts | {"verdict": "crashed", "why": f"run in stages: {said(error)}", "all": traceback.format_exc()[-3000:]}
    if differ:
        one_stage = "the same" if in_one == differ else ", ".join(in_one[:4]) or "nothing"
        said_before = {f"gradient of {name}" for name in parameters_added_by_layer(captured.cache, captured.ties)}
        is_said = in_one == differ and all(is_last_bits(each, said_before) for each in differ)
        why = f"{len(differ)} differ: {', '.join(differ[:4])}; in one stage {one_stage}"
        return facts | {"verdict": "said" if is_said else "wrong", "why": why}
    return facts | {"verdict": "exact"}


def check_state(model: nn.Module, batch: Batch) -> str | None:
    """Raises `ModelError`, as a job does before its run, if a microbatch depends on what those before it have left in Python.

    Returns a place that could not be looked through whole, if there is one. A microbatch is the batch, rolled.
    """
    parts = [(part, dict(part._buffers)) for part in model.modules()]
    values = [(buffer, buffer.clone()) for buffer in model.buffers()]
    state = PythonState({"": model})

    def compute(number: int) -> ComputedMicrobatch:
        for part, buffers in parts:
            part._buffers.update(buffers)
        with torch.no_grad():
            for buffer, value in values:
                buffer.copy_(value)
        model.zero_grad(set_to_none=True)
        seed_all(number)
        loss = loss_of(model(**{key: value.roll(number, 0) if value.dim() else value.clone() for key, value in batch.items()}))
        loss.backward()
        return ComputedMicrobatch(
            float(loss), 1.0, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )

    compute_with_and_without_state(state, compute, [None] * MICROBATCHES, MICROBATCHES)
    return state.unread


LAST_BITS = 1e-6
"""A difference that is at most this share of a gradient's largest number can come of the order in which float32 is added."""


def is_last_bits(difference: str, said_before: Collection[str]) -> bool:
    """Whether it is a difference in the last bits of a gradient in `said_before`. `difference`: as `compared` says it."""
    what, _, share = difference.removesuffix(" of its largest number").partition(" by ")
    return what in said_before and bool(share) and float(share) <= LAST_BITS


def compared(captured: Captured, plain: nn.Module, batch: Batch, count: int, *, draws: bool) -> list[str]:
    """What differs between `count` stages and the plain module; of a gradient also by how much."""
    layers = len(captured.layers)
    cuts = sorted({layers * stage // count for stage in range(1, count)} - {0})
    stages = make_stages(captured, plain, cuts)
    found = run_stages(captured, stages, batch, loss_of, seeded=draws)
    wanted = run_plain(captured, plain, batch, loss_of, seeded=draws)
    return [f"{what}{_by_how_much(what, found[2], wanted[2])}" for what in differences(found, wanted)]


def _by_how_much(what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The largest difference of a gradient, as a share of its largest number; nothing for what is not in both."""
    name = what.removeprefix("gradient of ")
    if name == what or name not in found or name not in wanted:
        return ""
    one, other = found[name].detach().double(), wanted[name].detach().double()
    return f" by {float((one - other).abs().max() / other.abs().max().clamp_min(1e-300)):.1e} of its largest number"


def largest_share(captured: Captured) -> float:
    """The share of the parameters that the layer with most of them has."""
    sizes = [sum(p.numel() for p in layer.build().parameters()) for layer in captured.layers]
    return max(sizes) / (sum(sizes) or 1)


def said(error: BaseException) -> str:
    """The first line of an error."""
    line = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"(?:/[\w.+-]+)+/site-packages/", "", f"{type(error).__name__}: {line}")[:300]


def try_in_child(package: str, name: str, out: Connection) -> None:
    """Send what became of a model of a package."""
    models = importlib.import_module(f"unseen_models.of_{package}")
    start = time.monotonic()
    warnings.simplefilter("ignore")
    try:
        given = models.case(name)
    except Exception as error:
        found = {"verdict": "not tried", "why": f"no small form of it: {said(error)}"}
    else:
        found = tried(given)
    out.send({"package": package, "model": name, **found, "seconds": round(time.monotonic() - start, 1)})


def try_all(package: str, names: Sequence[str], *, at_once: int, limit_s: float, total_s: float) -> Iterator[dict[str, Any]]:
    """What became of each model, as it is known. Children are forked, for importing takes longer than most models."""
    fork = multiprocessing.get_context("fork")
    end = time.monotonic() + total_s
    waiting = list(names)
    running: dict[Connection, tuple[str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once and time.monotonic() < end:
            ours, theirs = fork.Pipe(duplex=False)
            child = fork.Process(target=try_in_child, args=(package, waiting[0], theirs), daemon=True)
            child.start()
            theirs.close()
            running[ours] = waiting.pop(0), child, min(time.monotonic() + limit_s, end)
        if not running:
            break
        ready = wait(list(running), timeout=1)
        for pipe, (name, child, until) in list(running.items()):
            found: dict[str, Any] | None = None
            if pipe in ready:
                try:
                    found = pipe.recv()
                except EOFError:
                    child.join()
                    found = {"verdict": "crashed", "why": f"the process ended with exit code {child.exitcode}"}
            elif time.monotonic() > until:
                child.kill()
                found = {"verdict": "not tried", "why": f"not done after {limit_s:.0f} s, or when the time for all was over"}
            elif (size := _memory_of(child.pid)) > MOST_BYTES:
                child.kill()
                found = {"verdict": "not tried", "why": f"has taken {size / 2**30:.1f} GiB of memory"}
            if found is not None:
                child.join()
                pipe.close()
                del running[pipe]
                yield {"package": package, "model": name, **found}
    for name in waiting:
        yield {"package": package, "model": name, "verdict": "not tried", "why": "the time for all was over"}


def _memory_of(pid: int) -> int:
    """Bytes of memory that a process has in use; 0 if it is gone."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--models", nargs="*", help="default: all")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=180.0, help="of one model")
    parser.add_argument("--total-s", type=float, default=3600.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    let_torchvision_be_imported()
    models = importlib.import_module(f"unseen_models.of_{given.package}")
    names = given.models or models.names()
    limits = {"at_once": given.at_once, "limit_s": given.limit_s, "total_s": given.total_s}
    for found in try_all(given.package, names, **limits):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
