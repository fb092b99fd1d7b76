"""Tries, in a process of its own, whether PyTorch, torchvision, NCCL and Ray can be imported, for `raypar doctor`.

`python -m raypar.actors.library_import_probe torch torchvision nccl` prints a JSON line for each, as soon as it is known:
where one hangs, those before it are known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from raypar.errors import RayparError
from raypar.fences.private_api_fence import find_missing_apis
from raypar.files.json_type import Json


def probe_torch() -> dict[str, Json]:
    """For which CUDA PyTorch was built, the names of the GPUs that it sees, and what it lacks of the APIs that raypar uses."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cuda": torch.version.cuda, "gpus": gpus, "lacks": list_missing_apis("torch_compat")}


def probe_torchvision() -> dict[str, Json]:
    """Nothing, if torchvision can be imported."""
    import torchvision

    return {"version": str(torchvision.__version__)}


def probe_nccl() -> dict[str, Json]:
    """The NCCL that CuPy finds, in words."""
    from raypar.comm.nccl import bindings

    found = bindings.find_nccl_installation()
    bindings.check_nccl_installation(found)
    return {"text": str(found)}


def probe_ray() -> dict[str, Json]:
    """What Ray lacks of the private APIs that raypar uses, if it can be imported."""
    import ray

    return {"version": str(ray.__version__), "lacks": list_missing_apis("ray_compat")}


def list_missing_apis(package: str) -> list[tuple[str, str]]:
    """(message, cure) for each private API that the installed release lacks. `package`: ray_compat or torch_compat."""
    return [(error.what, error.cure) for error in find_missing_apis(package)]


PROBES: dict[str, Callable[[], dict[str, Json]]] = {
    "torch": probe_torch,
    "torchvision": probe_torchvision,
    "nccl": probe_nccl,
    "ray": probe_ray,
}
"""Name -> what tries it."""


def probe(name: str) -> dict[str, Json]:
    """What a probe has found, or its error: broken libraries raise anything."""
    try:
        return PROBES[name]()
    except RayparError as error:
        return {"error": error.what, "cure": error.cure}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print("\n" + json.dumps({each: probe(each)}), flush=True)
