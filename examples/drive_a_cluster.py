"""A Ray program of your own that trains with `raypar.Trainer` on the cluster that it has joined, and uses what comes out.

`python examples/drive_a_cluster.py [--address auto] [--stages 2] [--replicas 2] [--shards 2] [--steps 60]`, where a cluster
runs that has a CPU for each worker (`ray start --head --num-cpus 8`). It trains a small GPT on stages x replicas x shards
workers, and then goes on from the checkpoint with one.
"""

import argparse
import sys
from pathlib import Path

import ray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from raypar import Trainer  # noqa: E402
from raypar.callbacks import Callback, StepInfo  # noqa: E402

SIZE = {"width": 64, "depth": 4, "heads": 4, "context": 64}


class Losses(Callback):
    """Says the loss now and then. Callbacks run on the cluster; `result.history` has every step."""

    def on_step(self, info: StepInfo) -> None:
        if info.step % 20 == 0:
            print(f"step {info.step}: loss {info.loss:.3f}", flush=True)


def trainer(steps: int, plan: dict, **more) -> Trainer:
    return Trainer(
        model=("examples.gpt:layers", SIZE),
        loss="examples.gpt:loss",
        data=("examples.gpt:text", {"context": SIZE["context"]}),
        optimizer=("torch.optim:AdamW", {"lr": 3e-3, "fused": True}),
        steps=steps,
        batch_size=32,
        microbatches=8,
        virtual_replicas=4,
        clip_norm=1.0,
        name="driven",
        plan=plan,
        **more,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="auto")
    for axis in ("stages", "replicas", "shards"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--run-dir", default="runs")
    given = parser.parse_args()
    # Workers import what this process can import: on other machines from a copy of the repository, which Ray sends there.
    try:
        ray.init(given.address, runtime_env={"working_dir": str(ROOT), "excludes": ["runs/"]}, log_to_driver=True)
    except ConnectionError as error:
        sys.exit(f"no Ray cluster answers at {given.address!r}: {error}\n  cure: start one: ray start --head --num-cpus 8")
    plan = {"stages": given.stages, "replicas": given.replicas, "shards": given.shards}
    done = trainer(given.steps, plan, callbacks=[Losses()], run_dir=given.run_dir).fit()
    print(f"{done.done} steps, loss {done.metrics['loss']:.4f}, weights {done.weights_sha256}, in {done.path}")
    more = trainer(given.steps + 20, {}, run_dir=given.run_dir, resume_from_checkpoint=done.checkpoint).fit(verbose=False)
    print(f"{more.done} steps, the last {more.done - done.done} with one worker, loss {more.metrics['loss']:.4f}")
    ray.shutdown()


if __name__ == "__main__":
    main()
