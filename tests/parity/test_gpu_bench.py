"""The GPU bench, as far as a machine without a GPU goes: its ranks over the stand-in for NCCL, its page, and its refusal."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from helpers import standin, transport_cases

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

before = signal.getsignal(signal.SIGTERM)
import gpu  # noqa: E402
import gpu_loop  # noqa: E402
from models import Workload  # noqa: E402

signal.signal(signal.SIGTERM, before)  # a bench ends its contenders on SIGTERM; a test run does not

HOST = "helpers.gpu_calls:host_device"
SAMPLE = ("dtypes_and_shapes", "batches", "all_reduces", "wrong_shapes_are_named", "bad_arguments_raise_at_once")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_says_so_and_how_to_run_it_elsewhere(tmp_path, capsys):
    page = tmp_path / "gpu.md"
    assert gpu.main(["--page", str(page), "--only", "parity", "--ranks", "2"]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1
    assert said.err.startswith("error: this machine cannot run the GPU bench: ") and "sees no GPU here" in said.err
    text = page.read_text()
    assert "**Not run.** " in text and "python jobs/bench/gpu.py --page" in text and "--only parity --ranks 2" in text


@pytest.mark.parametrize("words", [["--only", "speed"], ["--ranks", "3"], ["--rounds", "many"]])
def test_what_cannot_be_measured_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        gpu.main(words)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


def test_busy_time_counts_overlapping_kernels_once():
    assert gpu_loop.busy([]) == 0
    assert gpu_loop.busy([(5, 6), (0, 2), (1, 3), (1, 1.5)]) == 4


needs_standin = pytest.mark.skipif(not standin.SUPPORTED, reason="CuPy has a wheel for Linux x86-64 only")


@pytest.fixture(scope="module")
def ranks():
    made = gpu.Ranks(2, HOST)
    yield made
    made.end()


@needs_standin
def test_the_suite_of_all_transports_runs_through_the_devices_memory(ranks, monkeypatch):
    monkeypatch.setattr(transport_cases, "CASES", {name: transport_cases.CASES[name] for name in SAMPLE})
    assert gpu.conformance(ranks) == [{"case": name, "wrong": ""} for name in SAMPLE]


@needs_standin
@pytest.mark.full
def test_all_of_the_suite_runs_through_the_devices_memory(ranks):
    assert all(row["wrong"] == "" for row in gpu.conformance(ranks))


@needs_standin
def test_plans_of_several_ranks_have_the_bits_of_one_process(ranks):
    rows = gpu.parity(ranks, 2)
    assert [(row["schedule"], row["other"]) for row in rows] == [("1f1b", []), ("zb-h1", [])]
    assert all(row["parameters"] > 50 for row in rows)


@needs_standin
def test_a_group_that_hangs_is_aborted_and_formed_anew(ranks):
    found = gpu.reform(ranks, 2)
    assert found["ends"] == ["GroupAborted"] and not found["stuck"] and found["communicators"] > 5
    assert len(found["freed_s"]) == len(found["formed_s"]) == 2 and max(found["freed_s"]) < 5.0


def test_training_is_compared_in_turns():
    work = Workload(depth=1, width=16, heads=2, context=16, batch_size=4)
    found = gpu_loop.compare(work, 256, 2, rounds=3, steps=1, device=torch.device("cpu"))
    assert [row["name"] for row in found["rows"]] == ["raypar, 1 worker", "plain PyTorch loop"]
    assert found["ratio"].pairs == 3 and found["tokens_a_step"] == 64
    assert all(low <= median <= high for row in found["rows"] for median, low, high in [row["tokens_s"]])


FOUND = {
    "device": "cuda:0 (NVIDIA X)",
    "library": "NCCL 2.28.9 from /somewhere",
    "conformance": {2: [{"case": "batches", "wrong": ""}, {"case": "barriers", "wrong": "rank 1: CommError: no"}]},
    "parity": {2: [{"plan": "1 stage x 2 replicas", "schedule": "1f1b", "parameters": 70, "other": ["a"]}]},
    "reform": {
        2: {
            "freed_s": [0.1, 0.3, 0.2],
            "ended_s": [0.5],
            "formed_s": [1.0],
            "ends": ["GroupAborted"],
            "stuck": [],
            "communicators": 9,
        }
    },
    "loop": {
        "tokens_a_step": 16384,
        "rows": [
            {"name": "raypar, 1 worker", "tokens_s": [90000.0, 89000.0, 91000.0], "idle": 0.0321},
            {"name": "plain PyTorch loop", "tokens_s": [90500.0, 90000.0, 91000.0], "idle": None},
        ],
        "ratio": {"median": 0.994, "lower": 0.99, "upper": 1.001, "pairs": 10},
    },
}


def test_the_page_tells_everything_that_was_measured():
    text = gpu.told(FOUND)
    for said in (
        "cuda:0 (NVIDIA X); NCCL 2.28.9 from /somewhere.",
        "| 2     | 2     | 1      |",
        "- 2 ranks, barriers: rank 1: CommError: no",
        "69 of 70",
        "0.200 (0.300)",
        "90,000",
        "89,000 to 91,000",
        "3.2 %",
        "not traced",
        "0.994 times as fast",
    ):
        assert said in text, said


def test_what_is_wrong_is_the_exit_status():
    assert not gpu.good(FOUND)
    right = {"conformance": {2: FOUND["conformance"][2][:1]}, "parity": {2: [{**FOUND["parity"][2][0], "other": []}]}}
    assert gpu.good(right | {"reform": FOUND["reform"]})
    assert not gpu.good({"reform": {2: {**FOUND["reform"][2], "stuck": ["messages 0 -> 1"]}}})
