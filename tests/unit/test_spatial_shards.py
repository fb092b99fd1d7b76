"""Which rows shards hold, need and send, against brute force over drawn geometries."""

from __future__ import annotations

import random

import pytest
import torch

from raypar.errors import ModelError
from raypar.plan.spatial_shards import (
    Enlargement,
    RowExchange,
    Window,
    check_row_plan,
    copied_runs,
    even_rows,
    padded_rows,
    plan_copies,
    plan_linear,
    plan_transposed,
    plan_with_values,
)

CASES = 400


def read_by(window: Window, output: int) -> list[int]:
    """The input rows of one output row, by definition."""
    return [output * window.stride - window.before + k * window.dilation for k in range(window.kernel)]


def drawn_window(draw: random.Random) -> Window:
    return Window(draw.randint(1, 5), draw.randint(1, 4), draw.randint(1, 3), draw.randint(0, 4), draw.randint(0, 4))


def drawn(seed: int) -> tuple[Window, int, int]:
    """(window, rows, shards) with an output row for each shard at least."""
    draw = random.Random(seed)
    while True:
        window, rows, shards = drawn_window(draw), draw.randint(2, 40), draw.randint(2, 6)
        if shards <= rows and window.outputs(rows) >= shards:
            return window, rows, shards


def rows_of(exchange: RowExchange, shard: int) -> set[int]:
    """The rows that a shard has after the exchange, from what is sent, and what it held."""
    found = set(range(*exchange.held[shard]))
    for source in range(len(exchange.needed)):
        for start, stop in exchange.sent(source, shard):
            assert set(range(start, stop)) <= set(range(*exchange.held[source]))
            assert not found & set(range(start, stop)), "no row comes twice"
            found |= set(range(start, stop))
    return found


def test_a_shard_has_what_its_rows_of_the_output_read_and_the_gradients_of_what_reads_its_rows():
    for seed in range(CASES):
        window, rows, shards = drawn(seed)
        outputs = window.outputs(rows)
        plan = plan_linear(window, rows, outputs, shards)
        for shard in range(shards):
            here, gradients = rows_of(plan.forward, shard), rows_of(plan.backward, shard)
            start, stop = even_rows(outputs, shards)[shard]
            for output in range(start, stop):
                assert {row for row in read_by(window, output) if 0 <= row < rows} <= here
            mine = set(range(*even_rows(rows, shards)[shard]))
            for output in range(outputs):
                assert not mine & set(read_by(window, output)) or output in gradients
            first, last = read_by(window, start)[0], read_by(window, stop - 1)[-1]
            asked = {row for run in plan.forward.needed[shard] for row in range(*run)}
            assert asked == {row for row in range(first, last + 1) if 0 <= row < rows}


def test_a_transposed_convolution_exchanges_what_its_mirror_does():
    for seed in range(CASES):
        window, outputs, shards = drawn(seed)
        rows = window.outputs(outputs)
        plan = plan_transposed(window, rows, outputs, shards)
        for shard in range(shards):
            here, mine = rows_of(plan.forward, shard), set(range(*even_rows(outputs, shards)[shard]))
            assert all(row in here for row in range(rows) if mine & set(read_by(window, row)))
            gradients = rows_of(plan.backward, shard)
            for row in range(*even_rows(rows, shards)[shard]):
                assert {output for output in read_by(window, row) if 0 <= output < outputs} <= gradients


@pytest.mark.parametrize("kind", ["pool", "interpolation"])
def test_what_is_computed_again_in_backward_is_all_that_reads_a_shards_rows(kind: str):
    for seed in range(CASES):
        draw = random.Random(seed)
        if kind == "pool":
            window, rows, shards = drawn(seed)
            reads: Window | Enlargement = window
            outputs = window.outputs(rows)
            read = [set(read_by(window, output)) for output in range(outputs)]
        else:
            shards = draw.randint(2, 5)
            rows, factor, margin = draw.randint(shards, 30), draw.randint(1, 4), draw.randint(0, 2)
            reads, outputs = Enlargement(factor, margin), rows * factor
            read = [set(range(o // factor - margin, o // factor + margin + 1)) for o in range(outputs)]
        plan = plan_with_values(reads, rows, outputs, shards)
        for shard, (first, last) in enumerate(plan.outputs):
            own, mine = even_rows(outputs, shards)[shard], set(range(*even_rows(rows, shards)[shard]))
            assert first <= own[0] and own[1] <= last
            here = rows_of(plan.forward, shard)
            for output in range(outputs):
                if first <= output < last:
                    assert {row for row in read[output] if 0 <= row < rows} <= here
                else:
                    assert not mine & read[output]
            assert set(range(first, last)) <= rows_of(plan.backward, shard)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padded_rows_are_those_of_pytorch(mode: str):
    for before, after in ((0, 0), (2, 1), (3, 4), *([(-1, 2), (-2, -1)] if mode == "constant" else [])):
        x = torch.arange(6.0).view(1, 1, 6)
        want = torch.nn.functional.pad(x, (before, after), mode, **({"value": -1.0} if mode == "constant" else {}))
        assert padded_rows(6, before, after, mode) == tuple(int(row) for row in want.flatten())


def test_copies_have_their_sources_and_gradients_of_all_their_copies():
    for seed in range(CASES):
        draw = random.Random(seed)
        shards = draw.randint(2, 5)
        rows = draw.randint(shards, 20)
        source = tuple(draw.randint(-1, rows - 1) for _ in range(draw.randint(shards, 30)))
        plan = plan_copies(source, rows, shards)
        for shard, (a, b) in enumerate(plan.outputs):
            own = source[a:b]
            assert {row for row in own if row >= 0} <= rows_of(plan.forward, shard)
            needed = [row for start, stop in plan.forward.needed[shard] for row in range(start, stop)]
            assert [row if row < 0 else needed[row] for row in copied_runs(own, plan.forward.needed[shard])] == list(own)
            mine = range(*even_rows(rows, shards)[shard])
            copies = {place for place, row in enumerate(source) if row in mine}
            assert copies <= rows_of(plan.backward, shard)


def test_the_number_of_output_rows_is_pytorchs():
    for seed in range(CASES):
        draw = random.Random(seed)
        kernel = draw.randint(1, 5)
        before = draw.randint(0, kernel // 2)
        window = Window(kernel, draw.randint(1, 4), draw.randint(1, 2), before, before)
        rows = draw.randint(window.extent, 20)
        for ceil_mode in (False, True):
            pooled = torch.nn.functional.max_pool1d(
                torch.zeros(1, 1, rows), kernel, window.stride, before, window.dilation, ceil_mode=ceil_mode
            )
            assert window.outputs(rows, ceil_mode=ceil_mode) == pooled.shape[-1]


def test_rows_sent_are_counted_once_each_way():
    plan = plan_linear(Window(5, before=2, after=2), 12, 12, 3)
    assert [plan.forward.rows_sent_by(shard) for shard in range(3)] == [2, 4, 2]
    assert plan.forward == plan.backward and plan.forward.moves_rows
    assert not plan_linear(Window(2, 2), 8, 4, 2).forward.moves_rows


def refused(window: Window, rows: int, shards: int) -> ModelError:
    outputs = window.outputs(rows)
    with pytest.raises(ModelError) as error:
        check_row_plan("conv", lambda n: plan_linear(window, rows, outputs, n), rows, outputs, shards)
    return error.value


def test_a_halo_larger_than_a_part_is_refused_with_the_numbers():
    error = refused(Window(7, before=3, after=3), 16, 8)
    assert "conv cannot be cut into 8 parts: shard 0 of 8 has the rows [0, 2) of 16 and needs 3 below them" in error.what
    assert "which the shard next to it has 2: the halo is larger than a part" in error.what
    assert "plan.shards: 5" in error.cure


def test_more_shards_than_rows_are_refused():
    error = refused(Window(3, 2, 1, 1, 1), 8, 5)
    assert error.what == "conv makes 4 rows for 5 shards: some would have none" and "plan.shards <= 4" in error.cure
