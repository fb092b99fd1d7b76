"""Every bad job ends with exit code 2 and one message, what and cure, before anything is started."""

import contextlib
import sys
from pathlib import Path

import pytest
from helpers.tiny_job import write_job

from raypar.actors.cluster_info import ClusterCapacity
from raypar.actors.ray_connection import RayConnection
from raypar.cli import main
from raypar.errors import ConfigError

SIZE = "{vocab: 256, width: 24, depth: 2, heads: 6, context: 8}"
GPT = (f"model={{function: examples.gpt:layers, args: {SIZE}}}", "loss=examples.gpt:loss", "validation=null")
GPT += ("data={function: examples.gpt:text, args: {context: 8}}", "plan.replicas=1")
IMAGES = ("loss=examples.unet_shapes:loss", "validation=null", "plan.replicas=1", "plan.stages=1", "plan.styles={'*': spatial}")
IMAGES += ("data={function: examples.unet_shapes:Shapes, args: {samples: 8}}",)

CASES = {
    "unknown key": (["model.function=helpers.tiny_job:model", "microbatch=4"], "did you mean microbatches?"),
    "wrong type": (["steps=many"], "steps: expected"),
    "factory that cannot be imported": (["model.function=helpers.tiny_job:modle"], "cannot import 'helpers.tiny_job:modle'"),
    "module that does not exist": (["loss=no.such:thing"], "No module named 'no'"),
    "factory that raises": (["model=helpers.tiny_job:raises"], "KeyError: 'no such model'"),
    "more microbatches than samples": (["microbatches=9"], "9 microbatches cannot be cut from a batch of 8"),
    "fewer layers than stages": (["plan.stages=5"], "4 layers cannot fill 5 stages"),
    "empty data set": (["data.args.size=0"], "is empty"),
    "sample of the wrong shape": (["model.args.width=9"], "the first microbatch does not fit the model: layer 'layer0'"),
    "loss that is not a scalar": (["loss=helpers.tiny_job:vector_loss"], "not a scalar"),
    "loss that raises": (["loss=helpers.tiny_job:picky_loss"], "ArithmeticError: not these numbers"),
    "folder that takes no copies": (
        ["elastic={mirror_in: /dev/null/here}"],
        "elastic.mirror_in /dev/null/here takes none of the mirror's copies: ",
    ),
    "unknown schedule": (["plan.schedule=1f1c"], "did you mean 1f1b"),
    "style of no layer": (["plan.shards=2", "plan.styles={layer9.linear: column}"], "matches no layer (nearest: layer3.linear"),
    "a dimension of no layer": (
        [*GPT, "plan.shards=2", "plan.layout={vocabulery: shards}"],
        "plan.layout names 'vocabulery', a dimension that no layer has (nearest: vocabulary)",
    ),
    "shards of nothing": (["plan.shards=2"], "plan.shards is 2, but none of the model's layers has a style"),
    "more shards than features": (["plan.shards=9", "plan.styles={'*': gathered}"], "8 output features for 9 shards"),
    "more shards than heads": (
        [*GPT, "plan.shards=7"],
        "block0.qkv has 6 heads for 7 shards: some would have none\n  cure: set plan.shards <= 6",
    ),
    "more shards than heads in one stage": ([*GPT, "plan.shards=[1, 7]"], "qkv has 6 heads for 7 shards"),
    "heads that are no part of the features": (
        [*GPT, "plan.shards=2", "plan.styles={'*.qkv': 'qkv:7'}"],
        "72 output features are no multiple of 21",
    ),
    "a style on a layer that it does not fit": (
        [*GPT, "plan.shards=2", "plan.styles={block1.norm1: column}"],
        "the style column does not fit block1.norm1, a LayerNorm",
    ),
    "no style": ([*GPT, "plan.shards=2", "plan.styles={'*.up': colum}"], "'colum' is no style (nearest: column)"),
    "a tie cut by unequal styles": (
        [
            *GPT,
            "model.function=helpers.tiny_job:tied",
            "plan.shards=2",
            "plan.styles={embed.token: whole, head.logits: gathered}",
        ],
        "the tie embed.token.weight = head.logits.weight is cut by unequal styles: whole and gathered",
    ),
    "features that need all shards": (
        [*GPT, "plan.shards=2", "plan.styles={'*.down': whole, '*.up': column}"],
        "cut along dim 2",
    ),
    "more shards than rows": (
        [*IMAGES, "model={function: examples.unet_shapes:UNet, args: {width: 4, depth: 3}}", "plan.shards=8"],
        "whose dim 2 is cut makes 4 rows for 8 shards: some would have none\n  cure: set plan.shards <= 4",
    ),
    "a halo larger than a part": (
        [*IMAGES, "model={function: helpers.tiny_job:wide_kernel}", "plan.shards=8"],
        "needs 6 below them, of which the shard next to it has 4: the halo is larger than a part\n  cure: set plan.shards: 5",
    ),
    "rows where the whole is needed": (
        [*IMAGES, "model={function: examples.unet_shapes:UNet, args: {width: 4, depth: 3}}", "plan.shards=2"]
        + ["plan.styles={'downs.*': spatial}"],
        "conv_transpose2d of a value [2, 32, 4, 4] that is cut along dim 2 (rows of a layer of style spatial) over 2 shards",
    ),
    "shards for other stages than there are": (["plan.shards=[2, 1, 2]"], "plan.shards has 3 entries for 2 stages"),
    "optimizer of whole parameters": (
        ["plan.shards=2", "plan.styles={'*': gathered}", "optimizer.function=torch.optim:Adafactor"],
        "cannot be used with 2 shards",
    ),
    "optimizer argument": (["optimizer.args.lrr=1.0"], "lrr"),
    "argument that the model does not take": (
        ["model.args.dpeth=3"],
        "model.args.dpeth: helpers.tiny_job:model has no such argument\n  cure: did you mean depth? it takes depth=4, fault=''",
    ),
    "argument that the data set lacks": (
        ["data={function: helpers.tiny_job:Samples}"],
        "data.args lacks size, which helpers.tiny_job:Samples needs\n  cure: add it to data.args",
    ),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_message_with_a_cure_and_starts_nothing(case, tmp_path, monkeypatch, capfd):
    sets, said = CASES[case]
    monkeypatch.chdir(Path(__file__).parents[1])
    status = main(["train", str(write_job(tmp_path)), *(word for s in sets for word in ("--set", s))])
    err = capfd.readouterr().err
    assert status == 2, err
    assert said in err and "cure: " in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()
    assert not ("ray" in sys.modules and sys.modules["ray"].is_initialized())


def test_more_samples_than_there_are_and_more_replicas_than_microbatches_are_warned_of(tmp_path, monkeypatch, capfd):
    """Both are allowed by the contract (samples repeat by epochs, a replica may have nothing to do), and neither is meant."""
    monkeypatch.chdir(Path(__file__).parents[1])

    def connect(*given):
        raise ConfigError("nothing is started here")

    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", connect)
    sets = ["data.args.size=7", "plan.replicas=5", "plan.stages=2", "virtual_replicas=0"]
    assert main(["train", str(write_job(tmp_path)), *(word for s in sets for word in ("--set", s))]) == 2
    said = capfd.readouterr().out
    assert "warning: batch_size is 8, and the data set has 7 samples: each step takes some of them more than once" in said
    assert "cure: set batch_size <= 7, or give more data" in said
    assert "warning: plan.replicas is 5, and a step has 4 microbatches: 2 of 10 workers get none and compute nothing" in said
    assert "cure: set plan.replicas <= 4, or microbatches >= 5 (which changes the results)" in said


def test_more_workers_than_the_cluster_has_processors(tmp_path, monkeypatch, capfd):
    """Stages, replicas and shards multiply; what they come to is said with the numbers."""
    monkeypatch.chdir(Path(__file__).parents[1])
    joined = contextlib.nullcontext(RayConnection("own", "a local Ray cluster", "nowhere:0"))
    monkeypatch.setattr("raypar.actors.ray_connection.connect_ray", lambda *given: joined)
    monkeypatch.setattr("raypar.actors.cluster_info.cluster_capacity", lambda: ClusterCapacity(1, 4, 4, None))
    sets = [*GPT, "plan.replicas=2", "plan.shards=2"]
    assert main(["train", str(write_job(tmp_path)), *(word for s in sets for word in ("--set", s))]) == 1
    err = capfd.readouterr().err
    assert "8 workers of 1 CPU each (2 stages x 2 replicas x 2 shards), but the cluster has 4 CPUs on 1 node" in err
    assert "cure: set plan.stages x plan.replicas x plan.shards <= 4" in err and err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


def test_heads_that_shards_do_not_divide_are_no_bad_input(tmp_path, monkeypatch, capfd):
    """Six over four: 1, 2, 1 and 2 of them."""
    monkeypatch.chdir(Path(__file__).parents[1])
    words = ["plan", str(write_job(tmp_path)), *(w for s in (*GPT, "plan.stages=1", "plan.shards=4") for w in ("--set", s))]
    assert main(words) == 0
    said = capfd.readouterr().out
    assert "4 workers = 1 stage x 1 replica x 4 shards" in said and "block*.qkv qkv:6 (2)" in said
    assert [line.split()[3:6] for line in said.splitlines()[2:6]] == [[str(shard), "of", "4"] for shard in range(4)]


def test_a_run_that_does_not_exist_is_named_with_those_that_do(tmp_path, capfd):
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick/job.yaml").write_text("")
    assert main(["resume", "qick", "--run-dir", str(tmp_path)]) == 2
    assert "did you mean quick" in capfd.readouterr().err
