"""A sweep: Ray Tune tries learning rates, and each trial trains with raypar, on two stages.

`python examples/sweep.py [FOLDER]` runs three trials on a local Ray cluster with room for one at a time; two minutes. All
trials begin at once; raypar places their runs one after the other, and a waiting one says for what it waits.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATES = (1e-3, 3e-3, 1e-2)
STEPS, WORKERS = 20, 2


def trial(config: dict) -> dict:
    """Train with one learning rate; what is returned is the trial's result."""
    import raypar

    result = raypar.Trainer(
        model=("examples.gpt:layers", {"width": 64, "context": 64}),
        loss="examples.gpt:loss",
        data=("examples.gpt:text", {"context": 64}),
        optimizer=("torch.optim:AdamW", {"lr": config["lr"]}),
        steps=STEPS,
        batch_size=8,
        microbatches=4,
        plan={"stages": WORKERS},
        name=f"lr_{config['lr']:g}",
        run_dir=config["run_dir"],
    ).fit()
    return {"loss": result.metrics["loss"], "weights": result.weights_sha256}


def main() -> None:
    import ray
    from ray import tune

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}"))
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory(prefix="raypar-", dir="/tmp") as temp:  # short: Ray puts its sockets in it
        ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, _temp_dir=temp)
        tuner = tune.Tuner(
            tune.with_resources(trial, {"cpu": 0.01}),  # next to nothing: its workers reserve theirs
            param_space={"lr": tune.grid_search([*RATES]), "run_dir": str(folder)},
            tune_config=tune.TuneConfig(metric="loss", mode="min"),
            run_config=tune.RunConfig(storage_path=str(folder / "tune"), name="sweep", verbose=0),
        )
        results = tuner.fit()
        ray.shutdown()
    for found in sorted(results, key=lambda one: one.config["lr"]):
        print(f"lr {found.config['lr']:<6g} loss {found.metrics['loss']:.4f}  weights {found.metrics['weights'][:16]}")
    print(f"best: lr {results.get_best_result().config['lr']:g}; the runs: raypar runs --run-dir {folder}")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # of the trials
    main()
