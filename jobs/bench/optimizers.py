"""Which optimizers train as in one process, in stages, replicas, shards, resumed and joined? Which are refused, and why?

`python jobs/bench/optimizers.py [--json] [--page FILE] [--only TEXT ...]`, where the optimizers' packages are beside raypar:
`pip install --no-deps schedulefree prodigyopt lion-pytorch dadaptation pytorch_optimizer bitsandbytes torchao`.
Those that are not there are left out, and counted. Six steps of a small job in one process for each layout
(`tests/helpers/optimizer_layouts.py`). Weights are `torch.equal` to one plain process; with shards to one whole optimizer that
is given the gradients of the shards. Exit code 1 if a weight is neither equal nor refused before the run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, environment, page, table

sys.path.insert(0, str(ROOT / "tests"))

import torch
from helpers.optimizer_layouts import LAYOUTS, job_of, outcomes

from raypar.job import OptimizerConfig


@dataclass(frozen=True)
class Contestant:
    """An optimizer with its arguments."""

    target: str
    args: dict[str, Any] = field(default_factory=dict)
    groups: tuple[tuple[str, dict[str, Any]], ...] = ()
    matrices: bool = False
    """Whether the model's parameters are all matrices."""

    @property
    def label(self) -> str:
        more = [f"{key}={value!r}" for key, value in self.args.items() if key != "lr"]
        more += [f"{pattern}: {json.dumps(given)}" for pattern, given in self.groups]
        return self.target.replace("torch.optim:", "torch.optim.").replace(":", ".") + (f" ({', '.join(more)})" if more else "")


UNDECAYED = (("*.bias", {"weight_decay": 0.1}),)
FAMILIES = (  # all of torch.optim but Muon, which takes matrices only
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "ASGD", "RMSprop", "Rprop", "SGD", "Adafactor"),
    *("SparseAdam", "LBFGS"),
)
OTHERS = (
    *(
        "SOAP",
        "Shampoo",
        "Kron",
        "Lamb",
        "LARS",
        "AdaFactor",
        "AdaBelief",
        "AdaBound",
        "AdEMAMix",
        "Adan",
        "CAME",
        "DAdaptAdam",
    ),
    *(
        "Lion",
        "MARS",
        "NovoGrad",
        "PAdam",
        "Prodigy",
        "QHAdam",
        "SM3",
        "ScheduleFreeAdamW",
        "SignSGD",
        "StableAdamW",
    ),
    *("Tiger", "Yogi"),
)
"""Of the package pytorch_optimizer."""
PACKAGES = (
    *("schedulefree", "prodigyopt", "dadaptation", "lion-pytorch", "transformers", "bitsandbytes", "torchao"),
    "pytorch_optimizer",
)
CONTESTANTS = (
    *(Contestant(f"torch.optim:{name}") for name in FAMILIES),
    Contestant("torch.optim:SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}, UNDECAYED),
    Contestant("torch.optim:AdamW", {"foreach": True}, UNDECAYED),
    Contestant("torch.optim:AdamW", {"fused": True}, UNDECAYED),
    Contestant("torch.optim:AdamW", {"amsgrad": True}),
    Contestant("torch.optim:Muon", matrices=True),
    Contestant("schedulefree:AdamWScheduleFree", {"warmup_steps": 3}, UNDECAYED),
    Contestant("schedulefree:SGDScheduleFree"),
    Contestant("schedulefree:RAdamScheduleFree"),
    Contestant("prodigyopt:Prodigy"),
    Contestant("dadaptation:DAdaptAdam"),
    Contestant("dadaptation:DAdaptSGD"),
    Contestant("dadaptation:DAdaptLion"),
    Contestant("lion_pytorch:Lion"),
    Contestant("transformers.optimization:Adafactor"),
    Contestant("transformers.optimization:Adafactor", {"lr": 1e-3, "relative_step": False, "scale_parameter": False}),
    Contestant("bitsandbytes.optim:AdamW8bit"),
    Contestant("bitsandbytes.optim:Lion8bit"),
    Contestant("torchao.optim:AdamW8bit"),
    Contestant("torchao.optim:_AdamW", {"bf16_stochastic_round": False}),
    *(Contestant(f"pytorch_optimizer:{name}") for name in OTHERS),
    Contestant("pytorch_optimizer:Muon", groups=(("*", {"use_muon": True}),), matrices=True),
    Contestant("pytorch_optimizer:Ranger21", {"num_iterations": 6}),
    Contestant("pytorch_optimizer:GaLore", matrices=True),
)


def is_installed(contestant: Contestant) -> bool:
    """Whether the package, and the class in it, are there."""
    module, _, name = contestant.target.partition(":")
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def verdict(said: str) -> str:
    """`equal`, `refused` or what differs."""
    return "refused" if said.startswith("refused") else said


def reason(found: dict[str, str]) -> str:
    """Why it is refused in some layouts, in one line."""
    texts = dict.fromkeys(
        said.removeprefix("refused: ").splitlines()[0] for said in found.values() if said.startswith("refused")
    )
    return "; ".join(texts).replace("|", "/")


def tried(contestant: Contestant) -> dict[str, str]:
    """Layout -> what came of it."""
    spec = job_of(
        OptimizerConfig(
            function=contestant.target,
            args=contestant.args,
            groups=tuple({"match": pattern, **given} for pattern, given in contestant.groups),
        ),
        matrices=contestant.matrices,
    )
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        try:
            return outcomes(spec, Path(folder))
        except Exception as error:
            return dict.fromkeys(LAYOUTS, f"FAILED: {type(error).__name__}: {str(error).splitlines()[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--page", type=Path, help="also write a results page")
    parser.add_argument("--only", nargs="+", default=[""], help="optimizers whose names have one of these texts")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    absent = []
    for contestant in CONTESTANTS:
        if not any(text.lower() in contestant.label.lower() for text in given.only):
            continue
        if not is_installed(contestant):
            absent.append(contestant.label)
            continue
        start = time.monotonic()
        found[contestant.label] = tried(contestant)
        print(
            f"{contestant.label}: {[verdict(v) for v in found[contestant.label].values()]} {time.monotonic() - start:.1f} s",
            file=sys.stderr,
        )
    wrong = [label for label, layouts in found.items() if any(verdict(v) not in ("equal", "refused") for v in layouts.values())]
    if given.json:
        print(json.dumps({"found": found, "absent": absent, "environment": environment()}, indent=1))
    rows = [[label, *map(verdict, layouts.values()), reason(layouts)] for label, layouts in found.items()]
    cells = [verdict(v) for layouts in found.values() for v in layouts.values()]
    equal, refused = cells.count("equal"), cells.count("refused")
    there = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if _has(name)]
    body = (
        f"{len(found)} optimizers in {len(LAYOUTS)} layouts: {equal} cells equal, {refused} refused before the run, "
        f"{len(cells) - equal - refused} neither. Not "
        f"installed: {', '.join(absent) or 'none'}.\n\n"
        + table(["optimizer", *LAYOUTS, "why refused"], rows)
        + f"\n\nPackages: {', '.join(there)}."
    )
    print(body)
    if given.page:
        given.page.write_text(
            page("Which optimizers train as in one process?", "python jobs/bench/optimizers.py --page FILE", body)
        )
    sys.exit(bool(wrong))


def _has(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
