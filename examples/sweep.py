"""A sweep: Ray Tune tries learning rates, then Ray tasks try two of them again; each trial trains with raypar, on two stages.

`python examples/sweep.py [FOLDER]` runs three trials and two tasks on a local Ray cluster with room for one run at a time; two
minutes. All trials begin at once; raypar places their runs one after the other, and a waiting one says for what it waits.
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
        name=config["name"],
        run_dir=config["run_dir"],
    ).fit(verbose="brief")  # a few lines, each with the run's name
    return {"loss": result.metrics["loss"], "weights": result.weights_sha256}


def tune_rates(folder: Path) -> dict[float, dict]:
    """Rate -> result, of trials of Ray Tune."""
    from ray import tune

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": 0.01}),  # next to nothing: its workers reserve theirs
        param_space={
            "lr": tune.grid_search([*RATES]),
            "name": tune.sample_from(lambda config: f"lr_{config['lr']:g}"),
            "run_dir": str(folder),
        },
        tune_config=tune.TuneConfig(metric="loss", mode="min"),
        run_config=tune.RunConfig(storage_path=str(folder / "tune"), name="sweep", verbose=0),
    )
    return {found.config["lr"]: found.metrics for found in tuner.fit()}


def train_in_tasks(folder: Path, rates: tuple[float, ...]) -> dict[float, dict]:
    """Rate -> result, of Ray tasks side by side."""
    import ray

    task = ray.remote(num_cpus=0)(trial)
    asked = [task.remote({"lr": rate, "name": f"task_{rate:g}", "run_dir": str(folder)}) for rate in rates]
    return dict(zip(rates, ray.get(asked), strict=True))


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(f"runs/sweep-{time.strftime('%Y%m%d-%H%M%S')}"))
    folder = parser.parse_args().folder.resolve()
    with tempfile.TemporaryDirectory(prefix="raypar-", dir="/tmp") as temp:  # short: Ray puts its sockets in it
        ray.init(address="local", num_cpus=WORKERS + 1, include_dashboard=False, _temp_dir=temp)
        tuned = tune_rates(folder)
        again = train_in_tasks(folder, RATES[:2])
        ray.shutdown()
    print()
    for rate, found in sorted(tuned.items()):
        same = ", in a task the same" if again.get(rate, {}).get("weights") == found["weights"] else ""
        print(f"lr {rate:<6g} loss {found['loss']:.4f}  weights {found['weights'][:16]}{same}")
    best = min(tuned, key=lambda rate: tuned[rate]["loss"])
    print(f"best: lr {best:g}; the runs: raypar runs --run-dir {folder}")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # of the trials
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_AIR_NEW_OUTPUT": "0"}  # lines that differ in a number are all shown
    main()
