"""Plans are consistent when built; routing sends every microbatch to one replica of every stage, in an order all share."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from raypar.errors import PlanError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StageEdge, StagePlan
from raypar.plan.parallel_plan import position_of_stage
from raypar.plan.stage_connections import MAX_MICROBATCHES, MAX_STAGES, MAX_VALUES_OF_MESSAGE, check_message_limits
from raypar.worker.step.message_tags import bundle_tag

SHAPES = [(1,), (3,), (1, 1), (2, 1), (1, 3), (2, 3), (2, 2, 2), (1, 3, 2), (4, 1, 2, 3)]
CUTS = [(1, 0), (2, 0), (5, 0), (6, 2), (8, 4), (9, 6), (24, 0), (7, 16)]
CASES = list(product(SHAPES, CUTS))


def routing_of(replicas: tuple[int, ...], cut: tuple[int, int], chunks: int = 1) -> MicrobatchRouting:
    return MicrobatchRouting(ParallelPlan.of(replicas, chunks=chunks), Microbatches(*cut))


@pytest.mark.parametrize("replicas, cut", CASES)
def test_every_microbatch_goes_to_one_replica_of_every_stage(replicas: tuple[int, ...], cut: tuple[int, int]):
    routing = routing_of(replicas, cut)
    for stage, count in enumerate(replicas):
        shares = [routing.microbatches_of_replica(stage, r) for r in range(count)]
        assert sorted(m for share in shares for m in share) == list(range(cut[0]))
        assert all(routing.replica_for(stage, m) == r for r, share in enumerate(shares) for m in share)


@pytest.mark.parametrize("replicas, cut", CASES)
def test_a_replica_holds_a_contiguous_run_of_whole_blocks(replicas: tuple[int, ...], cut: tuple[int, int]):
    routing = routing_of(replicas, cut)
    for stage, count in enumerate(replicas):
        runs = [routing.blocks_of_replica(stage, r) for r in range(count)]
        assert [b for run in runs for b in run] == list(range(routing.microbatches.blocks))
        for replica, run in enumerate(runs):
            held = {routing.microbatches.block_of(m) for m in routing.microbatches_of_replica(stage, replica)}
            assert held <= set(run)


@pytest.mark.parametrize("replicas, cut", CASES)
def test_the_entry_order_is_a_permutation_that_keeps_each_blocks_own(replicas: tuple[int, ...], cut: tuple[int, int]):
    routing = routing_of(replicas, cut)
    order = routing.entry_order
    assert sorted(order) == list(range(cut[0]))
    for block in range(routing.microbatches.blocks):
        inside = [m for m in order if routing.microbatches.block_of(m) == block]
        assert inside == list(routing.microbatches.microbatches_of_block(block))


SHARES = [((1, 3, 12),), ((7, 1, 8), (5, 11), ()), ((), (15, 1)), ((1,) * 16, (16,))]


def shared_out(*shares: tuple[int, ...], shards: int = 1, chunks: int = 1) -> ParallelPlan:
    """A plan whose positions give these shares; one of `()` has three replicas with even runs."""
    plan = ParallelPlan.of([len(share) or 3 for share in shares], [shards] * len(shares), chunks=chunks)
    return plan.with_shares(dict(enumerate(shares)))


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_shares_are_contiguous_runs_of_blocks_in_order_of_replicas(shares: tuple[tuple[int, ...], ...]):
    for cut in (Microbatches(16), Microbatches(40, 16), Microbatches(5, 16)):
        routing = MicrobatchRouting(shared_out(*shares, shards=2), cut)
        for stage, share in enumerate(shares):
            runs = [routing.blocks_of_replica(stage, r) for r in range(len(share) or 3)]
            assert not share or tuple(map(len, runs)) == share
            assert [b for run in runs for b in run] == list(range(16))
            assert all(
                routing.replica_for(stage, m) == r
                for r, run in enumerate(runs)
                for b in run
                for m in cut.microbatches_of_block(b)
            )
        order = routing.entry_order
        assert sorted(order) == list(range(cut.count))
        assert all([m for m in order if cut.block_of(m) == b] == list(cut.microbatches_of_block(b)) for b in range(16))


def test_a_validation_pass_is_shared_out_in_proportion():
    routing = MicrobatchRouting(shared_out((5, 5, 2)), Microbatches(7, 7), forward_only=True)
    assert [len(routing.blocks_of_replica(0, r)) for r in range(3)] == [2, 3, 2]
    assert [b for r in range(3) for b in routing.blocks_of_replica(0, r)] == list(range(7))


def test_a_plan_says_its_shares():
    plan = shared_out((5, 5, 2), ())
    assert plan.describe() == "2 stages x 3 replicas, shares of blocks: stage 0 5:5:2"
    assert plan.with_even_stages().stages[0].share == (5, 5, 2)


@pytest.mark.parametrize(
    "shares, text",
    [
        (((1, 0, 15),), "stage 0 gives its 3 replicas the shares [1, 0, 15] of the blocks"),
        (((), (-1, 17)), "stage 1 gives its 2 replicas the shares [-1, 17] of the blocks"),
    ],
)
def test_a_replica_without_blocks_is_refused(shares: tuple[tuple[int, ...], ...], text: str):
    with pytest.raises(PlanError) as refused:
        shared_out(*shares)
    assert refused.value.what == text and "numbers >= 1, one for each replica" in refused.value.cure


def test_shares_are_one_for_each_replica_alike_for_chunks_and_add_up_to_the_blocks():
    plan = ParallelPlan.mesh(dp=3, pp=2, chunks=2)
    with pytest.raises(PlanError, match=r"stage 0 gives its 3 replicas the shares \[8, 8\]"):
        replace(plan, stages=(replace(plan.stages[0], share=(8, 8)), *plan.stages[1:]))
    with pytest.raises(PlanError, match="stages 0, 2 have the same workers and different shares"):
        replace(plan, stages=(replace(plan.stages[0], share=(8, 4, 4)), *plan.stages[1:]))
    with pytest.raises(PlanError, match=r"stage 0 shares out 16 blocks as \[1, 3, 12\], and a step has 12") as refused:
        MicrobatchRouting(shared_out((1, 3, 12)), Microbatches(24, 12))
    assert refused.value.cure == "give shares that add up to 12, the job's virtual_replicas"


@pytest.mark.parametrize("cut", CUTS)
def test_one_replica_everywhere_takes_microbatches_by_index(cut: tuple[int, int]):
    assert routing_of((1, 1, 1), cut).entry_order == tuple(range(cut[0]))


def test_three_replicas_of_the_third_stage_take_turns():
    """The slow-stage example: p=4, third stage x3, m=24, twelve blocks."""
    routing = routing_of((1, 1, 3, 1), (24, 12))
    turns = [routing.replica_for(2, m) for m in routing.entry_order]
    assert turns == [0, 1, 2] * 8


@pytest.mark.parametrize("dp, blocks", [*product(range(1, 5), range(1, 9))])
def test_at_any_time_replicas_have_been_given_nearly_equal_shares(dp: int, blocks: int):
    """Proportional turns: after any prefix no replica is more than one microbatch of its own pace behind."""
    routing = routing_of((1, dp), (24, blocks))
    given = [0] * dp
    for done, m in enumerate(routing.entry_order, 1):
        given[routing.replica_for(1, m)] += 1
        for r in range(dp):
            assert abs(given[r] - done * len(routing.microbatches_of_replica(1, r)) / 24) <= 1.5


def test_more_replicas_than_blocks_leave_some_without_work():
    routing = routing_of((4,), (8, 2))
    assert sorted(len(routing.microbatches_of_replica(0, r)) for r in range(4)) == [0, 0, 4, 4]


@pytest.mark.parametrize("pp, chunks", [*product(range(1, 6), range(1, 5))])
def test_chunks_go_round_or_turn_at_the_end(pp: int, chunks: int):
    stages = range(pp * chunks)
    loop = [position_of_stage(s, pp, "loop") for s in stages]
    turn = [position_of_stage(s, pp, "v") for s in stages]
    assert loop == [s % pp for s in stages]
    assert turn == [p for lap in range(chunks) for p in (range(pp) if lap % 2 == 0 else reversed(range(pp)))]
    assert all(abs(a - b) <= 1 for a, b in pairwise(turn))


@pytest.mark.parametrize("dp, pp, tp, chunks", [*product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2))])
def test_ranks_and_seats_are_each_others_inverse(dp: int, pp: int, tp: int, chunks: int):
    plan = ParallelPlan.mesh(dp=dp, pp=pp, tp=tp, chunks=chunks)
    assert plan.world == dp * pp * tp
    for rank, (role,) in enumerate(plan.roles):
        for stage in plan.stages_of(rank):
            assert plan.rank(stage, role.replica, role.shard) == rank
            assert rank in plan.replica_ranks(stage, role.shard)
        assert len(plan.stages_of(rank)) == chunks


@pytest.mark.parametrize("layers, stages", [(n, s) for n in range(1, 20) for s in range(1, 9) if s <= n])
def test_layers_are_spread_evenly_and_completely(layers: int, stages: int):
    plan = ParallelPlan.mesh(pp=stages, layers=layers)
    sizes = [s.last - s.first for s in plan.stages]
    assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1


def test_cuts_say_where_stages_begin():
    assert [(s.first, s.last) for s in ParallelPlan.mesh(pp=3, layers=10, cuts=(1, 7)).stages] == [(0, 1), (1, 7), (7, 10)]


def test_a_coordinate_names_stage_and_replica():
    plan = ParallelPlan.mesh(dp=2, pp=2, chunks=2)
    assert plan.coordinate(3) == "worker 3 (stage 1,3, replica 1)"
    shared = ParallelPlan((StagePlan(0, 1, ((0,), (1,))), StagePlan(1, 2, ((0, 1),))))
    assert shared.coordinate(1) == "worker 1 (stage 0, replica 1; stage 1, replica 0, shard 1)"


@pytest.mark.parametrize(
    "build",
    [
        lambda: ParallelPlan(()),
        lambda: ParallelPlan((StagePlan(0, 2), StagePlan(3, 4, ((1,),)))),
        lambda: ParallelPlan((StagePlan(0, 0),)),
        lambda: ParallelPlan((StagePlan(0, 1, ()),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((),)),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((1,),)),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((-1,),)),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((0, 1), (2,))),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((0, 1), (1, 2))),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((1, 0),)),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((1,), (0,))),)),
        lambda: ParallelPlan((StagePlan(0, 1, ((0,), (2,))), StagePlan(1, 2, ((0,),)))),
        lambda: ParallelPlan.mesh(dp=0),
        lambda: ParallelPlan.mesh(pp=4, layers=3),
        lambda: ParallelPlan.mesh(pp=2, chunks=2, layers=3),
        lambda: ParallelPlan.mesh(pp=3, layers=8, cuts=(2,)),
        lambda: ParallelPlan.of([1, 2], [1]),
    ],
)
def test_an_inconsistent_plan_is_refused_with_a_cure(build):
    with pytest.raises(PlanError) as caught:
        build()
    assert caught.value.cure


def test_a_chain_connects_each_stage_to_the_next():
    crossing = StageConnections.chain(3, nbytes=(10, 20))
    assert [(e.src, e.dst, e.nbytes) for e in crossing.edges] == [(0, 1, 10), (1, 2, 20)]
    assert [(r.src, r.dst, r.nbytes) for r in crossing.relays] == [(1, 0, 10), (2, 1, 20)]
    assert [e.src for e in crossing.into(2)] == [1] and [e.dst for e in crossing.out_of(0)] == [1]


def test_gradients_go_from_each_consumer_of_a_value_to_the_consumer_before_it():
    """`a` is read by the stages 1, 2 and 4, `b` by 2 and 4, `c` by 4 alone; an edge without gradients has no relay."""
    edges = (
        StageEdge(0, 1, ("a",), 10),
        StageEdge(0, 2, ("a", "b"), 30, value_bytes=(10, 20)),
        StageEdge(0, 4, ("a", "b", "c"), 70, value_bytes=(10, 20, 40)),
        StageEdge(1, 2, ("g",), 7),
        StageEdge(1, 4, ("ids",), 5, differentiable=False),
        StageEdge(2, 3, ("d", "e"), 9),
        StageEdge(3, 4, ("f",), 3),
    )
    crossing = StageConnections(edges)
    assert [(r.src, r.dst, r.values, r.nbytes) for r in crossing.relays] == [
        (1, 0, ("a",), 10),
        (2, 0, ("b",), 20),
        (4, 0, ("c",), 40),
        (2, 1, ("a", "g"), 17),
        (3, 2, ("d", "e"), 9),
        (4, 2, ("a", "b"), 30),
        (4, 3, ("f",), 3),
    ]
    assert [r.src for r in crossing.relays_to(2)] == [3, 4] and [r.dst for r in crossing.relays_from(4)] == [0, 2, 3]
    assert not any(relay.apart for relay in crossing.relays)
    assert replace(crossing, edges=crossing.edges[:1]).relays == crossing.relays[:1]


def test_uses_older_than_a_consumer_that_needs_none_of_them_go_to_the_producer_apart():
    """Stage 2 does not need stage 1, of which stage 4 has only indices: what is older than the sum of 4 and 2 goes apart."""
    edges = (
        StageEdge(0, 1, ("a", "b"), 30, value_bytes=(10, 20), readers=(3, 2)),
        StageEdge(0, 2, ("a", "b"), 30, value_bytes=(10, 20), readers=(2, 1)),
        StageEdge(0, 4, ("a",), 10),
        StageEdge(1, 4, ("ids",), 5, differentiable=False),
        StageEdge(1, 5, ("h",), 6),
        StageEdge(2, 4, ("d",), 9),
        StageEdge(4, 5, ("e",), 3),
    )
    assert [(r.src, r.dst, r.values, r.nbytes, set(r.apart)) for r in StageConnections(edges).relays] == [
        (1, 0, ("a", "b"), 3 * 10 + 2 * 20, {"a", "b"}),
        (2, 0, ("a", "b"), 30, set()),
        (5, 1, ("h",), 6, set()),
        (4, 2, ("a", "d"), 19, set()),
        (5, 4, ("e",), 3, set()),
    ]


def test_two_branches_of_two_stages_hand_back_the_sum_of_one_and_the_uses_of_the_other():
    """((gB2 + gB1) + gA2) + gA1, with the branches A (1, 2) and B (3, 4), and 5, which joins them."""
    ways = [(0, s, "a") for s in (1, 2, 3, 4)] + [(1, 2, "p"), (2, 5, "q"), (3, 4, "r"), (4, 5, "s")]
    crossing = StageConnections(tuple(StageEdge(src, dst, (value,)) for src, dst, value in ways))
    of_a = [(r.src, r.dst, "a" in r.apart) for r in crossing.relays if "a" in r.values]
    assert of_a == [(1, 0, True), (2, 0, True), (3, 0, False), (4, 3, False)]


def drawn_edges(dice: random.Random) -> tuple[StageEdge, ...]:
    """Values of 3 to 12 stages, each read by some later stages; some have no gradient."""
    count = dice.randint(3, 12)
    edges: dict[tuple[int, int], list[str]] = {}
    bare = set()
    for stage in range(count - 1):
        for number in range(dice.randint(1, 2)):
            value = f"v{stage}.{number}"
            bare |= {value} if dice.random() < 0.2 else set()
            later = range(stage + 1, count)
            for reader in dice.sample(later, min(len(later), dice.randint(1, 5))):
                edges.setdefault((stage, reader), []).append(value)
    return tuple(
        StageEdge(src, dst, tuple(values), without_gradient=tuple(v for v in values if v in bare))
        for (src, dst), values in sorted(edges.items())
    )


@pytest.mark.parametrize("first", range(0, 1500, 500))
def test_whatever_the_stages_the_gradients_of_a_value_are_added_newest_first_and_no_wait_is_for_nothing(first):
    """Sums are written as text: each addition in its place."""
    for seed in range(first, first + 500):
        dice = random.Random(seed)
        edges = drawn_edges(dice)
        crossing, stages = StageConnections(edges), range(max(edge.dst for edge in edges) + 1)
        uses = {(edge.dst, value): dice.randint(0, 3) for edge in edges for value in edge.values_with_gradient}
        # Stage -> those whose backward passes its own one waits for, if every message but a relay's is sent to the producer.
        after = {s: {e.dst for e in edges if e.src == s and e.values_with_gradient} for s in stages}
        for s in reversed(stages):
            after[s] |= {late for other in after[s] for late in after[other]}
        sums: dict[tuple[int, str], str] = {}
        alone: dict[tuple[int, str], list[str]] = {}
        for s in reversed(stages):
            came: dict[str, str] = {}
            for relay in reversed(crossing.relays_to(s)):
                assert relay.src in after[s], "a stage waits for another that it would not have to wait for"
                for value in relay.values:
                    new = alone[relay.src, value] if value in relay.apart else [sums[relay.src, value]]
                    for text in filter(None, new):
                        came[value] = f"({came[value]}+{text})" if came.get(value) else text
            for edge in crossing.into(s):
                for value in edge.values_with_gradient:
                    own = [f"g{s}.{number}" for number in reversed(range(uses[s, value]))]
                    apart = any(value in relay.apart for relay in crossing.relays_from(s))
                    assert not (apart and value in came), "the relay begins again"
                    alone[s, value], total = own, came.get(value, "")
                    for text in own:
                        total = f"({total}+{text})" if total else text
                    sums[s, value] = total
            for value in {v for e in crossing.out_of(s) for v in e.values_with_gradient}:
                want = ""
                readers = sorted((e.dst for e in crossing.out_of(s) if value in e.values), reverse=True)
                for text in (f"g{r}.{number}" for r in readers for number in reversed(range(uses[r, value]))):
                    want = f"({want}+{text})" if want else text
                assert came.get(value, "") == want, (seed, value)


# -- limits of messages ------------------------------------------------------------------------------------------------


def test_the_parts_of_a_message_tag_do_not_overlap():
    kinds = ("activation", "gradient")
    places = (0, 1, MAX_STAGES - 1)
    cases = list(product((0, 1, 4095), kinds, places, places, (0, MAX_MICROBATCHES - 1), (0, 1, MAX_VALUES_OF_MESSAGE - 1)))
    tags = {bundle_tag(*case) for case in cases}
    assert len(tags) == len(cases) and max(tags) < 1 << 62


@pytest.mark.parametrize("place", [(MAX_STAGES, 0, 0, 0), (0, 0, MAX_MICROBATCHES, 0), (0, 0, 0, MAX_VALUES_OF_MESSAGE)])
def test_what_does_not_fit_a_message_tag_is_refused(place: tuple[int, int, int, int]):
    with pytest.raises(PlanError, match="does not fit a message tag"):
        bundle_tag(0, "activation", *place)


def names(count: int, prefix: str = "v") -> tuple[str, ...]:
    return tuple(f"{prefix}{index}" for index in range(count))


def test_an_edge_with_too_many_values_is_named():
    edges = StageEdge(0, 1, names(3)), StageEdge(1, 3, names(MAX_VALUES_OF_MESSAGE + 1))
    with pytest.raises(PlanError, match=f"{MAX_VALUES_OF_MESSAGE + 1} values pass from stage 1 to stage 3"):
        check_message_limits(StageConnections(edges), 4, 8)
    check_message_limits(StageConnections(edges[:1]), 4, 8)


def test_gradients_of_two_edges_that_go_back_together_count_together():
    half = MAX_VALUES_OF_MESSAGE // 2 + 1
    a, b = names(half, "a"), names(half, "b")
    edges = StageEdge(0, 2, a), StageEdge(0, 3, a), StageEdge(1, 2, b), StageEdge(1, 3, b), StageEdge(2, 3, ("c",))
    with pytest.raises(PlanError, match=f"gradients of {2 * half + 1} values pass from stage 3 to stage 2"):
        check_message_limits(StageConnections(edges), 4, 8)


def test_too_many_stages_or_microbatches_are_named():
    with pytest.raises(PlanError, match=f"{MAX_STAGES + 1} stages"):
        check_message_limits(StageConnections(()), MAX_STAGES + 1, 8)
    with pytest.raises(PlanError, match=f"{MAX_MICROBATCHES + 1} microbatches"):
        check_message_limits(StageConnections(()), 1, MAX_MICROBATCHES + 1)


@pytest.mark.parametrize("cuts", [(99,), (7,), (0,)])
def test_cuts_that_leave_a_stage_empty_are_named_with_the_number_of_layers(cuts):
    with pytest.raises(
        PlanError, match=rf"the cuts {cuts[0]} leave a stage without a layer: the model has 7 layers"
    ) as refused:
        ParallelPlan.mesh(pp=2, layers=7, cuts=cuts)
    assert "between 1 and 6" in refused.value.cure
