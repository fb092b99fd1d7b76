"""Which unmodified models are captured, exactly and at what cost? Beside it the tracer of torch.distributed.pipelining.

`python jobs/bench/capture.py [--json] [--page FILE] [--models NAME ...] [--only raypar|pipelining] [--read FILE ...] [--large]`
For each model of `tests/helpers/model_zoo.py`, each in a process with a time limit: layers; whether loss, outputs and all
gradients of a microbatch are `torch.equal` to the plain module's, in three stages and cut before every unit; what two shards
hold; the processor time of capturing, and of forward and backward beside the plain module's. `--only` measures one of the
two, `--read` takes what earlier calls with `--json` have measured. `--large`: also the cost of capture in a step of the
quickstart, beside its list of layers, and `raypar plan` of a Llama of 7 G parameters without its weights. Exit code 1 when a
limit is missed.

`python jobs/bench/capture.py --package NAME ... [--limit-s S] [--total-s S] [--at-once N] [--python FILE] [--json]`
Tries all models of a package that raypar does not know (timm, transformers, diffusers, ...: `capture_package.py`), small ones,
in an environment that it makes: exact, refused and why, wrong or crashed. Exit code 1 if one is wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import capture_package
from harness import ROOT, environment, page, ratio, table

LIMIT_S = 90.0
"""Of one model and one side."""
STAGES, SHARDS = 3, 2
CAPTURE_S, STEP_COST, PLAN_S, PLAN_BYTES = 2.0, 0.01, 15.0, 1e9
"""Limits: processor seconds to capture a model that is not large; share of a step; seconds and bytes to plan a large one."""
LARGE_PLANS = ("plan.stages=8", "plan.shards=2")
SIDES = ("raypar", "pipelining")
LARGE = """
name: llama_7g
steps: 1
batch_size: 8
microbatches: 8
model:
  function: examples.transformers_models:model
  args: {name: LlamaForCausalLM, config: LlamaConfig, vocab_size: 32000, hidden_size: 4096, num_hidden_layers: 32,
         num_attention_heads: 32, intermediate_size: 11008, max_position_embeddings: 4096, use_cache: false}
loss: examples.transformers_models:next_token_loss
data: {function: examples.gpt:text, args: {context: 128}}
plan: {stages: 4}
"""


def measure(name: str, side: str) -> dict[str, Any]:
    """What the program `capture_one.py` says of a model; where it did not end well, also `error`."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(Path(__file__).with_name("capture_one.py")), side, name]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            code: int | None = subprocess.run(command, stdout=out, stderr=err, timeout=LIMIT_S, env=env, check=False).returncode
        except subprocess.TimeoutExpired:
            code = None
        out.seek(0)
        err.seek(0)
        found: dict[str, Any] = {}
        for line in out:
            if line.startswith("{"):
                found |= json.loads(line)
        last = ([line.strip() for line in err if line.strip()] or ["no output"])[-1]
    if code is None:
        found["error"] = f"not done after {LIMIT_S:.0f} s"
    elif code:
        found.setdefault("error", f"exit code {code}: {last}")
    return found


def measure_list() -> dict[str, float]:
    """Processor time of a step of the quickstart, captured from one module, beside its list of layers: median and interval."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    command = [sys.executable, str(Path(__file__).with_name("capture_one.py")), "list", "quickstart"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    cost = ratio(found["module_s"], found["list_s"])  # the module's seconds over the list's
    return {"median": cost.median - 1, "lower": cost.lower - 1, "upper": cost.upper - 1, "pairs": cost.pairs}


def measure_large(setting: str) -> dict[str, Any]:
    """`raypar plan` of a Llama of 7 G parameters: seconds and peak memory of its process."""
    start = (
        "from helpers.model_zoo import import_transformers as i; i(); import sys; from raypar.cli import main; sys.exit(main())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    with tempfile.TemporaryDirectory(prefix="rp-") as folder, tempfile.TemporaryFile("w+") as out:
        job = Path(folder) / "job.yaml"
        job.write_text(LARGE)
        command = [sys.executable, "-c", start, "plan", str(job), "--no-profile", "--set", setting]
        begin = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    cpu_s = usage.ru_utime + usage.ru_stime
    lines = [line for line in text.splitlines() if line.strip()]
    return {
        "setting": setting, "code": process.returncode, "seconds": seconds, "cpu_s": cpu_s,
        "peak_bytes": usage.ru_maxrss * 1024, "first_lines": lines[:3], "last_line": (lines or [""])[-1],
    }  # fmt: skip


# -- the page ----------------------------------------------------------------------------------------------------------------


def verdict(found: dict[str, Any], key: str) -> str:
    """`yes`, or how many things differ; `-` if it was not measured, `fails` if what has been traced does not run."""
    if key not in found:
        return "fails" if found.get("traced") else "-"
    return "yes" if not found[key] else f"no ({len(found[key])} differ)"


def shards_cell(found: dict[str, Any]) -> str:
    """What two shards hold, and by how much a loss differs."""
    if "share_cut" not in found:
        return "refused" if "shards_error" in found else "-"
    if not found["share_cut"]:
        return "nothing to cut"
    said = f"{found['share_cut']:.0%} cut, of that {found['share_held']:.0%} on a shard"
    if "shards_error" in found:
        return said + "; does not run"
    return said + (f"; loss {found['shards_off']:.0e}" if "shards_off" in found else "")


def rows_of(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One row for each model."""
    rows = []
    for name, sides in results.items():
        ours, theirs = sides.get("raypar", {}), sides.get("pipelining", {})
        cells = [name, str(ours.get("layers", "no"))]
        cells.append(f"{ours['capture_s']:.2f}" if "capture_s" in ours else "-")
        cells += [verdict(ours, "three_stages"), verdict(ours, "every_unit")]
        cells.append(f"{ours['cost_ms']:+.2f} ms, {ours['cost']:+.1%}" if "cost" in ours else "-")
        cells.append(shards_cell(ours))
        cells.append("yes" if theirs.get("traced") else "no" if theirs else "-")
        cells += [verdict(theirs, "loss"), verdict(theirs, "gradients")]
        rows.append([*cells, f"{theirs['trace_s']:.1f}" if "trace_s" in theirs else "-"])
    return rows


HEADER = ("model", "layers", "capture s", f"equal, {STAGES} stages", "equal, every unit", "step", f"{SHARDS} shards")
HEADER += ("pipelining: traced", "loss equal", "gradients equal", "s")
NOTES = f"""
Equal: loss, outputs and gradients of a microbatch (pipelining: loss and gradients, those of a parameter that it has copied
into several stages added up). Seconds are processor time. Step: forward and backward of the captured layers in one stage
beside the plain module, processor time, median of pairs; the models are tiny, so that a call costs more than what it
computes. Shards: the share of the parameters' bytes that is cut, how much of that the larger of {SHARDS} shards holds, and by
how much the losses of two steps with float64 parameters differ from those of one shard (the losses are in float32: 1e-07 is
their last bit). Nothing to cut: no style is inferred from the names or kinds of its modules.
"""
"""What the table's columns mean."""


def missed_limits(found: dict[str, Any]) -> list[str]:
    """What is over a limit, or not equal."""
    missed = []
    for name, sides in found["models"].items():
        ours = sides.get("raypar")
        if ours is None:
            continue
        if "error" in ours:
            missed.append(f"{name}: {ours['error']}")
        if ours.get("three_stages") or ours.get("every_unit"):
            missed.append(f"{name} is not equal to the plain module")
        if ours.get("capture_s", 0) > CAPTURE_S:
            missed.append(f"{name} is captured in {ours['capture_s']:.2f} s (limit {CAPTURE_S:g})")
    if (cost := found.get("list")) and cost["lower"] > STEP_COST:
        missed.append(f"a step costs {cost['median']:+.2%} beside the list of layers (limit {STEP_COST:.0%})")
    missed += [
        f"raypar plan, {large['setting']}: {large['seconds']:.1f} s, {large['peak_bytes'] / 1e6:.0f} MB"
        for large in found.get("large", ())
        if large["code"] or large["seconds"] > PLAN_S or large["peak_bytes"] > PLAN_BYTES
    ]
    return missed


def as_text(found: dict[str, Any]) -> str:
    """The page's body."""
    results = found["models"]
    ours = [sides["raypar"] for sides in results.values() if "raypar" in sides]
    theirs = [sides["pipelining"] for sides in results.values() if "pipelining" in sides]
    in_stages, cut_everywhere = (sum(one.get(key) == [] for one in ours) for key in ("three_stages", "every_unit"))
    traced, exact = sum(bool(t.get("traced")) for t in theirs), sum(t.get("gradients") == [] == t.get("loss") for t in theirs)
    missed = missed_limits(found)
    return "\n\n".join(
        [
            f"Of {len(ours)} models raypar captures {sum('layers' in one for one in ours)}; {in_stages} are `torch.equal` to "
            f"the plain module in {STAGES} stages, {cut_everywhere} cut before every unit. torch.distributed.pipelining traces "
            f"{traced} of {len(theirs)}; {exact} run, with equal loss and gradients.",
            table(HEADER, rows_of(results)),
            NOTES.strip().replace("\n", " "),
            *errors_text(results),
            *list_text(found),
            *large_text(found),
            "Missed: " + "; ".join(missed) + "." if missed else "No limit is missed.",
        ]
    )


def errors_text(results: dict[str, dict[str, Any]]) -> list[str]:
    """The first lines of all errors."""
    kinds = ("error", "shards_error")
    found = [
        [name, f"{side}, {SHARDS} shards" if kind == "shards_error" else side, str(sides[side][kind]).replace("|", "\\|")]
        for name, sides in results.items()
        for side in SIDES
        for kind in kinds
        if kind in sides.get(side, {})
    ]
    return ["## Errors", table(["model", "by", "first line"], found)] if found else []


def list_text(found: dict[str, Any]) -> list[str]:
    """The cost of a step beside a list of layers."""
    if "list" not in found:
        return []
    cost = found["list"]
    return [
        "## Beside the list of layers",
        "A step of the quickstart in one worker, whose model is one module that is captured, takes "
        f"{cost['median']:+.2%} processor time beside the same model as a list (95 % interval {cost['lower']:+.2%} to "
        f"{cost['upper']:+.2%}, {cost['pairs']} pairs); limit {STEP_COST:.0%}.",
    ]


def large_text(found: dict[str, Any]) -> list[str]:
    """Plans of a large model."""
    if "large" not in found:
        return []
    cells = [
        [one["setting"], str(one["code"]), f"{one['seconds']:.1f}", f"{one['cpu_s']:.1f}", f"{one['peak_bytes'] / 1e6:.0f}"]
        for one in found["large"]
    ]
    return [
        "## A Llama of 7 G parameters, planned without its weights",
        table(["raypar plan --no-profile --set", "exit code", "seconds", "processor seconds", "peak MB"], cells),
        f"Limits: {PLAN_S:.0f} s, {PLAN_BYTES / 1e6:.0f} MB.",
    ]


def try_packages(given: argparse.Namespace) -> NoReturn:
    """Carry out `--package`."""
    found = capture_package.read_results(given.read)
    for package in given.package:
        limits = {"limit_s": given.limit_s, "total_s": given.total_s, "at_once": given.at_once}
        each = capture_package.try_package(package, given.python, given.models or (), **limits)
        capture_package.merge(found, package, each)
    text = capture_package.as_text(found)
    print(json.dumps({"environment": environment(), "packages": found}) if given.json else text)
    if given.page:
        question = "Which models of packages that raypar does not know are captured, and exactly?"
        command = f"python jobs/bench/capture.py --package {' '.join(found)}"
        given.page.write_text(page(question, command, text))
    sys.exit(any(row["verdict"] in ("wrong", "crashed") for each in found.values() for row in each["rows"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--models", nargs="*", help="names of the zoo; default: all")
    parser.add_argument("--only", choices=SIDES, help="one side alone")
    parser.add_argument("--read", nargs="*", type=Path, default=[], help="results of earlier calls with --json")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--package", nargs="*", choices=sorted(capture_package.REQUIREMENTS), help="try its models")
    parser.add_argument("--limit-s", type=float, default=180.0, help="of one model of a package")
    parser.add_argument("--total-s", type=float, default=3600.0, help="of all models of a package")
    parser.add_argument("--at-once", type=int, default=2, help="how many models of a package are tried side by side")
    parser.add_argument("--python", type=Path, help="of an environment that has the package already")
    given = parser.parse_args()
    if given.package is not None:
        try_packages(given)
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.model_zoo import ZOO

    found: dict[str, Any] = {"models": {name: {} for name in ZOO}}
    for path in given.read:
        read = json.loads(path.read_text())
        for name, sides in read["models"].items():
            found["models"].setdefault(name, {}).update(sides)
        found |= {key: read[key] for key in ("list", "large") if key in read}
    names = given.models if given.models is not None else [] if given.read else list(ZOO)
    if unknown := [name for name in names if name not in ZOO]:
        parser.error(f"no model {unknown[0]!r}: choose of {', '.join(ZOO)}")
    for name in names:
        for side in SIDES if given.only is None else (given.only,):
            found["models"][name][side] = measure(name, side)
            print(name, side, found["models"][name][side], file=sys.stderr, flush=True)
    if given.large:
        found["list"] = measure_list()
        found["large"] = [measure_large(setting) for setting in LARGE_PLANS]
    found["models"] = {name: sides for name, sides in found["models"].items() if sides}
    text = as_text(found)
    print(json.dumps({"environment": environment(), **found}) if given.json else text)
    if given.page:
        question = "Which unmodified models are captured, exactly and at what cost?"
        given.page.write_text(page(question, "python jobs/bench/capture.py --large", text))
    sys.exit(bool(missed_limits(found)))


if __name__ == "__main__":
    main()
