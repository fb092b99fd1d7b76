"""raypar's data beside that of its peers: which samples are lost or repeated after a kill, and in a validation.

`python jobs/bench/data_peers.py --peers VENV [--page FILE] [--only NAME ...] [--log FILE]`

With `--log` finished rows are kept in a file, and those found in it are not measured again.

`VENV`: an environment outside of the repository with `lightning`, `torchdata`, `torchtitan` and `mosaicml-streaming` beside
this PyTorch; contenders that need none of these run in the Python that runs this. Each trains 125 steps of 8 on an epoch of
1,003 samples, on two ranks with two loader processes each, and saves every 20 steps: once in peace, and once killed (`SIGKILL`,
all its processes) after step 70. From what it left it is resumed: as it was, with one rank, with three loader processes. A
weight for each sample counts how often it is in the weights that a run ends with (`data_peers_runs.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import psutil
from data_peers_runs import BATCH, EVERY, SAMPLES, STEPS, VALIDATED
from harness import ROOT, page, table
from safetensors.torch import load_file

KILLED_AFTER = 70
LIMIT_S = 900.0
RANKS, PROCESSES = 2, 2
RESUMED = {"as it was": (RANKS, PROCESSES), "1 rank": (1, PROCESSES), "3 processes": (RANKS, 3)}
"""Name -> (ranks, loader processes of each) of a run that goes on."""
RUNS = Path(__file__).with_name("data_peers_runs.py")


@dataclass
class Contender(ABC):
    """One way to train; `python` runs it."""

    name: str
    how: str
    """How its documentation says that it is resumed."""
    kind: str
    python: str = sys.executable

    @abstractmethod
    def command(self, folder: Path, ranks: int, processes: int, *, resumed: bool) -> list[str]:
        """The command that trains."""

    @abstractmethod
    def steps(self, folder: Path) -> int:
        """Steps that were done since the last start."""

    @abstractmethod
    def counts(self, folder: Path) -> list[int] | None:
        """How often each sample is in the weights; None without an end."""

    @abstractmethod
    def validated(self, folder: Path) -> tuple[int, int]:
        """(samples, different samples) of a validation."""


class Peer(Contender):
    """Of `data_peers_runs.py`."""

    def command(self, folder: Path, ranks: int, processes: int, *, resumed: bool) -> list[str]:
        (folder / "steps").unlink(missing_ok=True)
        words = [str(RUNS), self.kind, "--folder", str(folder), "--processes", str(processes)]
        if self.kind == "ray":
            return [self.python, *words, "--ranks", str(ranks)]
        return [self.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *words]

    def steps(self, folder: Path) -> int:
        return (folder / "steps").read_text().count("\n") if (folder / "steps").exists() else 0

    def counts(self, folder: Path) -> list[int] | None:
        found: list[int] | None = json.loads((folder / "counts").read_text()) if (folder / "counts").exists() else None
        return found

    def validated(self, folder: Path) -> tuple[int, int]:
        run(self, [*self.command(folder, RANKS, PROCESSES, resumed=False), "--validate"], folder)
        total, distinct = json.loads((folder / "validated").read_text())
        return total, distinct


class Raypar(Contender):
    """`raypar train` and `raypar resume`; ranks are replicas."""

    _before: int = 0

    def command(self, folder: Path, ranks: int, processes: int, *, resumed: bool) -> list[str]:
        stream = self.kind == "stream"
        words = [f"plan.replicas={ranks}"]
        if not stream:
            words.append(f"data.processes={processes}")
        elif processes != PROCESSES:
            words = [f"plan.replicas={processes + 1}"]  # the workers themselves read
        settings = [part for word in words for part in ("--set", word)]
        self._before = self._lines(folder)
        if resumed:
            return [self.python, "-m", "raypar", "resume", str(folder / "run"), *settings]
        module = "jobs.bench.data_peers_runs"
        (folder / "job.yaml").write_text(
            f"steps: {STEPS}\nbatch_size: {BATCH}\nmicrobatches: 4\nname: run\nrun_dir: {folder}\n"
            f"model: {module}:Taken\nloss: {module}:loss_of_weights\nplan: {{stages: 1}}\n"
            f"data: {{function: {module}:{'StreamPairs' if stream else 'IdPairs'}}}\n"
            f"optimizer: {{function: 'torch.optim:SGD', args: {{lr: {BATCH}.0}}}}\ncheckpoint: {{every: {EVERY}}}\n"
            f"validation: {{function: {module}:IdPairs, args: {{size: {VALIDATED}}}, every: 0}}\n"
            f"metrics: {{seen: {module}:Seen}}\n"
        )
        return [self.python, "-m", "raypar", "train", str(folder / "job.yaml"), *settings]

    def _lines(self, folder: Path) -> int:
        metrics = folder / "run" / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    def steps(self, folder: Path) -> int:
        # A resume takes the steps after its checkpoint away before it writes them anew.
        self._before = min(self._before, found := self._lines(folder))
        return found - self._before

    def counts(self, folder: Path) -> list[int] | None:
        out = folder / "weights.safetensors"
        command = [self.python, "-m", "raypar", "export", str(folder / "run"), "--out", str(out)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (weights,) = load_file(out).values()
        return [int(times) for times in (-weights.flatten()[:SAMPLES]).round().tolist()]

    def validated(self, folder: Path) -> tuple[int, int]:
        lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        last = [line for line in lines if "validation_loss" in line][-1]
        return int(last["count"]), int(last["validation_seen"])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it has started."""
    top = psutil.Process(process.pid)
    for one in (top, *top.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    process.wait()


def run(contender: Contender, command: list[str], folder: Path, *, until: int | None = None) -> float | None:
    """Run a command, killed after `until` steps; seconds to the first step. None if it has failed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    env |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    start, first_s = time.monotonic(), None
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=env)
        while process.poll() is None:
            done = contender.steps(folder)
            if done and first_s is None:
                first_s = time.monotonic() - start
            if (until is not None and done >= until) or time.monotonic() - start > LIMIT_S:
                end(process)
                return first_s if until is not None and done >= until else None
            time.sleep(0.02)
    failed = process.returncode != 0 or until is not None
    return None if failed else first_s or 0.0


def lost_and_repeated(contender: Contender, folder: Path, first_s: float | None) -> str:
    """Samples beyond those that no step of full size has room for, and repetitions; or why the run has no end."""
    counts = contender.counts(folder) if first_s is not None else None
    if counts is None:
        lines = (folder / "log").read_text().splitlines()
        reasons = [line for line in lines if "Error: " in line and "ChildFailed" not in line]
        return "refused: " + (reasons[-1].partition("Error: ")[2][:90] if reasons else "no end")
    lost = sum(times == 0 for times in counts) - SAMPLES % BATCH
    return f"{max(0, lost)} / {sum(max(0, times - 1) for times in counts)}"


def measure(contender: Contender, place: Path) -> list[str]:
    """The row of a contender."""
    folder = place / contender.kind
    folder.mkdir(parents=True)
    peace_s = run(contender, contender.command(folder, RANKS, PROCESSES, resumed=False), folder)
    cells, resumed_s, kept = [lost_and_repeated(contender, folder, peace_s)], [], place / f"{contender.kind}-killed"
    shutil.rmtree(folder)
    folder.mkdir()
    fresh_s = run(contender, contender.command(folder, RANKS, PROCESSES, resumed=False), folder, until=KILLED_AFTER)
    if fresh_s is None:
        raise RuntimeError(f"{contender.name} did not come to step {KILLED_AFTER}:\n{(folder / 'log').read_text()[-2000:]}")
    shutil.copytree(folder, kept)
    for ranks, processes in RESUMED.values():
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        first_s = run(contender, contender.command(folder, ranks, processes, resumed=True), folder)
        cells.append(lost_and_repeated(contender, folder, first_s))
        if first_s is not None:
            resumed_s.append(f"{first_s:.1f}")
    total, distinct = contender.validated(folder)
    shutil.rmtree(folder)
    validation = f"{total:,}" + (f", {distinct:,} different" if distinct != total else "")
    return [contender.name, *cells, f"{fresh_s:.1f}", ", ".join(resumed_s) or "-", validation]


def contenders(peers: Path) -> list[Contender]:
    """All of them; `peers`: the environment of those that this Python has not."""
    other = str(peers / "bin" / "python")
    trainer, stateful = "`train(resume_from_checkpoint=True)`", "`fit(ckpt_path=...)`, torchdata's `StatefulDataLoader`"
    return [
        Raypar("raypar, by id", "`raypar resume`", "ids"),
        Raypar("raypar, stream", "`raypar resume`", "stream"),
        Peer("HF Trainer, by id", trainer, "hf"),
        Peer("HF Trainer, stream", trainer, "hf-stream"),
        Peer("Lightning, by id", f"{stateful} with `StatefulDistributedSampler`", "lightning", other),
        Peer("Lightning, stream", f"{stateful}; the data set divides itself by rank", "lightning-stream", other),
        Peer("MosaicML streaming", "state of `StreamingDataLoader`, `num_canonical_nodes=2`", "streaming", other),
        Peer("torchtitan's loader", "state of `ParallelAwareDataloader`, of each rank", "torchtitan", other),
        Peer("Ray Train", "the same name and storage again, `get_checkpoint()`; Ray Data", "ray"),
    ]


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="write the page there")
    parser.add_argument("--log", type=Path, help="rows that are finished")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    given = parser.parse_args()
    known: dict[str, list[str]] = json.loads(given.log.read_text()) if given.log and given.log.exists() else {}
    rows, hows = [], []
    for contender in contenders(given.peers):
        if given.only and not any(part.lower() in contender.name.lower() for part in given.only):
            continue
        if contender.name not in known:
            with tempfile.TemporaryDirectory(prefix="raypar-data-peers-") as place:
                known[contender.name] = measure(contender, Path(place))
            if given.log is not None:
                given.log.write_text(json.dumps(known, indent=1))
        rows.append(known[contender.name])
        hows.append(f"- {contender.name}: {contender.how}.")
        print("  ".join(rows[-1]), flush=True)
    names = ["in peace: lost / repeated", *(f"resumed {name}" for name in RESUMED)]
    head = ["", *names, "s to the first step, fresh", "resumed", f"counted of {VALIDATED:,}"]
    question = str(__doc__).partition("`VENV`: ")[2].partition("\n\n")[0]
    versions = [str(given.peers / "bin" / "python"), "-m", "pip", "list", "--format=freeze"]
    found = subprocess.run(versions, capture_output=True, text=True, check=True).stdout.split()
    there = [one for one in found if one.partition("==")[0] in ("lightning", "torchdata", "torchtitan", "mosaicml-streaming")]
    body = f"VENV: {question}\n\n{table(head, rows)}\n\n{NOTE}\n\n" + "\n".join(hows) + f"\n\nIn VENV: {', '.join(there)}."
    print(body)
    if given.page is not None:
        given.page.write_text(page("Samples after a kill, beside peers", "python jobs/bench/data_peers.py --peers VENV", body))


NOTE = """Lost: samples of the epoch that are in no step of the finished training, beyond the three that 125 steps of 8 leave.
Repeated: times that one is in a step again. Seconds are from the command to the first step, imports and starts of processes and
of Ray included; each sample takes 2 ms to read. A stream of raypar is read in the workers: in the place of three processes it
is resumed with four replicas. The validation set is divided over two ranks, with batches of 8; counted is what a trainer hands
to a metric, or what the loaders of all ranks give. How each is resumed:"""


if __name__ == "__main__":
    main()
