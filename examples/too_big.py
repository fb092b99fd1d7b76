"""A model that does not fit is refused with the plan that does, and trains with it under the limit, though an owner is killed.

`python examples/too_big.py [FOLDER]` trains a GPT on four workers, each of which may use less memory than AdamW's state of the
model takes alone. raypar refuses the plan before anything starts, with one error that names one that fits: ZeRO stage 3 with
parameters that come layer by layer, recomputation, and the optimizer's state in files. Without that check the run ends, at a
limit of its processes (RLIMIT_DATA), with an error that names plans which need less. With the plan that fits it trains under
both limits, also when a worker is killed that alone holds its part of the state. The weights are those of a run that nothing
disturbs, bit for bit. A few minutes.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples import gpt  # noqa: E402
from raypar.model.graph import Graph, Layer  # noqa: E402

RAYPAR = [sys.executable, "-m", "raypar"]
SIZE = {"width": 640, "depth": 10, "heads": 10, "context": 16}
"""49 million parameters: 189 MiB of them, and 379 MiB of AdamW."""
ROOM_MIB = 190
"""What a worker may use for what the memory sheet counts (`placement.worker_memory_mib`), half of AdamW's state. So little
that nothing fits without all of ZeRO stage 3 with parameters layer by layer, recomputation and optimizer state in files."""
LIMIT_MIB = ROOM_MIB + 170
"""RLIMIT_DATA above what a process has before it builds the model, less than AdamW's state takes: the rest is for messages,
stacks of threads, what heaps reserve, and what a worker is sent while it takes over from a lost one."""
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
"""RLIMIT_DATA counts what heaps reserve, too, and each thread would have one."""
STEPS, KILLED_AFTER = 4, 3
JOB = [
    *(f"model.args.{name}={value}" for name, value in SIZE.items()),
    f"data.args.context={SIZE['context']}",
    f"steps={STEPS}",
    "batch_size=16",
    "microbatches=8",
    "plan.schedule=gpipe",
    "plan.stages=1",
    "plan.replicas=4",
    "plan.gradients=scatter",
    "checkpoint.every=0",
    "validation=null",
    "elastic.min_workers=4",
    "elastic.mirror=1",
]


def layers(limit_mib: int, width: int, depth: int, heads: int, context: int) -> Graph:
    """The model, as layers that are built one by one. A worker that asks for it may use so much more memory from then on."""
    if limit_mib and is_worker():
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + (limit_mib << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    made = [("embed", partial(gpt.Embed, 256, context, width))]
    made += [(f"block{i}", partial(gpt.Block, width, heads, depth)) for i in range(depth)]
    made += [("head", partial(gpt.Head, width, 256))]
    values = ("x", *(f"h{i}" for i in range(len(made))))
    chain = tuple(Layer(name, build, (values[i],), (values[i + 1],)) for i, (name, build) in enumerate(made))
    return Graph(chain, output=values[-1])


def is_worker() -> bool:
    """Whether this process is a worker of a run: the one that starts the run builds the model too, to check it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def train(run: Path, *settings: str, limit_mib: int = 0, disturb: Callable[[Path], None] | None = None) -> tuple[int, str]:
    """(exit code, what was printed) of `raypar train`, while `disturb(run)` does what it wants."""
    limited = ["model.function=examples.too_big:layers", f"model.args.limit_mib={limit_mib}"]
    words = [*JOB, *limited, *settings, f"elastic.mirror_in={run}.mirror", f"name={run.name}", f"run_dir={run.parent}"]
    command = [*RAYPAR, "train", str(ROOT / "jobs/quickstart.yaml"), *(part for word in words for part in ("--set", word))]
    print(f"\n>>> {run.name}: raypar train jobs/quickstart.yaml --set {' --set '.join(settings) or '...'}", flush=True)
    printed = ""
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": {**os.environ, **ONE_HEAP}}
    with subprocess.Popen(command, text=True, **given) as training:
        if disturb is not None:
            threading.Thread(target=disturb, args=(run,), daemon=True).start()
        for line in training.stdout or ():
            print(line, end="", flush=True)
            printed += line
    return training.returncode, printed


def kill_an_owner(run: Path) -> None:
    """`kill -9` of a worker, once some steps are done."""
    metrics = run / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < KILLED_AFTER:
        time.sleep(0.05)
    member = json.loads((run / "members.json").read_text())["members"][1]
    os.kill(member["pid"], signal.SIGKILL)
    print(
        f">>> after {KILLED_AFTER} steps {member['coordinate']} was killed; nobody else has its part of the state", flush=True
    )


def plan_of_error(printed: str) -> list[str]:
    """The settings of the first plan that an error says fits."""
    found = re.search(r"predicted to fit: (.+?) \(", printed)
    return re.findall(r"[a-z]+\.\w+=\S+", found[1]) if found else sys.exit("there is no error that names a plan that fits")


def hash_of_weights(code: int, printed: str) -> str:
    """The hash that a run ends with."""
    return printed.split()[-1] if code == 0 else sys.exit("the run has failed")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/too_big-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    memory = f"placement.worker_memory_mib={ROOM_MIB}"
    code, printed = train(folder / "refused", memory)
    fits = plan_of_error(printed)
    print(f">>> refused with exit code {code}: {' and '.join(fits)} fits")
    code, printed = train(folder / "unchecked", limit_mib=LIMIT_MIB)
    print(f">>> without the check it ends with exit code {code}: smaller is {' and '.join(plan_of_error(printed))}")

    fits = [setting.replace("FOLDER", str(folder / "state")) for setting in fits]
    limited = hash_of_weights(*train(folder / "limited", memory, *fits, limit_mib=LIMIT_MIB, disturb=kill_an_owner))
    without = hash_of_weights(*train(folder / "without_limit", "plan.zero=1"))
    print(f"\nunder the limit, an owner killed  {limited}\nnothing disturbed                 {without}")
    print("equal" if limited == without else "DIFFERENT")
    sys.exit(limited != without)


if __name__ == "__main__":
    main()
