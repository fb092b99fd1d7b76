"""One sample blocks a worker's interpreter for 25 s: it is replaced where its state is elsewhere too, else waited for."""

import re

import pytest
from helpers.run_commands import Command
from helpers.tiny_job import write_job

pytestmark = pytest.mark.chaos

LAYOUTS = {
    "the mirror has its state": (["plan.replicas=1", "elastic={min_workers: 1}"], True),
    "a replica has its state": (["plan.replicas=2", "elastic={min_workers: 1}"], True),
    "no other memory has its state": (["plan.replicas=1", "elastic={min_workers: 1, mirror: off}"], False),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_of_which_no_thread_runs_is_replaced_only_if_its_state_is_elsewhere(layout, tmp_path):
    """What a sample does that only sleeps: `test_last_copy_ray.py`."""
    chosen, replaced = LAYOUTS[layout]
    words = [*chosen, "steps=60", "validation=null", "checkpoint.every=0", "model.args.sleep_s=0.02"]
    words += [f"data.args.slow={tmp_path / 'slow'}", "data.args.hold=true"]
    command = Command(tmp_path, "train", str(write_job(tmp_path)), *(part for word in words for part in ("--set", word)))
    assert command.wait(300) == 0, command.text()
    assert (tmp_path / "slow").exists() and ("1 worker lost" in command.text()) is replaced, command.text()
    pauses = re.search(r"(\d+\.\d) s of pauses in all", command.text())
    assert not replaced or (pauses is not None and float(pauses[1]) < 20), "it was not waited for"
