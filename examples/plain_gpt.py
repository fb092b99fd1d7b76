"""The reference: the job of a job file in one plain PyTorch process with one thread. It does not import raypar.

    python examples/plain_gpt.py jobs/quickstart.yaml [--set precision.compute=bf16]

ends with the line `weights sha256 <64 hex>`, which `raypar train` prints too, whatever its plan. This page is the numerics
contract (raypar/NUMERICS.md): blocks of microbatches, the addition tree, one scaling, the norm over fixed pieces, exact sums.
"""

import argparse
import hashlib
import importlib
import inspect
import math
import random
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy
import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)


def seed_of(*place):
    text = "/".join(map(str, place))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def function(entry):
    entry = {"function": entry} if isinstance(entry, str) else entry
    module, name = entry["function"].split(":")
    return partial(getattr(importlib.import_module(module), name), **entry.get("args", {}))


def sample(data, seed, epoch, index):
    here = seed_of(seed, "sample", epoch, index) % 2**32
    random.seed(here), numpy.random.seed(here), torch.manual_seed(here)
    return data[index]


def seeded_collate(entry):
    if not isinstance(entry, dict) or not entry.get("collate"):
        return None
    call = function(entry["collate"])
    made = call() if isinstance(call.func, type) else call  # of a class one object, which is called

    def collate(samples, seed, step, microbatch):
        here = seed_of(seed, "collate", step, microbatch) % 2**32
        random.seed(here), numpy.random.seed(here), torch.manual_seed(here)
        return made(samples)

    return collate


def add(a, b):  # an empty block is skipped
    return b if a is None else a if b is None else [x + y for x, y in zip(a, b, strict=True)]


def tree(sums):  # the left subtree is the largest power of two below the number of blocks
    if len(sums) == 1:
        return sums[0]
    left = 1 << (len(sums) - 1).bit_length() - 1
    return add(tree(sums[:left]), tree(sums[left:]))


LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}


def computing_in(precision):  # every operation casts for itself; parameters, their gradients and all below stay float32
    if precision.get("compute"):
        return torch.autocast("cpu", LOWER[precision["compute"]], cache_enabled=False)
    return nullcontext()


def refuse(what, cure):
    raise SystemExit(f"error: {what}, which this page does not compute as raypar does\n  cure: {cure}")


NEEDED = ["steps", "batch_size", "microbatches", "model", "loss", "data"]
KNOWN = {  # keys that are computed here or change no result; of other sections than these no key is read
    "": [
        *NEEDED, "name", "seed", "virtual_replicas", "optimizer", "lr_schedule", "clip_norm", "validation", "plan", "elastic",
        "placement", "checkpoint", "run_dir", "reduction", "dtype", "precision", "init", "deferred_init", "init_from", "device",
        "threads", "non_finite", "max_time_s", "callbacks", "trackers", "wait_for_workers_s", "trace_every",
        "price_per_worker_hour",
    ],
    "model": ["function", "args", "units", "buffers"],
    "loss": ["function", "args"],
    "data": ["function", "args", "input", "target", "names", "collate", "processes"],
    "optimizer": ["function", "args"],
    "lr_schedule": ["function", "args"],
    "precision": ["compute", "parameters", "master", "gradients", "loss_scale"],
}  # fmt: skip


def check_keys(job):
    sections = {"": job, **{name: job[name] for name in KNOWN if isinstance(job.get(name), dict)}}
    unknown = [f"{name}.{key}".lstrip(".") for name, of in sections.items() for key in of if key not in KNOWN[name]]
    if unknown:
        refuse(f"the job has {', '.join(unknown)}", "correct the spelling, leave it out, or compare two plans instead")
    if missing := [key for key in NEEDED if key not in job]:
        raise SystemExit(f"error: the job has no {', '.join(missing)}\n  cure: add it, or --set {missing[0]}=...")


def check_model(job, model):
    if not isinstance(model, torch.nn.Sequential):
        refuse("the model is no nn.Sequential", "let its function return one, or compare two plans by `raypar train`")
    if len(list(model.parameters())) != len(list(model.named_parameters(remove_duplicate=False))):
        refuse("layers share parameters", "leave the tie out, or compare two plans by `raypar train`")
    if any(isinstance(part, torch.nn.modules.dropout._DropoutNd) and part.p for part in model.modules()):
        refuse("the model has dropout", "set it to 0, or compare two plans by `raypar train`")
    if isinstance(job.get("model"), dict) and job["model"].get("buffers", "refuse") != "refuse":
        refuse("the job has model.buffers", "leave it out, or compare two plans by `raypar train`")
    if "job.steps" in str(job.get("lr_schedule")):
        refuse("the lr_schedule has the argument job.steps", "write the number of steps")
    defaults = {"init_from": None, "init": "model", "dtype": "float32", "reduction": "canonical", "device": "cpu", "threads": 1}
    for key, default in defaults.items():
        if job.get(key, default) != default:
            refuse(f"the job has {key}", f"leave {key} out, or compare two plans by `raypar train`")


def train(job):
    check_keys(job)
    seed, batch, m = job.get("seed", 0), job["batch_size"], job["microbatches"]
    blocks = job.get("virtual_replicas") or min(m, 16)
    random.seed(seed), numpy.random.seed(seed % 2**32), torch.manual_seed(seed)
    model = function(job["model"])()
    check_model(job, model)
    data, loss_of = function(job["data"])(), function(job["loss"])
    collate = seeded_collate(job["data"])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [(parameter, parameter.data) for parameter in model.parameters() if not parameter.requires_grad]
    precision = job.get("precision") or {}
    lower = LOWER.get(precision.get("compute") or precision.get("parameters"))
    rounds = precision.get("parameters") is not None  # layers have copies, the optimizer has what is copied
    in_lower = precision.get("gradients", "float32") != "float32"  # all sums of gradients of such copies
    scaling = {"init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    scaling |= precision.get("loss_scale") or {}
    scale, clean = (float(scaling["init_scale"]) if lower is torch.float16 else 1.0), 0
    masters = [torch.nn.Parameter(p.detach().clone()) if rounds else p for p in parameters]
    for part in model.modules() if rounds else ():
        for parameter in part.parameters(recurse=False) if getattr(part, "running_mean", None) is None else ():
            parameter.data = parameter.data.to(lower)
    optimizer = function(job.get("optimizer") or "torch.optim:AdamW")(masters)
    getattr(optimizer, "train", lambda: None)()  # those that average weights have two modes
    base_lr = optimizer.defaults["lr"]
    lr_factor = function(job["lr_schedule"]) if job.get("lr_schedule") else lambda step: 1.0
    scheduler = lr_factor(optimizer) if "optimizer" in inspect.signature(lr_factor).parameters else None
    orders = {}

    def order(epoch):
        if epoch not in orders:
            generator = torch.Generator().manual_seed(seed_of(seed, "epoch", epoch))
            orders[epoch] = torch.randperm(len(data), generator=generator).tolist()
        return orders[epoch]

    for step in range(job["steps"]):
        sums, losses = [], []
        for block in range(blocks):
            members, summed = range(block * m // blocks, (block + 1) * m // blocks), None
            for microbatch in members:
                places = range(step * batch + microbatch * batch // m, step * batch + (microbatch + 1) * batch // m)
                where = [divmod(place, len(data)) for place in places]
                samples = [sample(data, seed, epoch, order(epoch)[entry]) for epoch, entry in where]
                fields = collate(samples, seed, step, microbatch) if collate else samples[0]
                if not isinstance(fields, tuple) or len(fields) != 2:
                    refuse("a sample or batch is no pair (x, y)", "let data set and collate return pairs of tensors")
                x, y = fields if collate else (torch.stack(field) for field in zip(*samples, strict=True))
                with computing_in(precision):
                    output = model(x.to(lower) if rounds and x.is_floating_point() else x)
                    found = loss_of(output.float() if rounds else output, y)
                if not isinstance(found, tuple):
                    refuse("the loss returns no pair", "let it return (sum, count)")
                total, count = found
                model.zero_grad(set_to_none=True)
                total.float().backward(torch.tensor(scale))
                summed = add(summed, [p.grad if in_lower else p.grad.float() for p in parameters])
                losses.append((total.item(), float(count)))
            sums.append(summed)
        gradients = [gradient.float() for gradient in tree(sums)]
        total, count = (math.fsum(column) for column in zip(*losses, strict=True))
        # Of a copy: what `dot` gives depends on the address, and a gradient may be a part of a larger tensor.
        pieces = [piece for g in gradients for piece in g.clone().flatten().split(32768)]
        norm = math.sqrt(math.fsum(torch.dot(piece, piece).item() for piece in pieces)) / scale / count
        clip = job.get("clip_norm")
        factor = (min(1.0, clip / (norm + 1e-6)) / count if clip else 1.0 / count) / scale
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.mul_(factor)
        overflows = lower is torch.float16 and not math.isfinite(norm)  # such a step is skipped
        clean = 0 if overflows else clean + 1
        if overflows:
            scale = max(scale * scaling["backoff_factor"], 2.0**-24)
        elif lower is torch.float16 and clean == scaling["growth_interval"]:
            scale, clean = scale * (scaling["growth_factor"] if scale * scaling["growth_factor"] <= 2.0**127 else 1.0), 0
        here = seed_of(seed, "optimizer", step)
        random.seed(here % 2**32), numpy.random.seed(here % 2**32), torch.manual_seed(here)
        for group in optimizer.param_groups if scheduler is None else ():
            group["lr"] = base_lr * lr_factor(step)
        if not overflows:
            optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.data.copy_(master.data)
        if scheduler is not None:
            scheduler.step()
        if step % 10 == 0 or step + 1 == job["steps"]:
            print(f"step {step} loss {total / count:.4f} norm {norm:.4f}", flush=True)
    for parameter, value in (*zip(parameters, masters, strict=True), *frozen):
        parameter.data = value.data
    return model


def read_job(path, overrides):  # each `a.b=c`
    job = yaml.safe_load(Path(path).read_text())
    for override in overrides:
        place, value = override.split("=", 1)
        *sections, key = place.split(".")
        here = job
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = yaml.safe_load(value)
    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    given = parser.parse_args()
    model = train(read_job(given.job, given.overrides))
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}\0".encode() + parameter.detach().contiguous().numpy().tobytes())
    print(f"weights sha256 {digest.hexdigest()}")
