"""A process that users' code ends without a word, in the checks before a run, has one line that names what was checked."""

import faulthandler
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from raypar.job.read_job import load_job
from raypar.launch.unspoken_end_of_checks import spoken_for, text_of_unspoken_end
from raypar.worker.job_preflight import preflight

PROGRAM = """
import os, signal
from raypar.launch.unspoken_end_of_checks import spoken_for
with spoken_for("the weights of init_from") as now_checking:
    now_checking("the data set mine:Data")
    {end}
"""


@pytest.mark.parametrize(
    "end, code, spoken",
    [
        ("os._exit(3)", 3, True),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, True),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, True),
        ("raise SystemExit(3)", 3, False),
        ("pass", 0, False),
    ],
)
def test_an_end_without_a_word_is_spoken_for(end: str, code: int, spoken: bool):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    text = text_of_unspoken_end("the data set mine:Data") + "\n"
    assert (done.returncode, done.stdout, done.stderr.endswith(text)) == (code, "", spoken)
    assert done.stderr.count("error: this") == spoken
    assert ("Segmentation fault" in done.stderr and 'File "<string>", line 6' in done.stderr) == (code == -11)


def test_the_handler_of_crashes_is_left_as_it_was():
    for enabled in (faulthandler.is_enabled(), not faulthandler.is_enabled()):
        (faulthandler.enable if enabled else faulthandler.disable)()
        with spoken_for("x"):
            pass
        assert faulthandler.is_enabled() == enabled
        (faulthandler.disable if enabled else faulthandler.enable)()


def test_the_checks_say_what_they_check_before_they_call_it(tmp_path: Path):
    told: list[str] = []
    job = load_job(write_job(tmp_path), ["validation={function: helpers.tiny_job:data, args: {size: 8}}"])
    preflight(job, told.append)
    assert told == [
        "the loss helpers.tiny_job:loss",
        "the optimizer torch.optim:AdamW",
        "the data set helpers.tiny_job:data",
        "the model helpers.tiny_job:model",
        "the optimizer torch.optim:AdamW, on small parameters",
        "the first microbatch of the data set helpers.tiny_job:data",
        "the layers of the model helpers.tiny_job:model and the loss helpers.tiny_job:loss, with the first microbatch",
        "the validation data",
        "the traces of the model helpers.tiny_job:model",
    ]


CASES = {
    "model": (["model={function: helpers.tiny_job:ends, args: {how: HOW}}"], "the model helpers.tiny_job:ends"),
    "data": (["data={function: helpers.tiny_job:ends, args: {how: HOW}}"], "the data set helpers.tiny_job:ends"),
    "loss": (
        ["loss={function: helpers.tiny_job:ends, args: {how: HOW}}"],
        "the layers of the model helpers.tiny_job:model and the loss helpers.tiny_job:ends",
    ),
    "callback": (["callbacks=[{function: helpers.tiny_job:ends, args: {how: HOW}}]"], "the callbacks helpers.tiny_job:ends"),
}


@pytest.mark.full
@pytest.mark.parametrize("case, how", [("model", "unspoken"), ("data", "killed"), ("loss", "crash"), ("callback", "unspoken")])
def test_so_does_the_command(case: str, how: str, tmp_path: Path):
    sets, what = CASES[case]
    words = [word for s in sets for word in ("--set", s.replace("HOW", how))]
    done = subprocess.run(
        [sys.executable, "-m", "raypar", "train", str(write_job(tmp_path)), *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode in (3, -9, -11)
    assert f"error: this process has ended without a word while it checked {what}" in done.stderr
    assert done.stderr.count("error: this") == 1 and not (tmp_path / "runs").exists()
