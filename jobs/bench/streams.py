"""What streams cost: finding a place after 10,000 steps, memory and journal of 5,000 steps, and the pause of a recovery.

`python jobs/bench/streams.py [--page FILE] [--repeats 3] [--only places memory recovery]`

Places and memory are measured in processes of their own without Ray, by what workers and driver use; recoveries in runs on a
local Ray cluster, in which a worker is killed that reads a stream, and one that reads none.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from raypar.job import Job

WIDTH, STREAMS, BATCH = 8, 4, 16
STEPS_BEFORE, MEMORY_STEPS, SETTLED = 10_000, 5_000, 500
LIMIT_S, FLAT_MIB, JOURNAL_BYTES, PAUSE_S = 2.0, 8.0, 16, 0.2
STEP_SLEEP_S = 0.02
"""Of the model's last layer, a microbatch: a step takes longer than noise."""


def row(index: int) -> dict[str, Tensor]:
    """Sample `index`: `x` [8] with noise drawn where it is read, `y` [8]."""
    x = torch.linspace(-1, 1, WIDTH) * (index % 97) / 97 + 0.1 * torch.randn(WIDTH)
    return {"x": x, "y": x.flip(0)}


def part(size: int) -> range:
    """The numbers of the samples that this worker of a `DataLoader` reads."""
    info = torch.utils.data.get_worker_info()
    return range(size) if info is None else range(info.id, size, info.num_workers)


class WithoutState(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """Keeps no place."""

    def __init__(self, size: int = 200_000) -> None:
        self.size = size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return map(row, part(self.size))


class WithState(WithoutState):
    """Keeps its place."""

    given = begin = 0

    def state_dict(self) -> dict[str, int]:
        """How many samples it has given."""
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin there."""
        self.begin = state["given"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.given, self.begin = self.begin, 0
        for index in part(self.size)[self.given :]:
            self.given += 1
            yield row(index)


class ById(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The same samples, map-style."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return row(index)


def from_files(folder: str) -> Any:
    """`datasets` streaming of JSON lines."""
    from datasets import load_dataset

    files = sorted(map(str, Path(folder).glob("*.jsonl")))
    return load_dataset("json", data_files=files, split="train", streaming=True).with_format("torch")


def write_files(folder: Path, rows: int) -> None:
    """The files of `from_files`."""
    for number in range(STREAMS):
        line = json.dumps({"x": [number / 9] * WIDTH, "y": [0.5] * WIDTH}) + "\n"
        (folder / f"{number}.jsonl").write_text(line * (rows // STREAMS))


class Slow(nn.Linear):
    """A layer that takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            time.sleep(self.seconds)
        return super().forward(x)


def model(sleep_s: float = 0.0) -> nn.Sequential:
    """Four layers; the last one sleeps."""
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())), Slow(sleep_s))


def loss(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    return (output - y).square().mean()


def job(source: str, *words: str, **args: Any) -> Job:
    """The bench's job on a source of this module."""
    from raypar.job.read_job import load_job

    text = {
        "name": "streams",
        "steps": STEPS_BEFORE,
        "batch_size": BATCH,
        "microbatches": STREAMS,
        "model": "jobs.bench.streams:model",
        "loss": "jobs.bench.streams:loss",
        "data": {"function": f"jobs.bench.streams:{source}", "args": args, "target": "y"},
        "optimizer": {"function": "torch.optim:SGD", "args": {"lr": 0.01}},
        "checkpoint": {"every": 0},
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(text, file)  # JSON is YAML
        file.flush()
        return load_job(file.name, list(words))


SOURCES = {
    "IterableDataset with state_dict": ("WithState", 0),
    "the same, shuffle_window 1,000": ("WithState", 1000),
    "IterableDataset without": ("WithoutState", 0),
    "datasets streaming, JSON lines": ("from_files", 0),
}


def job_of(source: str, window: int, folder: Path) -> Job:
    """Its job, with its files in a folder."""
    args: dict[str, Any] = {}
    if source == "from_files":
        write_files(folder, 200_000)
        args = {"folder": str(folder)}
    shuffled = [f"data.shuffle_window={window}"] if window else ["data.shuffle=false"]
    return job(source, f"data.streams={STREAMS}", *shuffled, **args)


# -- what is measured, in processes of their own -----------------------------------------------------------------------------


def measure_place(source: str, window: int) -> dict[str, Any]:
    """Read 10,000 steps and keep the journal; then begin again from its files, as a resume does, and read the next step."""
    from raypar.actors.stream_digest_journal import StreamDigestJournal
    from raypar.worker.data.stream_loader import OpenStreams, StreamLoader

    with tempfile.TemporaryDirectory() as room:
        spec = job_of(source, window, Path(room))

        def journal() -> StreamDigestJournal:
            files = Path(room, "samples.bin"), Path(room, "cursors.json")
            return StreamDigestJournal(*files, spec.batching, STREAMS, 1000, print)

        def loader(streams: OpenStreams) -> StreamLoader:
            options: dict[str, Any] = {"seed": spec.seed, "fields": ("x", "y"), "own": range(STREAMS), "streams": streams}
            return StreamLoader(spec.training_data, spec.batching, **options)

        first, kept = OpenStreams(), journal()
        kept.open(0)
        reading = loader(first)
        for step in range(STEPS_BEFORE):
            first.wants_cursors = kept.wants_cursors(step)
            for microbatch in range(STREAMS):
                reading.get(step, microbatch)
            assert kept.note(step, reading.report(step)) is None
            kept.write(kept.record(step))
        before = max(reader.given for reader in first.readers.values())
        want = [reading.get(STEPS_BEFORE, microbatch)["x"] for microbatch in range(STREAMS)]
        new = max(reader.given for reader in first.readers.values()) - before

        again, streams = journal(), OpenStreams()
        again.open(STEPS_BEFORE)
        told = again.line_about_places(STEPS_BEFORE, 1)
        begun, used = time.perf_counter(), time.process_time()
        known = {(STEPS_BEFORE - 1, microbatch): digest for microbatch, digest in again.digests(STEPS_BEFORE).items()}
        streams.learn(again.known_epochs(), again.known_cursors(), known)
        found = [loader(streams).get(STEPS_BEFORE, microbatch)["x"] for microbatch in range(STREAMS)]
        seconds, used = time.perf_counter() - begun, time.process_time() - used
        assert all(map(torch.equal, found, want))
        given = max(reader.given for reader in streams.readers.values())
        return {
            "seconds": seconds,
            "processor": used,
            "again": given - new,
            "told": told.partition(": ")[2].partition("\n")[0] if told else "",
            "journal": Path(room, "samples.bin").stat().st_size / STEPS_BEFORE / STREAMS,
        }


def measure_memory(source: str, window: int) -> dict[str, Any]:
    """Train 5,000 steps in one process, with the journal; resident memory after 500 steps and later."""
    from raypar.actors.stream_digest_journal import StreamDigestJournal
    from raypar.plan import ParallelPlan
    from raypar.worker.layer_graph_of_job import make_layer_graph
    from raypar.worker.run_in_one_process import OneProcessRun

    def resident_mib() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    with tempfile.TemporaryDirectory() as room:
        spec = job_of(source, window, Path(room))
        graph = make_layer_graph(spec)
        kept = StreamDigestJournal(Path(room, "samples.bin"), Path(room, "cursors.json"), spec.batching, STREAMS, 1000, print)
        kept.open(0)
        found = []
        with OneProcessRun(spec, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
            for step in range(MEMORY_STEPS):
                run.cores[0].data.streams.wants_cursors = kept.wants_cursors(step)
                (report,) = run.step(step)
                assert report.streams is not None and kept.note(step, report.streams) is None
                kept.write(kept.record(step))
                if step >= SETTLED and step % 100 == 0:
                    found.append(resident_mib())
    return {"first": found[0], "least": min(found), "most": max(found), "last": found[-1]}


KINDS = {
    "map-style": ("ById", ()),
    "map-style, data.processes: 1": ("ById", ("data.processes=1",)),
    "stream with state_dict": ("WithState", (f"data.streams={STREAMS}", "data.shuffle=false")),
    "stream without": ("WithoutState", (f"data.streams={STREAMS}", "data.shuffle=false")),
}


def measure_recovery(kind: str, rank: int, at: int) -> dict[str, Any]:
    """Kill a worker of 2 stages x 2 replicas after step `at`: the pause, the usual step before, and the plan after it."""
    from raypar.actors.ray_connection import connect_ray
    from raypar.launch import train_job_in_new_folder

    source, words = KINDS[kind]
    found: dict[str, Any] = {"steps": []}
    pids: list[int] = []
    with tempfile.TemporaryDirectory() as room:
        settings = [
            "steps=60",
            f"model.args.sleep_s={STEP_SLEEP_S}",
            f"run_dir={room}",
            "elastic={min_workers: 1, max_workers: 4}",
        ]
        spec = job(source, *words, *settings, "plan={stages: 2, replicas: 2}")

        def tell(event: Any) -> None:
            if event.kind == "stage" and event.stage == "started":
                pids.extend(int(word) for word in event.text.split("pids ")[1].replace(",", " ").split())
            if event.kind == "step":
                found["steps"].append(event.seconds)
                if event.step == at:
                    os.kill(pids[rank], signal.SIGKILL)
            if event.kind == "generation" and "pause" not in found:
                found.update(pause=event.pause_s, plan=event.plan)

        with connect_ray(None, 4, ROOT):
            result = train_job_in_new_folder(spec, tell)
    assert result.end == "done", result.error
    return {"pause": found["pause"], "plan": found["plan"], "step": statistics.median(found["steps"][5 : at - 1])}


def measure_step(kind: str, replicas: Sequence[int]) -> float:
    """The usual seconds of a step of 2 stages with so many replicas, undisturbed."""
    from raypar.actors.ray_connection import connect_ray
    from raypar.launch import train_job_in_new_folder

    source, words = KINDS[kind]
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as room, connect_ray(None, sum(replicas), ROOT):
        settings = [
            "steps=40",
            f"model.args.sleep_s={STEP_SLEEP_S}",
            f"run_dir={room}",
            f"plan={{stages: 2, replicas: {replicas}}}",
        ]
        spec = job(source, *words, *settings)
        result = train_job_in_new_folder(spec, lambda event: seconds.append(event.seconds) if event.kind == "step" else None)
    assert result.end == "done", result.error
    return statistics.median(seconds[5:])


MEASURES = {"place": measure_place, "memory": measure_memory, "recovery": measure_recovery, "step": measure_step}


def measured(what: str, *args: Any) -> Any:
    """A measure in a process of its own."""
    code = f"import json; from jobs.bench import streams; print('\\n' + json.dumps(streams.MEASURES[{what!r}](*{args!r})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise RuntimeError(f"{what} {args}:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"{what} {args}: {found}", file=sys.stderr, flush=True)
    return found


# -- the result --------------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """See `harness.table`, which workers cannot import: it sets signal handlers."""
    from jobs.bench import harness

    return harness.table(header, rows)


def places(repeats: int) -> str:
    """The table of places."""
    rows = []
    for name, (source, window) in SOURCES.items():
        runs = [measured("place", source, window) for _ in range(repeats)]
        seconds, used = (statistics.median(run[key] for run in runs) for key in ("seconds", "processor"))
        limit = "-" if source == "WithoutState" else "yes" if seconds <= LIMIT_S else "no"
        rows.append(
            [
                name,
                f"{seconds:.3f}",
                f"{used:.3f}",
                f"{runs[0]['again']:,}",
                limit,
                runs[-1]["told"] or "-",
                f"{runs[0]['journal']:.2f}",
            ]
        )
    header = [
        "source",
        "s",
        "s of the processor",
        "samples again, of a stream",
        f"<= {LIMIT_S:g} s",
        "told before",
        "journal, bytes a microbatch",
    ]
    return (
        f"## Finding the places of {STREAMS} streams after {STEPS_BEFORE:,} steps\n\n"
        f"{BATCH // STREAMS} samples a microbatch and stream. Timed from opening the data set to the first step's last "
        f"microbatch, whose numbers are compared. Of the samples read again {BATCH // STREAMS} are the step before, which is "
        "compared with the journal; they need the windows that they are in.\n\n" + table(header, rows)
    )


def memory() -> str:
    """The table of memory."""
    rows = []
    for name, (source, window) in SOURCES.items():
        found = measured("memory", source, window)
        far = max(found["most"] - found["first"], found["first"] - found["least"])
        numbers = [f"{found[key]:.1f}" for key in ("first", "least", "most", "last")]
        rows.append([name, *numbers, "yes" if far <= FLAT_MIB else "no"])
    header = ["source", f"after {SETTLED} steps", "least", "most", "last", f"within {FLAT_MIB:g} MiB"]
    return (
        f"## Resident memory over {MEMORY_STEPS:,} steps, in MiB\n\nOne process that trains and keeps the journal.\n\n"
        + table(header, rows)
    )


def recovery(repeats: int) -> str:
    """The table of recoveries."""
    rows = []
    for rank, whom, left in ((3, "of the last stage", [2, 1]), (1, "of the first stage", [1, 2])):
        for kind in KINDS:
            again = measured("step", kind, left)
            runs = [measured("recovery", kind, rank, 15 + number) for number in range(repeats)]
            pause, step = (statistics.median(run[key] for run in runs) for key in ("pause", "step"))
            plans = "; ".join(sorted({run["plan"] for run in runs}))
            least, most = min(run["pause"] for run in runs), max(run["pause"] for run in runs)
            pauses = f"{pause:.3f} ({least:.3f} to {most:.3f})"
            rows.append([whom, kind, plans, f"{step:.3f}, {again:.3f}", pauses, f"{pause - again:.3f}"])
    header = ["killed worker", "data", "plan after it", "step before, after, s", "pause, s", "pause less a step after, s"]
    return (
        f"## The pause of a recovery\n\n2 stages x 2 replicas on one machine, median of {repeats} (least to most): the time in "
        "which no step is committed, which includes the step that is executed again, by the plan after it. A step of that plan "
        "is measured in a run that nothing disturbs: three workers take longer for it than four. Wanted: a step and "
        f"{PAUSE_S} s at most.\n\n{table(header, rows)}"
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("places", "memory", "recovery"), default=("places", "memory", "recovery"))
    given = parser.parse_args()
    makers = {"places": lambda: places(given.repeats), "memory": memory, "recovery": lambda: recovery(given.repeats)}
    body = "\n\n".join(makers[name]() for name in given.only)
    print(body)
    if given.page is not None:
        from jobs.bench.harness import page

        command = shlex.join(["python", "jobs/bench/streams.py", "--repeats", str(given.repeats)])
        given.page.write_text(
            page("What do streams cost, and what does finding a place in them?", command, body), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
