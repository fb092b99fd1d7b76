"""Tries all models of packages that raypar does not know, for `capture.py --package`: environment, processes, page.

Each package gets an environment of its own in a temporary folder: what Python runs this is seen in it, and beside that the
package is installed. A process in it (`capture_package_tries.py`) forks a child for each model, with a time limit.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError, table

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "diffusers": ("diffusers", "transformers"),
    "monai": ("monai", "einops", "torchvision"),
    "others": (
        "reformer-pytorch", "perceiver-pytorch", "efficientnet-pytorch", "g-mlp-pytorch", "linformer",
        "performer-pytorch", "linear-attention-transformer", "timesformer-pytorch", "denoising-diffusion-pytorch",
        "open-clip-torch",
    ),
    "peft": ("peft", "transformers"),
    "segmentation_models_pytorch": ("segmentation-models-pytorch",),
    "timm": ("timm",),
    "torch_geometric": ("torch-geometric",),
    "torchvision": ("torchvision",),
    "transformers": ("transformers", "torchvision", "timm"),
    "vit_pytorch": ("vit-pytorch",),
    "x_transformers": ("x-transformers",),
}  # fmt: skip
"""Package -> what is installed for it; `others`: small packages of one architecture each."""
INSTALL_S = 1200.0
VERDICTS = ("exact", "said", "refused", "wrong", "crashed", "not tried")
REASONS = (
    ("reads values of activations", ("decides by the values", "depends on the values", "depends on values", "reads values")),
    ("a cache object between units", ("Cache is passed between units", "Cache, into which")),
    ("an object into which PyTorch does not look", ("may hide tensors", "does not look")),
    ("a tensor made where the capture does not look", ("where the capture does not look",)),
    ("random numbers of Python or numpy", ("draws from Python",)),
    ("TorchScript", ("TorchScript", "torch.jit")),
    ("state of a call before", ("does not do the same", "changes its attribute", "assigns a new tensor", "replaces")),
    ("a write that another layer must see", ("writes into", "written", "has written")),
    (
        "a submodule or tensor that cannot be kept",
        ("class of its own", "cannot be copied", "aliases", "share memory", "overlap"),
    ),
    ("two modules share running statistics", ("running statistics",)),
    ("a seed or setting between units", ("seeds PyTorch", "changes ")),
    ("takes too long without values", ("has run for",)),
)
"""Reason -> parts of messages that say it."""


def make_environment(folder: Path, package: str) -> Path:
    """The Python of a new environment in a folder, in which a package is installed beside what this Python sees.

    Raises `BenchError` if it cannot be installed beside this PyTorch.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    here = [*site.getsitepackages(), *(path for path in sys.path if path.endswith("site-packages"))]
    (packages / "of_the_caller.pth").write_text("\n".join(dict.fromkeys(here)) + "\n")
    limits = folder / "constraints.txt"
    limits.write_text(f"torch=={metadata.version('torch').partition('+')[0]}\n")  # no other PyTorch comes with a package
    command = [str(python), "-m", "pip", "install", "-q", "-c", str(limits), *REQUIREMENTS[package]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode:
        raise BenchError(f"{package} cannot be installed: {done.stderr.strip()[-500:]}")
    return python


def versions_in(python: Path, package: str) -> dict[str, str]:
    """Version of what is tried, of torch too."""
    names = [*REQUIREMENTS[package], "torch"]
    code = "import json, sys; from importlib.metadata import version as v; print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    done = subprocess.run([str(python), "-c", code, *names], capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def try_package(
    package: str, python: Path | None, models: Sequence[str], *, limit_s: float, total_s: float, at_once: int
) -> dict[str, Any]:
    """Rows of a package's models, and the versions of what was tried. `python`: of an environment that has it already."""
    with tempfile.TemporaryDirectory(prefix="rp-capture-") as folder:
        python = python or make_environment(Path(folder) / "env", package)
        paths = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        command = [str(python), str(Path(__file__).with_name("capture_package_tries.py")), package]
        command += ["--limit-s", str(limit_s), "--total-s", str(total_s), "--at-once", str(at_once)]
        command += ["--models", *models] if models else []
        found = []
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env, cwd=folder)
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    found.append(json.loads(line))
                    print(line[:200].rstrip(), file=sys.stderr, flush=True)
            if process.wait():
                errors.seek(0)
                raise BenchError(f"the tries of {package} ended with exit code {process.returncode}: {errors.read()[-500:]}")
        return {"rows": found, "versions": versions_in(python, package)}


def reason_of(row: dict[str, Any]) -> str:
    """Why a model was refused, in a few words."""
    why = row["why"]
    return next((reason for reason, parts in REASONS if any(part in why for part in parts)), "another reason")


def counts_text(rows: Sequence[dict[str, Any]]) -> str:
    """How many models became what."""
    verdicts = Counter(row["verdict"] for row in rows)
    tried = len(rows) - verdicts["not tried"]
    reasons = Counter(reason_of(row) for row in rows if row["verdict"] == "refused")
    by_reason = f" ({'; '.join(f'{count} {reason}' for reason, count in reasons.most_common())})" if reasons else ""
    return (
        f"Of {tried} models {verdicts['exact']} are exact in 3 stages, of {verdicts['said']} a line says before the run that "
        f"gradients are added in another order, {verdicts['refused']} are refused{by_reason}, "
        f"{verdicts['wrong']} are wrong, {verdicts['crashed']} crashed. {verdicts['not tried']} more were not tried: no small "
        "form was found in which the plain module runs here, or the time was over."
    )


def as_text(found: dict[str, dict[str, Any]]) -> str:
    """The page's body. `found`: package -> its rows and versions."""
    everything = [row for each in found.values() for row in each["rows"]]
    sizes = [
        [package, _versions_text(each["versions"]), *(str(sum(row["verdict"] == v for row in each["rows"])) for v in VERDICTS)]
        for package, each in found.items()
    ]
    notes = (
        "Exact: loss, every output and every gradient of a microbatch in training mode are `torch.equal` to those of the plain "
        "module, in 3 stages that hand each other copies; random numbers are seeded for each unit in both. Of three "
        "microbatches none depends on what those before it have left in Python's state (a job's check). Refused: one error "
        "before the run. Crashed: anything else that was raised. Small random configurations; use_cache, layerdrop and the "
        "masks of speech models are switched off, as the guide says. timm: one architecture of each of its model files. "
        "Said: the gradient of a parameter that several layers use, one of them several times, is added layer by layer (rule 6 "
        "of the contract: the same under every plan), as a line says before the run, and differs in its last bits from that of "
        "a plain loop; nothing else does. Wrong: anything else that is not equal to the last bit."
    )
    return "\n\n".join(
        [
            counts_text(everything),
            table(["package", "versions", *VERDICTS], sizes),
            notes,
            *_list_of("All but the exact ones", (row for row in everything if row["verdict"] not in ("exact", "not tried"))),
            "## One layer has most of the parameters",
            _large_text(everything),
            "## Exact",
            *(f"{package}: {', '.join(_exact(each['rows'])) or 'none'}." for package, each in found.items()),
            "## Not tried",
            "; ".join(f"{count} {why}" for why, count in _not_tried(everything)) + ".",
        ]
    )


def _exact(rows: Iterable[dict[str, Any]]) -> list[str]:
    return [f"{row['model']} ({row['layers']})" for row in rows if row["verdict"] == "exact"]


def _not_tried(rows: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    kinds = (
        ("the time for all was over", "for want of time"),
        ("GiB", "too large"),
        ("M parameters", "too large"),
        ("plain module", "whose plain module did not run so"),
    )
    found = Counter(
        next((kind for part, kind in kinds if part in row["why"]), "without a small form")
        for row in rows
        if row["verdict"] == "not tried"
    )
    return found.most_common()


def _large_text(rows: Sequence[dict[str, Any]]) -> str:
    large = [row for row in rows if row.get("largest", 0) > 0.8 and row["layers"] > 1]
    if not large:
        return "None has more than 80 %."
    named = [f"{row['model']} ({row['largest']:.3f}, {row['layers']} layers)" for row in large]
    return f"More than 80 %: {', '.join(named)}."


def _list_of(title: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    cells = [[row["package"], row["model"], row["verdict"], re.sub(r"[|\s]+", " ", row["why"])[:260]] for row in rows]
    return [f"## {title}", table(["package", "model", "verdict", "what was said or found"], cells)] if cells else []


def _versions_text(versions: dict[str, str]) -> str:
    named = [f"{name} {version}" for name, version in versions.items() if name != "torch"]
    return named[0] if len(named) < 4 else ", ".join(named)


def read_results(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """What earlier calls with `--json` have found; of a model that several have tried, what the last one says."""
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for package, each in json.loads(path.read_text())["packages"].items():
            merge(found, package, each)
    return found


def merge(found: dict[str, dict[str, Any]], package: str, each: dict[str, Any]) -> None:
    """Add what was found of a package's models, in the place of what was found of them before."""
    before = found.get(package, {"rows": []})
    rows = {row["model"]: row for row in before["rows"]} | {row["model"]: row for row in each["rows"]}
    found[package] = {"rows": list(rows.values()), "versions": each["versions"]}
