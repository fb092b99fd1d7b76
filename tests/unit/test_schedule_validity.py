"""Every built-in schedule is executable, canonical and within its memory; the validator agrees with a brute-force search."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from helpers.brute_force import good

from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections, StageEdge, TiedParameter
from raypar.schedule import registry
from raypar.schedule.instructions import Backward, BackwardInput, BackwardWeight, ExchangeBuffers, ExchangeTies, Forward, Send
from raypar.schedule.lower import lower_schedule, lower_validation_pass
from raypar.schedule.one_f_one_b import default_warmups, warmups_that_run
from raypar.schedule.schedule_csv import parse_schedule_csv
from raypar.schedule.validate import find_schedule_problems, validate_schedule

pytestmark = pytest.mark.part(4)


def case(name, pp, microbatches, chunks=None, replicas=1, blocks=0, skip=False, shared=False):
    """`skip`: a value goes from the first stage straight to the last. `shared`: what the first stage makes is read by all."""
    chunks = registry.resolve_chunks_per_worker(name, chunks)
    counts = [replicas] * pp if isinstance(replicas, int) else replicas
    plan = ParallelPlan.of(counts, chunks=chunks, placement=registry.placement_of_schedule(name))
    routing = MicrobatchRouting(plan, Microbatches(microbatches, blocks))
    crossing = StageConnections.chain(len(plan.stages))
    if skip and len(plan.stages) > 2:
        crossing = replace(crossing, edges=(*crossing.edges, StageEdge(0, len(plan.stages) - 1, ("skip",))))
    if shared:
        read = {edge.dst for edge in crossing.edges if edge.src == 0}  # one edge between two stages carries all their values
        crossing = replace(
            crossing, edges=(*crossing.edges, *(StageEdge(0, dst) for dst in range(2, len(plan.stages)) if dst not in read))
        )
    return registry.build_schedule(name, routing), routing, crossing


def grid(name, pp, microbatches):
    schedule, _, _ = case(name, pp, microbatches)
    return "\n".join(" ".join(str(i)[1:] for i in order) for order in schedule)


def test_1f1b_on_three_stages_and_four_microbatches():
    assert grid("1f1b", 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3\nF0 F1 B0 F2 B1 F3 B2 B3\nF0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_on_two_stages_and_three_microbatches():
    assert grid("gpipe", 2, 3) == "F0 F1 F2 B0 B1 B2\nF0 F1 F2 B0 B1 B2"


def test_zb_h1_delays_the_weight_gradients_of_later_stages():
    assert grid("zb-h1", 3, 3) == "F0 F1 F2 I0 W0 I1 W1 I2 W2\nF0 F1 I0 F2 I1 W0 I2 W1 W2\nF0 I0 F1 I1 F2 I2 W0 W1 W2"


def test_a_program_sends_early_frees_at_once_and_ends_with_the_vote():
    schedule, routing, crossing = case("1f1b", 2, 2)
    assert [" ".join(map(str, p)) for p in lower_schedule(schedule, routing, crossing)] == [
        "0F0 0SEND_F0>1@1 0F1 0SEND_F1>1@1 0RECV_B0<1@1 0B0 0X0 0RECV_B1<1@1 0B1 0X1 0G V O",
        "1RECV_F0<0@0 1RECV_F1<0@0 1F0 1B0 1SEND_B0>0@0 1X0 1F1 1B1 1SEND_B1>0@0 1X1 1G V O",
    ]


CHUNKS = {"interleaved": (1, 2, 3)}


def uneven(pp):
    """Two patterns of replica counts: 1 2 3 1 2 ... and 3 2 1 3 2 ..."""
    return [1 + i % 3 for i in range(pp)], [3 - i % 3 for i in range(pp)]


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_small_case_is_valid(name):
    for pp, microbatches in product(range(1, 7), range(1, 13)):
        for chunks in CHUNKS.get(name, (None,)):
            schedule, routing, crossing = case(name, pp, microbatches, chunks)
            validate_schedule(schedule, routing, crossing)


def lower_and_validate(name, sizes):
    for pp, microbatches in sizes:
        for chunks in CHUNKS.get(name, (None,)):
            for replicas in (1, 2, *uneven(pp)):
                kind = {"skip": microbatches % 3 == 2, "shared": microbatches % 3 == 0}
                schedule, routing, crossing = case(name, pp, microbatches, chunks, replicas, **kind)
                validate_schedule(schedule, routing, crossing)
                validate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing)


@pytest.mark.parametrize("name", registry.NAMES)
def test_small_cases_lower_to_valid_programs_with_replicas_equal_and_uneven(name):
    lower_and_validate(name, product(range(1, 5), (1, 2, 3, 5, 6)))


@pytest.mark.full
@pytest.mark.parametrize("name", registry.NAMES)
def test_every_small_case_lowers_to_a_valid_program(name):
    lower_and_validate(name, product(range(1, 7), range(1, 13)))


def random_plans(count, seed=11):
    """(replicas by position, microbatches, blocks), with few and many of each."""
    draw = random.Random(seed)
    for _ in range(count):
        replicas = [draw.choice([1, 1, 2, 2, 3, 4, 5, 6, 7, 8]) for _ in range(draw.randint(2, 6))]
        microbatches = draw.choice([1, 2, 3, 5, 6, 8, 12, 16, 24, 32, 48, 64])
        yield replicas, microbatches, draw.choice([0, microbatches, min(microbatches, 16), draw.randint(1, microbatches)])


def check_plans_run(name, plans):
    for number, (replicas, microbatches, blocks) in enumerate(plans):
        chunks = CHUNKS.get(name, (None,))[number % len(CHUNKS.get(name, (None,)))]
        schedule, routing, crossing = case(name, len(replicas), microbatches, chunks, replicas, blocks)
        found = find_schedule_problems(schedule, routing, crossing)
        assert not found, (name, replicas, microbatches, blocks, chunks, found[0])


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_schedule_runs_for_every_plan(name):
    """Three of these deadlock with the default warmups of 1F1B."""
    held = [([1, 3, 7], 64, 16), ([2, 7, 1, 2, 1], 12, 12), ([8, 6, 3, 1, 4, 7], 16, 4)]
    check_plans_run(name, [*held, *random_plans(20)])


@pytest.mark.full
@pytest.mark.parametrize("name", registry.NAMES)
def test_a_schedule_runs_for_each_of_two_thousand_plans(name):
    check_plans_run(name, random_plans(2041))


def random_shares(draw, plan, blocks):
    """The plan in which some positions give their replicas random shares."""
    return plan.with_shares({number: random_cut(draw, len(grid), blocks) for number, grid in enumerate(plan.grids)})


def random_cut(draw, parts, total):
    """`total` in so many parts of at least 1; () in one of three cases, and where there are too few."""
    if total < parts or not draw.randrange(3):
        return ()
    bounds = [0, *sorted(draw.sample(range(1, total), parts - 1)), total]
    return tuple(b - a for a, b in pairwise(bounds))


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_schedule_runs_whatever_the_shares_of_the_replicas_are(name):
    draw = random.Random(5)
    for number, (replicas, microbatches, _) in enumerate(random_plans(30, seed=7)):
        chunks = CHUNKS.get(name, (None,))[number % len(CHUNKS.get(name, (None,)))]
        _, routing, crossing = case(name, len(replicas), microbatches, chunks, replicas, blocks=min(16, microbatches))
        routing = replace(routing, plan=random_shares(draw, routing.plan, routing.microbatches.blocks))
        schedule = registry.build_schedule(name, routing)
        found = find_schedule_problems(schedule, routing, crossing)
        assert not found, (name, [s.share for s in routing.plan.stages], microbatches, found[0])
        if number % 5 == 0:
            validate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing)


def check_warmups(plans):
    """Counts the plans whose 1F1B has more than the default warmups."""
    raised = 0
    for replicas, microbatches, blocks in plans:
        schedule, routing, crossing = case("1f1b", len(replicas), microbatches, replicas=replicas, blocks=blocks)
        default = registry.build_schedule("1f1b", routing, warmup=default_warmups(routing.plan))
        if schedule == default:
            continue
        raised += 1
        assert find_schedule_problems(default, routing, crossing)[0].rule == "deadlock-free", (replicas, microbatches, blocks)
    return raised


def test_1f1b_has_its_default_warmups_wherever_those_run():
    assert check_warmups([([1, 3, 7], 64, 16), *random_plans(100)]) > 1


@pytest.mark.full
def test_1f1b_has_its_default_warmups_wherever_those_run_in_two_thousand_plans():
    assert 100 < check_warmups(random_plans(2041)) < 200


def test_1f1b_gives_the_warmup_that_is_missing_to_the_replica_that_needs_it():
    routing = MicrobatchRouting(ParallelPlan.of([1, 3, 7]), Microbatches(64, 16))
    default = [default_warmups(routing.plan)[role.grid] for (role,) in routing.plan.roles]
    assert [a - b for a, b in zip(warmups_that_run(routing, default), default, strict=True)] == [2] + 10 * [0]
    with pytest.raises(ScheduleError, match="deadlock-free"):
        schedule = registry.build_schedule("1f1b", routing, warmup=default_warmups(routing.plan))
        validate_schedule(schedule, routing, StageConnections.chain(3))


@pytest.mark.parametrize("pp, microbatches", list(product(range(1, 7), range(1, 13))))
def test_1f1b_keeps_p_minus_s_activations_and_not_one_less(pp, microbatches):
    schedule, routing, crossing = case("1f1b", pp, microbatches)
    peak = [min(pp - s, microbatches) for s in range(pp)]
    validate_schedule(schedule, routing, crossing, memory=peak)
    with pytest.raises(ScheduleError, match="within memory"):
        validate_schedule(schedule, routing, crossing, memory=[peak[0] - 1, *peak[1:]])


def test_skip_connections_go_straight_to_their_consumer():
    schedule, routing, crossing = case("1f1b", 4, 4, skip=True)
    programs = lower_schedule(schedule, routing, crossing)
    assert {(i.stage, i.to_stage) for p in programs for i in p if isinstance(i, Send)} == {
        *((s, s + 1) for s in range(3)),
        *((s + 1, s) for s in range(3)),
        (0, 3),
        (3, 0),
    }


def test_gradients_of_a_value_that_all_stages_read_go_from_each_stage_to_the_one_before_it():
    """As many messages as the chain alone has: what the last stage knows of the first one's value goes with the others."""
    schedule, routing, crossing = case("1f1b", 4, 2, shared=True)
    programs = lower_schedule(schedule, routing, crossing)
    sends = [i for program in programs for i in program if isinstance(i, Send)]
    assert Counter((i.stage, i.to_stage) for i in sends if i.kind == "gradient") == {(s + 1, s): 2 for s in range(3)}
    assert {(i.stage, i.to_stage) for i in sends if i.kind == "activation"} == {(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)}
    assert [relay.values for relay in crossing.relays] == [("x",), ("x", "x"), ("x", "x")]


BROKEN = {
    "complete": lambda s: (s[0][1:], s[1]),
    "causal": lambda s: ((s[0][2], s[0][0], s[0][1], *s[0][3:]), s[1]),
    "canonical": lambda s: ((Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0)), s[1]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_schedule_is_refused_with_the_rule_the_worker_and_a_cure(rule):
    schedule, routing, crossing = case("1f1b", 2, 2, blocks=1)
    with pytest.raises(ScheduleError, match=rf"{rule}: worker 0 \(stage 0, replica 0\)") as error:
        validate_schedule(BROKEN[rule](schedule), routing, crossing)
    assert error.value.cure


def test_shards_of_a_replica_compute_in_one_order():
    routing = MicrobatchRouting(ParallelPlan.of([1, 1], [2, 1]), Microbatches(2))
    schedule = registry.build_schedule("gpipe", routing)
    validate_schedule(lower_schedule(schedule, routing, StageConnections.chain(2)), routing, StageConnections.chain(2))
    swapped = (schedule[0], (Forward(0, 1), Forward(0, 0), *schedule[1][2:]), schedule[2])
    with pytest.raises(
        ScheduleError, match=r"together: worker 1 .*0F1 is instruction 0 here of those computed with worker 0 .*, 0F0 there"
    ):
        validate_schedule(swapped, routing, StageConnections.chain(2))


@pytest.mark.parametrize(
    "order, first_wrong",
    [
        ("0F0,0F1,0I0,0I1,0W1,0W0", "0W0"),
        ("0F0,0F1,0I1,0I0,0W0,0W1", "0I0"),
        ("0F0,0F1,0I0,0B1,0W0", "0W0"),
        ("0F0,0F1,0I1,0B0,0W1", "0B0"),
    ],
)
def test_weight_gradients_of_a_block_come_in_index_order_from_b_i_and_w_alike(order, first_wrong):
    _, routing, crossing = case("1f1b", 1, 2, blocks=1)
    text = f"{first_wrong} stands after microbatch 1 of the same block"
    assert [(p.rule, p.text) for p in find_schedule_problems(parse_schedule_csv(order), routing, crossing)] == [
        ("canonical", text)
    ]
    _, routing, crossing = case("1f1b", 1, 2, blocks=2)
    assert find_schedule_problems(parse_schedule_csv(order), routing, crossing) == []


def test_workers_that_wait_for_each_other_in_a_circle_are_named_with_what_they_wait_for():
    _, routing, crossing = case("1f1b", 2, 2)
    orders = parse_schedule_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    assert [(p.rule, p.rank, p.text) for p in find_schedule_problems(orders, routing, crossing)] == [
        ("deadlock-free", 0, "waits for ever at 0B0 for 1B0 of worker 1"),
        ("deadlock-free", 1, "waits for ever at 1F1 for 0F1 of worker 0"),
    ]


def test_a_circle_of_posts_stops_workers_with_a_single_queue_and_only_those():
    schedule, routing, crossing = case("gpipe", 3, 1, skip=True)
    first, second, third = (list(p) for p in lower_schedule(schedule, routing, crossing))
    assert [str(i) for i in (*first[1:3], *third[:2])] == ["0SEND_F0>1@1", "0SEND_F0>2@2", "2RECV_F0<0@0", "2RECV_F0<1@1"]
    first[1:3] = reversed(first[1:3])  # worker 0 offers 2 its message first, 2 wants that of 1 first, 1 that of 0
    third[:2] = reversed(third[:2])
    programs = (tuple(first), tuple(second), tuple(third))
    validate_schedule(programs, routing, crossing)
    found = find_schedule_problems(programs, routing, crossing, communicators="world")
    assert [p.text[: p.text.index(" of")] for p in found] == [
        "waits for ever at 0B0 for the gradient",
        "waits for ever at 1F0 for the activation",
        "waits for ever at 2F0 for the activation",
    ]


@pytest.mark.parametrize("name", registry.NAMES)
def test_one_global_order_needs_but_one_queue_a_worker(name):
    for pp, microbatches, replicas in [(2, 3, 1), (4, 6, 1), (3, 4, 2), (3, 7, [1, 3, 2])]:
        schedule, routing, crossing = case(name, pp, microbatches, replicas=replicas, skip=True)
        validate_schedule(lower_schedule(schedule, routing, crossing), routing, crossing, communicators="world")


def test_a_validation_pass_is_checked_without_its_backward():
    _, routing, crossing = case("interleaved", 3, 5, skip=True)
    programs = lower_validation_pass(routing, crossing)
    validate_schedule(programs, routing, crossing, training=False)
    with pytest.raises(ScheduleError, match=r"complete: worker 0 .*0B0 0 times"):
        validate_schedule(programs, routing, crossing)


def without(programs, rank, text):
    place = [str(i) for i in programs[rank]].index(text)
    return tuple(p[:place] + p[place + 1 :] if r == rank else p for r, p in enumerate(programs))


def doubled(programs, rank, text):
    place = [str(i) for i in programs[rank]].index(text)
    return tuple(p[:place] + p[place : place + 1] + p[place:] if r == rank else p for r, p in enumerate(programs))


@pytest.mark.parametrize(
    "change, rule, rank, text",
    [
        (
            lambda p: without(p, 0, "0SEND_F0>1@1"),
            "paired",
            0,
            "0SEND_F0>1@1 stands 0 times, needed 1 (the activation of microbatch 0",
        ),
        (
            lambda p: without(p, 1, "1RECV_F0<0@0"),
            "causal",
            1,
            "1F0 uses the activation of microbatch 0 from stage 0 to stage 1",
        ),
        (lambda p: doubled(p, 1, "1SEND_B0>0@0"), "paired", 1, "1SEND_B0>0@0 stands 2 times, needed 1 (the gradient"),
        (lambda p: without(p, 0, "0X0"), "freed", 0, "0X0 is missing"),
        (lambda p: doubled(p, 0, "0X1"), "freed", 0, "0X1 stands twice"),
        (lambda p: (p[0], (p[1][4], *p[1][:4], *p[1][5:])), "causal", 1, "1SEND_B0>0@0 stands before what it sends"),
        (lambda p: without(p, 0, "0G"), "ended", 0, "0G (ReduceGradients) stands 0 times, needed 1"),
        (lambda p: (p[0][:-2] + p[0][:-3:-1], p[1]), "ended", 0, "the last instructions are O V, not V O"),
        (lambda p: doubled(p, 1, "V"), "ended", 1, "V (ExchangeVotes) stands 2 times, needed 1"),
        (lambda p: (p[0][:-1] + (ExchangeTies(),) + p[0][-1:], p[1]), "ended", 0, "T (ExchangeTies) stands 1 times, needed 0"),
        (
            lambda p: (p[0][:-2] + (ExchangeBuffers(),) + p[0][-2:], p[1]),
            "ended",
            0,
            "S (ExchangeBuffers) stands 1 times, needed 0",
        ),
        (lambda p: (p[0], (*p[1][:-4], p[1][-3], p[1][-4], *p[1][-2:])), "freed", 1, None),
    ],
)
def test_a_broken_program_is_refused_with_the_rule_the_worker_and_the_instruction(change, rule, rank, text):
    schedule, routing, crossing = case("1f1b", 2, 2)
    found = find_schedule_problems(change(lower_schedule(schedule, routing, crossing)), routing, crossing)
    if text is None:
        assert found == []  # a free may stand anywhere after the last use
    else:
        assert any((p.rule, p.rank) == (rule, rank) and text in p.text for p in found), found


def mutate(programs, rng):
    """One random change of a valid set of programs: swap, delete, duplicate, move, retarget, renumber, I and W made one B."""
    lists = [list(p) for p in programs]
    rank = rng.randrange(len(lists))
    order = lists[rank]
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    kind = rng.choice(["swap", "neighbours", "delete", "duplicate", "move", "retarget", "renumber", "merge"])
    if kind == "swap":
        order[a], order[b] = order[b], order[a]
    elif kind == "neighbours":
        a = rng.randrange(len(order) - 1)
        order[a], order[a + 1] = order[a + 1], order[a]
    elif kind == "delete":
        del order[a]
    elif kind == "duplicate":
        order.insert(b, order[a])
    elif kind == "move":
        order.insert(b, order.pop(a))
    elif kind == "retarget" and hasattr(order[a], "peer"):
        order[a] = replace(order[a], peer=rng.randrange(len(lists)))
    elif kind == "merge" and isinstance(order[a], BackwardInput):
        stage, microbatch = order[a].stage, order[a].microbatch
        order[a] = Backward(stage, microbatch)
        lists[rank] = [i for i in order if i != BackwardWeight(stage, microbatch)]
    elif hasattr(order[a], "microbatch"):
        order[a] = replace(order[a], microbatch=rng.randrange(3))
    return tuple(tuple(o) for o in lists)


def small_programs(rng):
    name = rng.choice(registry.NAMES)
    pp, microbatches = rng.choice([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (3, 3)])
    replicas = rng.choice([1, 1, [1, 2, 1][:pp], 2]) if pp * microbatches <= 4 else 1
    schedule, routing, crossing = case(
        name, pp, microbatches, None, replicas, rng.choice([1, 2, 0]), rng.random() < 0.3, microbatches == 2
    )
    if rng.random() < 0.2:
        crossing = replace(crossing, ties=(TiedParameter("embedding.weight", (0, len(routing.plan.stages) - 1)),))
        crossing = replace(crossing, exchanges_buffers=(0,) if routing.plan.stages[0].replicas > 1 else ())
    return lower_schedule(schedule, routing, crossing), routing, crossing


def compare(mutations, seed):
    rng = random.Random(seed)
    verdicts = {True: 0, False: 0}
    for _ in range(mutations):
        programs, routing, crossing = small_programs(rng)
        for _ in range(rng.choice([1, 1, 1, 2])):
            programs = mutate(programs, rng)
        fine = not find_schedule_problems(programs, routing, crossing)
        assert fine == good(programs, routing, crossing), [" ".join(map(str, p)) for p in programs]
        verdicts[fine] += 1
    return verdicts


@pytest.mark.ci
def test_verdict_equals_brute_force_on_random_mutations():
    verdicts = compare(300, seed=1)
    assert min(verdicts.values()) >= 20


@pytest.mark.full
def test_verdict_equals_brute_force_on_two_thousand_random_mutations():
    verdicts = compare(2000, seed=2)
    assert min(verdicts.values()) >= 100


def judge_built_in(name, sizes):
    for pp, microbatches in sizes:
        for chunks in (1, 2) if name == "interleaved" else (None,):
            schedule, routing, crossing = case(name, pp, microbatches, chunks, shared=microbatches % 2 == 0)
            assert good(lower_schedule(schedule, routing, crossing), routing, crossing)


@pytest.mark.parametrize("name", registry.NAMES)
def test_brute_force_finds_small_built_in_schedules_good(name):
    judge_built_in(name, product(range(1, 4), range(1, 4)))


@pytest.mark.full
@pytest.mark.parametrize("name", registry.NAMES)
def test_brute_force_finds_every_built_in_schedule_good(name):
    judge_built_in(name, product(range(1, 5), range(1, 7)))
