"""`data.mix` of iterable data: each source is read as the streams of a job of its own, in fixed ratios."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers import reference, stream_cases, ugly_models
from test_streams import PLANS, run

from raypar.actors.stream_digest_journal import StreamDigestJournal, mix_of_contract
from raypar.errors import DataError, InputError
from raypar.job import DataConfig, Job
from raypar.job.contract import contract_of_job
from raypar.job.data_section import MixedSourceConfig
from raypar.worker.data.check_and_count_streams import resolve_streams
from raypar.worker.data.mixed_order import MixPattern
from raypar.worker.data.stream_loader import OpenStreams, StreamLoader
from raypar.worker.data.user_dataset import make_dataset


def mixed(*sources: tuple[Any, int, float], microbatches: int = 4, steps: int = 5, **data: Any) -> Job:
    mix = [MixedSourceConfig(function=one, args={"size": size}, ratio=ratio) for one, size, ratio in sources]
    spec = ugly_models.job("plain", microbatches=microbatches, steps=steps).replace(data=DataConfig(mix=mix, **data))
    return resolve_streams(spec).job


THREE = (stream_cases.Resuming, 9, 3), (stream_cases.Divided, 23, 1), (stream_cases.generated, 5, 0.5)


@pytest.mark.parametrize(("plan", "data"), [("2 x 2", {"shuffle_window": 4}), ("2 replicas", {"streams": 2})])
def test_every_plan_gives_the_samples_and_bits_of_one_process(plan: str, data: dict[str, Any]):
    spec = mixed(*THREE, **data)
    assert spec.data.streams == data.get("streams", 4)
    run(spec, PLANS[plan])


def test_how_many_samples_each_source_has_given_follows_from_the_step_and_an_epoch_gives_each_once():
    spec = mixed(*THREE, streams=2, shuffle_window=3)
    pattern = MixPattern.of_ratios(spec.data.ratios)
    rows = [row["id"] for _, (_, row) in zip(range(90), reference.stream(spec, 1), strict=False)]
    for position in (0, 1, 17, 90):
        assert [pattern.count(source, position) for source in range(3)] == [
            sum(pattern.source_at(at) == source for at in range(position)) for source in range(3)
        ]
    for source, (_, size, _) in enumerate(THREE):
        own = [row for at, row in enumerate(rows) if pattern.source_at(at) == source]
        length = len(range(1, size, 2))
        assert set(Counter(own[: len(own) // length * length]).values()) == {len(own) // length}


def loader(spec: Job, streams: OpenStreams) -> StreamLoader:
    return StreamLoader(
        spec.data, spec.batching, seed=spec.seed, fields=("x", "y"), own=range(spec.microbatches), streams=streams
    )


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("other", [stream_cases.Resuming, stream_cases.Divided])
def test_who_goes_on_by_the_journal_reads_the_same_and_little_of_sources_with_cursors_twice(
    window: int, other: Any, tmp_path: Path
):
    spec = mixed((stream_cases.Resuming, 1000, 3), (other, 60, 1), streams=2, shuffle_window=window)
    first, want = OpenStreams(wants_cursors=True), {}

    def journal() -> StreamDigestJournal:
        mix = mix_of_contract(contract_of_job(spec))
        return StreamDigestJournal(tmp_path / "samples.bin", tmp_path / "cursors.json", spec.batching, 2, 10, print, mix)

    reading, made = loader(spec, first), journal()
    made.open(0)
    for step in range(43):
        for microbatch in range(4):
            reading.get(step, microbatch)
            want[step, microbatch] = reading.digest(step, microbatch)
        if step < 40:
            assert made.note(step, reading.report(step)) is None
            made.write(made.record(step))
    again, later = journal(), OpenStreams()
    again.open(40)
    assert set(again.known_epochs()) == {2, 3}, "the journal says where epochs of the second source began"
    assert set(again.epochs[3].items()) < set(made.epochs[3].items()) and again.epochs[3].keys() != {0}
    later.learn(again.known_epochs(), again.known_cursors(), {(39, m): digest for m, digest in again.digests(40).items()})
    reading = loader(spec, later)
    for step in (40, 41, 42):
        for microbatch in range(4):
            reading.get(step, microbatch)
            assert reading.digest(step, microbatch) == want[step, microbatch]
    parts = [reader.parts for reader in later.readers.values()]
    skipped = {number: part.skipped for one in parts for number, part in one.items()}
    limit = 2 * 8 + window  # a step and more
    assert skipped[0] <= limit and skipped[1] <= limit and (other is stream_cases.Divided or skipped[2] <= limit), skipped
    assert again._samples_before_place(40, 0) <= limit


@pytest.mark.parametrize(
    ("sources", "data", "what"),
    [
        (((stream_cases.Divided, 9, 1), (stream_cases.whole, 9, 1)), {"streams": 2}, r"begin with the same 4 samples"),
        (((stream_cases.Divided, 9, 1), (stream_cases.tar_shards, 9, 1)), {"streams": 4}, r"has 3 shards: others are empty"),
        (((stream_cases.Divided, 9, 1), (stream_cases.Empty, 9, 1)), {}, r"stream 0 of 1 of data set .*Empty has no samples"),
        (
            ((stream_cases.Divided, 9, 1), (ugly_models.Tokens, 9, 1)),
            {},
            r"mix\.1 .* is read by id, and data\.mix\.0 .*Divided is",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused_before_the_run(sources: Any, data: dict[str, Any], what: str):
    with pytest.raises(InputError, match=what):
        mixed(*sources, **data)


def test_a_mixture_of_streams_has_no_end_for_who_reads_data_once():
    with pytest.raises(DataError, match=r"data\.mix of iterable data sets has no end\n  cure: give one of its sources"):
        next(iter(make_dataset(mixed(*THREE).data)))
