"""One slow sample: it costs nothing while its worker answers pings. A worker whose interpreter it blocks, so that no thread of
it runs, is replaced after the step's deadline where its state is elsewhere too, else waited for."""

import re
from pathlib import Path

import pytest
from helpers.run_commands import Command
from helpers.tiny_job import write_job

pytestmark = pytest.mark.chaos

LAYOUTS = {
    "the mirror has its state": (["plan.replicas=1", "elastic={min_workers: 1}"], True),
    "a replica has its state": (["plan.replicas=2", "elastic={min_workers: 1}"], True),
    "no other memory has its state": (["plan.replicas=1", "elastic={min_workers: 1, mirror: off}"], False),
}


def train(layout: str, folder: Path, *words: str) -> str:
    """What a run prints in which one sample is slow, once."""
    words = (*LAYOUTS[layout][0], "steps=60", "validation=null", "checkpoint.every=0", "model.args.sleep_s=0.02", *words)
    words = (*words, f"data.args.slow={folder / 'slow'}")
    command = Command(folder, "train", str(write_job(folder)), *(part for word in words for part in ("--set", word)))
    assert command.wait(300) == 0, command.text()
    assert (folder / "slow").exists(), command.text()
    return command.text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_of_which_no_thread_runs_is_replaced_only_if_its_state_is_elsewhere(layout, tmp_path):
    text, replaced = train(layout, tmp_path, "data.args.hold=true"), LAYOUTS[layout][1]
    assert ("1 worker lost" in text) is replaced, text
    pauses = re.search(r"(\d+\.\d) s of pauses in all", text)
    assert not replaced or (pauses is not None and float(pauses[1]) < 20), "it was not waited for"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_that_sleeps_in_a_sample_is_lost_nowhere(layout, tmp_path):
    """It was killed after 4 s where its state was elsewhere, and another worker read the same sample."""
    text = train(layout, tmp_path, "data.args.slow_s=12.0")
    assert "reading sample 21)" in text, "people are told"
    assert "lost" not in text and "generation 2" not in text, text
