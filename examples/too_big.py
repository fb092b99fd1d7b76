"""A model that does not fit is refused with the plan that does, and trains with it under the limit, though an owner is killed.

`python examples/too_big.py [FOLDER]` gives each worker of a small GPT a limit of memory (RLIMIT_DATA) that its plan exceeds.
raypar refuses the plan before anything starts, with one error that names a plan that fits; without that check the run ends
with an error that names plans which need less. With the plan that fits it trains under the limit, also when a worker is killed
that alone holds its part of the optimizer's state. The weights are those of a run without a limit, bit for bit. Three to five
minutes.
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
from pathlib import Path

from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples import gpt  # noqa: E402

RAYPAR = [sys.executable, "-m", "raypar"]
SIZE = {"width": 384, "depth": 6, "heads": 6, "context": 64}
"""11 million parameters: in each of two stages 21 MiB of them, as much of each sum of gradients, 42 of AdamW."""
ROOM_MIB = 145
"""What a worker may use for what the memory sheet counts: too little for the plan of the job, for it with ZeRO alone, and for
it with recomputation alone. With less room the errors name other plans: a higher level, where raypar has one."""
BESIDE_MIB = 210
"""What the limit leaves a worker beside that: messages, what the allocator keeps, stacks of threads, and the state before and
after the change when workers take over from a lost one."""
STEPS, KILLED_AFTER = 5, 2
JOB = [
    *(f"model.args.{name}={value}" for name, value in SIZE.items()),
    f"data.args.context={SIZE['context']}",
    f"steps={STEPS}",
    "batch_size=128",
    "microbatches=16",
    "plan.schedule=gpipe",
    "checkpoint.every=0",
    "validation=null",
    "elastic.min_workers=4",
]


def layers(limit_mib: int, **args: int) -> nn.Sequential:
    """The model. A worker that builds it may use so much more memory from then on."""
    if limit_mib and is_worker():
        data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (data + (limit_mib << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]))
    return gpt.layers(**args)


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
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as training:
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
    return found[1].split(" with ") if found else sys.exit("there is no error that names a plan that fits")


def hash_of_weights(code: int, printed: str) -> str:
    """The hash that a run ends with."""
    return printed.split()[-1] if code == 0 else sys.exit("the run has failed")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else f"runs/too_big-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    memory = f"placement.worker_memory_mib={ROOM_MIB}"
    code, printed = train(folder / "refused", memory)
    fits = plan_of_error(printed)
    print(f">>> refused with exit code {code}: {' and '.join(fits)} fits")
    code, printed = train(folder / "unchecked", limit_mib=ROOM_MIB + BESIDE_MIB)
    print(f">>> without the check it ends with exit code {code}: smaller is {' and '.join(plan_of_error(printed))}")

    limited = hash_of_weights(*train(folder / "limited", memory, *fits, limit_mib=ROOM_MIB + BESIDE_MIB, disturb=kill_an_owner))
    without = hash_of_weights(*train(folder / "without_limit"))
    print(f"\nunder the limit, an owner killed  {limited}\nwithout a limit                   {without}")
    print("equal" if limited == without else "DIFFERENT")
    sys.exit(limited != without)


if __name__ == "__main__":
    main()
