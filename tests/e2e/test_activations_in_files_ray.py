"""On a real Ray: the quickstart's activations in a file of a folder, undisturbed and with a killed worker: the same hash."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from helpers import reference
from helpers.full_disk import no_bytecode
from helpers.trainee import Trainee

from raypar.actors.ray_connection import connect_ray
from raypar.job.read_job import load_job
from raypar.worker.layer_graph_of_job import make_layer_graph
from raypar.worker.norm_and_weights_hash import weights_hash

pytestmark = pytest.mark.chaos
QUICKSTART = Path(__file__).parents[2] / "jobs/quickstart.yaml"
STEPS = "steps=14"


@pytest.fixture(scope="module", autouse=True)
def own_ray():
    with no_bytecode(), connect_ray(None, 4, Path(__file__).parents[1]):
        yield


@pytest.fixture(scope="module")
def undisturbed() -> str:
    spec = load_job(QUICKSTART, [STEPS])
    return weights_hash(reference.train(make_layer_graph(spec), spec).parameters)


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process refer to."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(descriptor))
    return found


@pytest.mark.parametrize("killed", [None, 1], ids=["undisturbed", "killed"])
@pytest.mark.parametrize("more", [(), ('plan.recompute=["block1"]', "plan.zero=1")], ids=["all layers", "beside recomputation"])
def test_the_hash_is_that_of_activations_in_memory(more, killed, undisturbed, tmp_path):
    folder = tmp_path / "activations"
    trainee = Trainee(tmp_path)
    trainee.path = QUICKSTART
    trainee.words = [STEPS, f"run_dir={tmp_path / 'runs'}", f"plan.activations_in={folder}", "plan.schedule=gpipe", *more]
    files: list[list[str]] = []

    def look(pids: list[int]) -> None:
        files.extend(open_files(pid) for pid in pids)
        if killed is not None:
            os.kill(pids[killed], signal.SIGKILL)

    result = trainee.run(look, at=6)
    assert result.end == "done", result.why
    assert len(files) == 4 and all(any(str(folder) in file for file in of_worker) for of_worker in files)
    assert result.weights_sha256 == undisturbed
    assert bool(trainee.told("recovering")) == (killed is not None)
    assert not any(folder.iterdir())
