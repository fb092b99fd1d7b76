"""Whether prediction on one worker is as fast as a plain loop of forwards over the same microbatches.

Passes of two kinds follow each other in this process, in either order in turn: by a loop that reads the samples, stacks them,
calls the module and keeps a function of its output; by a worker of a run that predicts, whose outputs are taken as rows. Times
are of the processor, as others may use the machine: each pair is one ratio, whose median has a bootstrap interval. Allocator
and garbage collector are set as in a worker's process, for both.

    python jobs/bench/predict.py quickstart --pairs 20
    python jobs/bench/predict.py quickstart --pairs 8 --size 16
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from jobs.bench.metrics import ByHand, interval, make_job
from raypar.job import FunctionConfig, Job, ValidationConfig
from raypar.launch.forward_run import choose_data, find_samples, make_forward_job
from raypar.launch.predict_run import RowWriter, make_prediction_job
from raypar.launch.prediction_sinks import RowsInMemory
from raypar.plan import ParallelPlan
from raypar.plan.forward_pass_batching import MICROBATCHES_OF_PASS, ForwardPasses, whole_batching
from raypar.worker.layer_graph_of_job import call_model_function, make_layer_graph
from raypar.worker.module_with_checkpoint_weights import as_one_module
from raypar.worker.process.allocator_and_garbage_collector import freeze_existing_objects, keep_freed_memory
from raypar.worker.run_in_one_process import OneProcessRun

WARM_UP = 2
"""Pairs that are not counted."""


def last_token(output: Tensor) -> dict[str, Tensor]:
    """Of each sample: the token that comes next, and its logit."""
    found = output[:, -1].max(-1)
    return {"next": found.indices, "logit": found.values}


def plain_pass(module: nn.Module, forward: Job, samples: int, of_pass: int) -> Callable[[int], dict[str, Tensor]]:
    """Number of a pass -> its rows, by a loop."""
    whole, dataset = whole_batching(samples, forward.batch_size, forward.microbatches), forward.validation_data.call()

    def run(number: int) -> dict[str, Tensor]:
        own = range(number * of_pass, (number + 1) * of_pass)
        with torch.no_grad():
            kept = [last_token(module(torch.stack([dataset[index][0] for index in whole.samples(m)]))) for m in own]
        return {name: torch.cat([part[name] for part in kept]) for name in kept[0]}

    return run


def main() -> None:
    """Print the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=["quickstart", "gpt2"], nargs="?", default="quickstart")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--size", type=int, default=4, help="samples of a microbatch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    passes, loss = options.pairs + WARM_UP, ByHand()
    job = make_job(options.job, 1, loss)
    data = validation_of(job)
    size, of_pass = options.size, MICROBATCHES_OF_PASS * 4 // options.size
    wanted = passes * of_pass * size
    given = choose_data(job.replace(validation=data), None, wanted)
    forward, samples = find_samples(make_forward_job(job, 1, given, size), lambda event: None)
    assert samples == wanted, f"the data has {samples} samples"
    made = make_prediction_job(forward, samples, FunctionConfig(function=last_token)).in_passes(ForwardPasses(samples, of_pass))
    graph = make_layer_graph(made)
    module, rows, times = as_one_module(call_model_function(job.model)).eval(), RowsInMemory(), []
    take = RowWriter(rows)
    with OneProcessRun(made, ParallelPlan.mesh(layers=len(graph.layers)), "1f1b", graph=graph) as run:
        names = dict(module.named_parameters())
        for name, copies in run.parameters().items():
            names[name].data.copy_(copies[0])
        plain = plain_pass(module, forward, samples, of_pass)
        freeze_existing_objects(collect=True)
        for number in range(passes):
            found: dict[str, dict[str, Tensor]] = {}
            took: dict[str, float] = {}
            for kind in ("loop", "raypar")[:: 1 if number % 2 else -1]:
                start = time.process_time()
                if kind == "loop":
                    found[kind] = plain(number)
                else:
                    (report,) = run._run([core.validation_routine(1, number) for core in run.cores])
                    take([report.outputs[m] for m in sorted(report.outputs)])
                took[kind] = time.process_time() - start
            times.append((took["loop"], took["raypar"]))
            before = number * of_pass * size
            found["raypar"] = {name: value[before:] for name, value in rows.columns_in_memory().items()}
            assert all(torch.equal(found["raypar"][name], value) for name, value in found["loop"].items()), "other values"
    counted = times[WARM_UP:]
    by_loop, by_raypar = (1000 * statistics.median(kind) for kind in zip(*counted, strict=True))
    print(f"{options.job}: passes of {of_pass} microbatches of {size} samples, {len(counted)} pairs, equal values")
    print(f"ms of the processor a pass: plain loop {by_loop:.1f}, raypar {by_raypar:.1f}")
    print(f"rate of raypar, of the loop's: {interval([a / b for a, b in counted])}")


def validation_of(job: Job) -> ValidationConfig:
    """The job's data as its validation."""
    return ValidationConfig.model_construct(function=job.data.function, args=job.data.args)


if __name__ == "__main__":
    main()
