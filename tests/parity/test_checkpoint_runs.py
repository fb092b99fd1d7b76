"""Checkpoints with tensors in runs of elements, as replicas write them that divide state: read whole; refused if they lie."""

import json
from pathlib import Path

import pytest
import torch
from helpers import checkpoint_folders as checkpoint_files

from raypar.errors import CheckpointError
from raypar.worker.checkpoint.checkpoint_files import PARAMETER, TensorRuns, TensorSlices, optimizer_key
from raypar.worker.checkpoint.manifest import manifest_checksum
from raypar.worker.norm_and_weights_hash import weights_hash
from raypar.worker.pretrained.open_weights import open_weights

WHOLE = torch.arange(60.0).view(5, 4, 3)
EXP_AVG = optimizer_key("exp_avg")
PARTS = [TensorRuns((5, 4, 3), ((0, 7), (30, 36))), TensorRuns((5, 4, 3), ((7, 30),)), TensorSlices((5, 4, 3), 0, ((3, 5),))]
"""Two replicas of one shard have runs, and one of the other has all of its slice."""


def make(root: Path, parts=PARTS, whole: torch.Tensor = WHOLE) -> Path:
    folder = checkpoint_files.create_checkpoint(root, 1)
    records = []
    for number, part in enumerate(parts):
        spans = part.spans if isinstance(part, TensorRuns) else [(12 * a, 12 * b) for a, b in part.spans]
        here = torch.cat([whole.view(-1)[a:b] for a, b in spans])
        here = here if isinstance(part, TensorRuns) else here.view(-1, 4, 3)
        tensors = {("w", PARAMETER): here, ("w", EXP_AVG): here + 1}
        ties = {"w": ["also"]}
        records.append(
            checkpoint_files.write_shard(folder, f"{number}.safetensors", tensors, None, dict.fromkeys(tensors, part), ties)
        )
    return checkpoint_files.commit_checkpoint(folder, records, steps_done=1, contract={})


def test_runs_and_slices_make_a_tensor_whole(tmp_path: Path):
    path = make(tmp_path)
    found = checkpoint_files.read_checkpoint_state(path)["w"]
    assert torch.equal(found[PARAMETER], WHOLE) and torch.equal(found[EXP_AVG], WHOLE + 1)
    manifest = checkpoint_files.verify_checkpoint(path)
    assert manifest.format == 4 and manifest.ties == {"also": "w"} and manifest.shapes == {"w": (5, 4, 3)}
    assert checkpoint_files.checkpoint_weights_hash(path) == weights_hash({"w": WHOLE})


def test_a_single_run_is_all_of_it(tmp_path: Path):
    path = make(tmp_path, [TensorRuns((5, 4, 3), ((0, 60),))])
    assert torch.equal(checkpoint_files.read_checkpoint_state(path)["w"][PARAMETER], WHOLE)


@pytest.mark.parametrize("dim, spans", [(0, ((1, 2), (3, 5))), (1, ((0, 1), (2, 4))), (2, ((1, 3),)), (1, ((0, 4),))])
def test_slices_of_it_are_read_as_initial_values(tmp_path: Path, dim, spans):
    with open_weights(make(tmp_path)) as weights:
        shape = [5, 4, 3]
        shape[dim] = sum(b - a for a, b in spans)
        out = torch.empty(shape)
        weights.read_into(out, "w", (dim, spans))
        assert torch.equal(out, torch.cat([WHOLE.narrow(dim, a, b - a) for a, b in spans], dim))


def changed(path: Path, change) -> Path:
    body = json.loads((path / "manifest.json").read_text())
    change([entry for entry in body["entries"] if entry["kind"] == "parameter" and "run" in entry], body)
    del body["sha256"]
    (path / "manifest.json").write_text(json.dumps({**body, "sha256": manifest_checksum(body)}))
    return path


LIES = {
    "overlap": (lambda runs, body: runs[1].update(run=[6, 29]), "runs of w (parameter) overlap"),
    "gap": (lambda runs, body: runs[0].update(run=[0, 6]), "59 of 60 elements of w"),
    "beyond the end": (lambda runs, body: runs[2].update(run=[55, 61]), "out of the 60 elements"),
    "reversed": (lambda runs, body: runs[0].update(run=[7, 0]), "reversed"),
    "empty": (lambda runs, body: runs[0].update(run=[0, 0]), "reversed, empty"),
    "negative": (lambda runs, body: runs[0].update(run=[-1, 7]), "not a pair of whole numbers"),
    "three numbers": (lambda runs, body: runs[0].update(run=[0, 7, 9]), "not a pair of whole numbers"),
    "texts": (lambda runs, body: runs[0].update(run=["0", "7"]), "not a pair of whole numbers"),
    "slice beside": (lambda runs, body: runs[0].update(slice=[[0, 5], [0, 4], [0, 3]]), "unknown key 'slice'"),
    "another dim": (
        lambda runs, body: next(e for e in body["entries"] if "slice" in e).update(slice=[[0, 5], [0, 4], [0, 1]]),
        "cut into runs, and along another dim than the first",
    ),
    "an older format": (lambda runs, body: body.update(format=3), "has no 'slice'"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_no_checkpoint_can_have_is_refused(tmp_path: Path, lie):
    change, message = LIES[lie]
    path = changed(make(tmp_path), change)
    with pytest.raises(CheckpointError) as error:
        checkpoint_files.load_manifest(path)
    assert message in str(error.value), str(error.value)
