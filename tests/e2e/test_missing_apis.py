"""A run with a Ray and a PyTorch that have renamed some of what raypar uses of them: the same weights, and a line for each."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

ROOT = Path(__file__).parents[2]

RENAMED = {
    "ray._private.state": ("GlobalState.get_draining_nodes", "GlobalState.get_max_resources_from_cluster_config"),
    "ray._private.ray_constants": ("DEBUG_AUTOSCALING_STATUS",),
    "torch": ("_foreach_add_", "_C._set_cudnn_benchmark", "_C._will_engine_execute_node"),
}
"""Module -> names of which another release has others: those that neither library needs itself in such a run."""
SITE = f"""
import importlib.abc, sys
RENAMED = {RENAMED!r}

class Renaming(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in RENAMED:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            for word in RENAMED[name]:
                owner = module
                *inside, last = word.split(".")
                for each in inside:
                    owner = getattr(owner, each)
                value = getattr(owner, last)
                delattr(owner, last)
                setattr(owner, "renamed_" + last, value)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Renaming())
"""
"""A `sitecustomize` module: every Python process that finds it has the other release."""


def train(folder: Path, path: str) -> tuple[str, str]:
    """(the weights' hash, all that was printed) of the tiny job by `raypar train`."""
    folder.mkdir()
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {"PYTHONPATH": path}
    words = [sys.executable, "-m", "raypar", "train", str(write_job(folder))]
    ended = subprocess.run(words, env=env, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return re.search(r"weights sha256 ([0-9a-f]{64})", ended.stdout)[1], ended.stdout + ended.stderr


@pytest.mark.full
def test_a_run_goes_on_without_what_other_releases_have_renamed_and_says_each_once(tmp_path):
    usual = f"{ROOT / 'tests'}:{ROOT}"
    expected, _ = train(tmp_path / "usual", usual)
    (tmp_path / "sitecustomize.py").write_text(SITE)
    found, printed = train(tmp_path / "renamed", f"{tmp_path}:{usual}")
    assert found == expected
    said = re.findall(r"warning: .*?((?:Ray|PyTorch) \S+: (\S+) is missing or has changed .*)", printed)
    apis = [api for _, api in said]
    assert sorted(set(apis)) == [
        "ray._private.state.state.get_draining_nodes",
        "ray._private.state.state.get_max_resources_from_cluster_config",
        "ray._raylet.GcsClient.get_cluster_status",
        "torch._C._get_cudnn_enabled",
        "torch._C._will_engine_execute_node",
        "torch._foreach_add_",
    ], printed
    assert "WorkerActor" not in printed, "a worker's line is an event of the run"
    assert all(line.startswith(("Ray 2.60", "PyTorch 2.13")) for line, _ in said)
