"""The GPU bench, as far as a machine without a GPU goes: its ranks over the stand-in for NCCL, its page, and its refusal."""

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import standin, transport_cases

sys.path.insert(0, str(Path(__file__).parents[2] / "jobs" / "bench"))

before = signal.getsignal(signal.SIGTERM)
import gpu  # noqa: E402
import gpu_costs  # noqa: E402
import gpu_loop  # noqa: E402
import gpu_norm  # noqa: E402
import gpu_offload  # noqa: E402
import gpu_on_ray  # noqa: E402
from gpu_page import good, norm_is_right, offloading_is_right, told  # noqa: E402
from gpu_visit import Visit, visit  # noqa: E402
from models import Workload  # noqa: E402

from raypar.worker.squares_on_device import squares_by_operations  # noqa: E402

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
    assert "jobs/bench/results/operation_budget_" in text, "what a step asks of a device, counted without one"


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


@pytest.mark.ci
@needs_standin
def test_plans_of_several_ranks_have_the_bits_of_one_process(ranks):
    rows = gpu.parity(ranks, 2)
    assert [(row["schedule"], row["other"]) for row in rows] == [("1f1b", []), ("zb-h1", [])]
    assert all(row["parameters"] > 50 for row in rows)


@needs_standin
@pytest.mark.parametrize("kill", [False, True])
def test_a_group_that_hangs_is_aborted_and_formed_anew_also_when_a_rank_is_killed(ranks, kill):
    found = gpu.new_groups(ranks, 2, kill=kill)
    assert found["ends"] == ["GroupAborted"] and not found["stuck"] and found["communicators"] > 5
    assert len(found["freed_s"]) == len(found["formed_s"]) == 2 and max(found["freed_s"]) < 5.0


@needs_standin
def test_sums_over_shards_are_timed_until_posted_until_the_host_goes_on_and_until_they_are_there(ranks, monkeypatch):
    monkeypatch.setattr(gpu, "SUMMED", (("float32", (2, 8)),))
    (found,) = gpu.sums(ranks, 3)
    assert found["value"] == "[2, 8] float32" and 0 < found["posted"] <= found["free"] <= found["there"]


SMALL = Workload(depth=1, width=16, heads=2, context=16, batch_size=4)


def test_activations_elsewhere_are_compared_with_all_in_memory(tmp_path):
    deterministic = torch.are_deterministic_algorithms_enabled()
    rows = gpu_offload.measure(replace(SMALL, batch_size=32, depth=3), 2, 1, torch.device("cpu"), str(tmp_path))
    torch.use_deterministic_algorithms(deterministic)
    assert [row["place"] for row in rows] == ["the GPU's memory", str(tmp_path)] and offloading_is_right(rows)
    assert [row["place_bytes"] > 0 for row in rows] == [False, True] and all(row["seconds"] > 0 for row in rows)


def test_training_is_compared_in_turns_in_all_precisions_with_the_same_settings_of_pytorch():
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = gpu_loop.compare(SMALL, 256, 2, rounds=3, steps=1, device=torch.device("cpu"))
    torch.use_deterministic_algorithms(deterministic)
    names = [row["name"] for row in found["rows"]]
    assert len(set(names)) == 9 and names[:2] == ["raypar, 1 worker, fp32", "plain PyTorch loop, fp32, deterministic"]
    assert [(how["ours"], how["beside"], how["pairs"]) for how in found["ratios"]] == [
        (f"raypar, 1 worker, {precision}", f"plain PyTorch loop, {precision}{deterministic}", 3)
        for precision in gpu_loop.PRECISIONS
        for deterministic in (", deterministic", "")
    ]
    assert found["tokens_a_step"] == 64 and all(row["trace"] is None for row in found["rows"])
    assert all(low <= median <= high for row in found["rows"] for median, low, high in [row["tokens_s"]])


def test_settings_that_raypar_needs_are_there_before_its_guard_takes_those_that_it_restores(monkeypatch):
    settings = []

    def run(*args, device, **more):
        settings.append(torch.are_deterministic_algorithms_enabled())

    monkeypatch.setattr(gpu_loop, "OneProcessRun", run)
    monkeypatch.setattr(gpu_loop, "configure_torch", lambda device, exact: torch.use_deterministic_algorithms(True))
    try:
        gpu_loop.Ours("fp32").start(SMALL, 256, 2, torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert settings == [True]


def test_the_norm_by_the_kernel_is_compared_bit_for_bit_and_with_a_plain_sum(monkeypatch):
    """Here by operations of PyTorch, as where the kernel cannot be compiled: that is no success."""
    monkeypatch.setattr(gpu_norm, "SIZES", (1, 257, 32_769))
    monkeypatch.setattr(gpu_norm, "square_gradients", lambda gradients: [squares_by_operations(gradients)])
    rows = gpu_norm.measure(torch.device("cpu"))
    assert len(rows) == 2 * len(gpu_norm.OFFSETS) and all(row["equal"] == row["pieces"] == 4 for row in rows)
    assert not norm_is_right(rows) and norm_is_right([row | {"kernel": True} for row in rows])
    assert not norm_is_right([rows[0] | {"kernel": True, "equal": 3}])
    assert not norm_is_right([rows[0] | {"kernel": True, "worst": 1e-9}])


def test_parts_of_a_step_are_timed_beside_what_a_plain_loop_does_in_their_place():
    rows = gpu_costs.measure(SMALL, 256, 2, 3, torch.device("cpu"))
    assert len(rows) == 5 and {"norm", "a"} <= {row["name"].split()[0] for row in rows}
    assert all(0 < returned <= done for row in rows for returned, done in [row["ours"], row.get("plain", row["ours"])])


@pytest.mark.ci
@needs_standin
def test_a_first_visit_keeps_what_was_measured_also_where_a_part_hangs_or_fails(tmp_path):
    page = tmp_path / "gpu.md"
    good_part = Visit(("--only", "parity", "--ranks", "1"), 120.0)
    parts = (good_part, Visit(("--only", "parity", "--ranks", "2"), 0.2), Visit(("--only", "nothing"), 60.0))
    found = visit(10.0, HOST, page, "python jobs/bench/gpu.py --first-half-hour", parts)
    assert [row["other"] for row in found["parity"]["1"]] == [[]]
    assert list(found["failures"]) == ["--only parity --ranks 2", "--only nothing"] and not good(found)
    assert "ended after 0 s" in found["failures"]["--only parity --ranks 2"]
    assert "exit 2" in found["failures"]["--only nothing"] and "invalid choice" in page.read_text()
    assert "not begun" in str(visit(0.0, HOST, None, "", parts[:1])["failures"])


@pytest.mark.full
def test_a_run_on_ray_is_compared_with_one_process():
    words = [word.replace("gpu", "cpu").replace("=20", "=3") for word in gpu_on_ray.JOB]
    found = gpu_on_ray.on_ray([*words, "--set", "batch_size=8"])
    assert found["run"] == found["one_process"] and len(found["run"]) == 64


FOUND = {
    "device": "cuda:0 (NVIDIA X)",
    "library": "NCCL 2.28.9 from /somewhere",
    "conformance": {2: [{"case": "batches", "wrong": ""}, {"case": "barriers", "wrong": "rank 1: CommError: no"}]},
    "parity": {2: [{"plan": "1 stage x 2 replicas", "schedule": "1f1b", "parameters": 70, "other": ["a"]}]},
    "norm": [{"dtype": "float32", "offset": 33, "pieces": 8, "kernel": True, "equal": 7, "worst": 2.5e-16}],
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
            {
                "name": "raypar, 1 worker, fp32",
                "tokens_s": [90000.0, 89000.0, 91000.0],
                "trace": {"idle": 0.0321, "kernels": 1234.0, "copies": 5.0},
            },
            {"name": "plain PyTorch loop, fp32", "tokens_s": [90500.0, 90000.0, 91000.0], "trace": None},
        ],
        "ratios": [{"ours": "raypar", "beside": "plain", "median": 0.994, "lower": 0.99, "upper": 1.001, "pairs": 10}],
    },
    "costs": [{"name": "norm", "times": "once", "ours": [1000.0, 2345.0], "plain": [10.0, 20.0]}],
    "offload": [
        {"place": where, "weights": weights * 16, "seconds": 1.5, "gpu_bytes": 1234 << 20, "place_bytes": 5 << 20}
        for where, weights in (("the GPU's memory", "abcd"), ("host", "abce"))
    ],
    "sums": {2: [{"value": "[2] float32", "posted": 10.0, "free": 20.0, "there": 3456.0}]},
    "ray": {"command": "python -m raypar", "seconds": 30.0, "run": "abc", "one_process": "def"},
    "failures": {"--only kill": "ended after 120 s: last words"},
}


def test_the_page_tells_everything_that_was_measured():
    text = told(FOUND)
    for said in (
        "cuda:0 (NVIDIA X); NCCL 2.28.9 from /somewhere.",
        "| 2     | 2     | 1      |",
        "- 2 ranks, barriers: rank 1: CommError: no",
        "69 of 70",
        "7 of 8",
        "2.5e-16",
        "0.200 (0.300)",
        "90,000",
        "89,000 to 91,000",
        "3.2 %",
        "not traced",
        "0.994 times as fast",
        "1,234",
        "2,345",
        "3,456",
        "| 1,234 ",
        "NOT equal to one process's",
        "last words",
    ):
        assert said in text, said


def test_what_is_wrong_is_the_exit_status():
    assert not good(FOUND)
    right = {"conformance": {2: FOUND["conformance"][2][:1]}, "parity": {2: [{**FOUND["parity"][2][0], "other": []}]}}
    assert good(right | {"reform": FOUND["reform"]})
    assert not good(right | {"norm": FOUND["norm"]}) and good(right | {"norm": [{**FOUND["norm"][0], "equal": 8}]})
    same = [row | {"weights": "abcd"} for row in FOUND["offload"]]
    assert not good(right | {"offload": FOUND["offload"]}) and good(right | {"offload": same})
    assert not good({"reform": {2: {**FOUND["reform"][2], "stuck": ["messages 0 -> 1"]}}})
