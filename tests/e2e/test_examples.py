"""The example scripts do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from raypar.actors.local_cluster_temp_folder import remove_local_ray_on_exit
from raypar.actors.ray_connection import make_short_temp_dir

EXAMPLES = Path(__file__).parents[2] / "examples"
HANGING_S = 1200
"""After so long an example hangs; their own waits have limits, too. The longest took eight minutes on a slow machine."""


@pytest.mark.chaos
def test_a_run_that_loses_a_node_ends_with_the_weights_of_one_that_does_not(tmp_path):
    command = [sys.executable, str(EXAMPLES / "lose_a_node.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    assert (tmp_path / "throughput.svg").read_text().startswith("<svg")


@pytest.mark.chaos
def test_a_model_that_is_too_big_is_refused_with_the_plan_with_which_it_trains_under_the_limit(tmp_path):
    command = [sys.executable, str(EXAMPLES / "too_big.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    fits = "plan.recompute=full and plan.zero=3 and plan.gather=layer and plan.optimizer_in=FOLDER fits"
    assert f">>> refused with exit code 2: {fits}\n" in done.stdout
    assert done.stdout.split("\n>>> unchecked")[0].count("error: ") == 1
    assert re.search(r">>> without the check it ends with exit code [1-9]\d*: smaller is plan\.", done.stdout)
    assert "nobody else has its part of the state" in done.stdout and done.stdout.splitlines()[-1] == "equal"


@pytest.mark.chaos
def test_a_stream_that_is_killed_and_resumed_under_another_plan_gives_the_samples_of_one_that_is_not(tmp_path):
    command = [sys.executable, str(EXAMPLES / "stream.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "record of samples: 240 microbatches, equal" in done.stdout and done.stdout.splitlines()[-1] == "equal"


@pytest.mark.chaos
def test_a_llama_is_fine_tuned_and_its_merged_folder_has_the_accuracy_that_raypar_measures(tmp_path):
    command = [sys.executable, str(EXAMPLES / "finetune_llama.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "raypar evaluate and the plain loop: equal" in done.stdout
    held_out, other = re.findall(r"  (?:held-out windows|another poem): (0\.\d+), (0\.\d+)\n", done.stdout)
    assert float(held_out[0]) < 0.05 and float(held_out[1]) > 0.7 and float(other[1]) < 0.5
    report = (tmp_path / "report.html").read_text()
    for name in ("held_out", "other_poem"):
        assert f"accuracy (validation, {name})" in report and f"loss (validation, {name})" in report


@pytest.mark.chaos
@pytest.mark.parametrize(("name", "trained"), [("distill", 53), ("dpo", 53)])
def test_what_learns_beside_a_frozen_model_has_the_weights_of_a_plain_loop_and_opens_alone(name, trained, tmp_path):
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"the checkpoint holds {4 * trained} tensors, of the (teacher|reference) 0\n", done.stdout), done.stdout
    assert re.search(r"of \d+ tensors of .* and of a plain loop.* 0 differ\n", done.stdout)
    assert re.search(r"the (student|policy) alone: .*The value of ", done.stdout) and done.stdout.splitlines()[-1] == "equal"
    assert name == "distill" or re.search(r"step 20: validation loss 0\.\d+, accuracy (0\.[5-9]\d*|1\.0+)\n", done.stdout), (
        done.stdout
    )


@pytest.mark.chaos
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_submitted_job_that_is_stopped_and_submitted_again_ends_with_the_weights_of_one_that_is_not(nodes, tmp_path):
    """Stages and shards on one node; stages and replicas on a head and another node."""
    shards = ["--set", "plan.shards=2", "--set", "plan.replicas=1"] if nodes == 1 else []
    command = [sys.executable, str(EXAMPLES / "submit_and_stop.py"), str(tmp_path), "--nodes", str(nodes), "--share", *shards]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"


def test_a_head_that_does_not_start_is_told_by_what_it_has_printed(tmp_path, monkeypatch):
    from examples import submit_and_stop

    monkeypatch.setattr(submit_and_stop, "RAY", [sys.executable, "-c", "raise SystemExit('no room for a head')"])
    with (
        pytest.raises(SystemExit, match=r"(?s)the job server answers: that did not happen.*no room for a head"),
        submit_and_stop.cluster(1, tmp_path),
    ):
        pass


@pytest.mark.chaos
def test_a_sweep_of_ray_tune_trains_each_trial_and_its_runs_take_turns_on_a_small_cluster(tmp_path):
    command = [sys.executable, str(EXAMPLES / "sweep.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGING_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting for 2 CPUs" in done.stdout + done.stderr
    *_, low, middle, high, best = done.stdout.splitlines()
    assert [line.split()[1] for line in (low, middle, high)] == ["0.001", "0.003", "0.01"]
    assert [", in a task the same" in line for line in (low, middle, high)] == [True, True, False]
    assert best.startswith("best: lr ") and {path.name for path in tmp_path.glob("lr_*")} == {"lr_0.001", "lr_0.003", "lr_0.01"}


@pytest.mark.chaos
def test_a_ray_program_trains_on_its_own_cluster_with_stages_replicas_and_shards(tmp_path):
    with remove_local_ray_on_exit(folder := make_short_temp_dir()):
        ray.init("local", num_cpus=9, include_dashboard=False, logging_level="ERROR", _temp_dir=str(folder))
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, str(EXAMPLES / "drive_a_cluster.py"), "--address", address, "--run-dir", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
        ray.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 stages x 2 replicas x 2 shards" in done.stdout
    assert "80 steps, the last 20 with one worker" in done.stdout


@pytest.mark.chaos
def test_a_fine_tuning_begins_with_the_weights_of_the_file_and_leaves_a_frozen_layer_as_it_was(tmp_path):
    command = [sys.executable, str(EXAMPLES / "finetune.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "unchanged: embed.token.weight, embed.position.weight"


@pytest.mark.chaos
@pytest.mark.parametrize("version", [2, 1])
def test_a_run_on_an_autoscaled_cluster_grows_and_ends_with_the_weights_of_one_process(version, tmp_path):
    command = [sys.executable, str(EXAMPLES / "autoscale.py"), str(tmp_path), "--autoscaler", str(version)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
    growths = re.findall(r"from \d to \d workers +[\d.]+ s +[\d.]+ s +-?[\d.]+ s \((.*)\)", done.stdout)
    assert growths[-1:] == ["steps at full speed"], done.stdout
    assert set(growths[:-1]) <= {"a callback sleeps in every step"}, "none, if all nodes have come before the first step"
    assert ">>> the run has ended; only the head is left" in done.stdout
    assert (tmp_path / "throughput.svg").read_text().startswith("<svg")
