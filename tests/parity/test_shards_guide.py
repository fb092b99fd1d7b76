"""What the guide on plans says of shards is so."""

import json
import re
from pathlib import Path

import yaml

from raypar.job.read_job import load_job
from raypar.model.tensor_parallel.compute_shard_layout import compute_shard_layout
from raypar.model.tensor_parallel.styles.registry import STYLES
from raypar.worker.layer_graph_of_job import make_layer_graph

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "examples/guides/choose_a_plan.md"
SECTION = re.search(r"^## Shards$(.*?)^## ", GUIDE.read_text(), re.MULTILINE | re.DOTALL)[1]


def written() -> dict:
    return yaml.safe_load(re.search(r"```yaml\n(.*?)```", SECTION, re.DOTALL)[1])["plan"]


def test_the_plan_that_is_shown_is_one():
    job = load_job(ROOT / "jobs/quickstart.yaml", [f"plan={json.dumps(written())}"])
    assert job.workers == 4 and job.plan.sequence_parallel
    assert job.to_plan(6).describe() == "2 stages x 1/2 replicas x 2/1 shards"


def test_the_styles_that_are_shown_are_those_of_the_quickstart():
    graph = make_layer_graph(load_job(ROOT / "jobs/quickstart.yaml"))
    for shards in (2, 4):
        assert compute_shard_layout(graph, shards, written()["styles"], infer=False) == compute_shard_layout(graph, shards)


def test_every_style_is_listed():
    assert set(STYLES) <= set(re.findall(r"`([\w-]+)`", SECTION))
