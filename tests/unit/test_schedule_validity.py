"""Every built-in schedule is executable, canonical and within its memory; the validator agrees with a brute-force search."""

import random
from dataclasses import replace
from itertools import product

import pytest
from helpers.brute_force import good

from raypar.errors import ScheduleError
from raypar.plan import Crossing, Edge, Microbatches, ParallelPlan, Routing
from raypar.schedule import registry
from raypar.schedule.file import read_csv, write_csv
from raypar.schedule.instructions import Backward, Forward, Recv, Send
from raypar.schedule.lower import lower
from raypar.schedule.validate import problems, validate


def case(name, pp, microbatches, chunks=None, replicas=1, blocks=0, skip=False):
    chunks = registry.default_chunks(name, chunks)
    counts = [replicas] * pp if isinstance(replicas, int) else replicas
    plan = ParallelPlan.of(counts, chunks=chunks, placement=registry.placement(name))
    routing = Routing(plan, Microbatches(microbatches, blocks))
    crossing = Crossing.chain(len(plan.stages))
    if skip and len(plan.stages) > 2:
        crossing = replace(crossing, edges=(*crossing.edges, Edge(0, len(plan.stages) - 1, ("skip",))))
    return registry.build(name, routing), routing, crossing


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
    assert [" ".join(map(str, p)) for p in lower(schedule, routing, crossing)] == [
        "0F0 0SA0>1@1 0F1 0SA1>1@1 0RG0<1@1 0B0 0X0 0RG1<1@1 0B1 0X1 0G V O",
        "1RA0<0@0 1RA1<0@0 1F0 1B0 1SG0>0@0 1X0 1F1 1B1 1SG1>0@0 1X1 1G V O",
    ]


CHUNKS = {"interleaved": (1, 2, 3, 4)}


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_small_case_is_valid_and_lowers_to_a_valid_program(name):
    for pp, microbatches in product(range(1, 6), range(1, 10)):
        for chunks in CHUNKS.get(name, (None,)):
            for replicas in (1, 2, [1 + i * 7 % 3 for i in range(pp)], [3 - i % 3 for i in range(pp)]):
                schedule, routing, crossing = case(name, pp, microbatches, chunks, replicas, skip=microbatches % 2 == 0)
                validate(schedule, routing, crossing)
                validate(lower(schedule, routing, crossing), routing, crossing)


@pytest.mark.parametrize("pp, microbatches", list(product(range(1, 7), range(1, 13))))
def test_1f1b_keeps_p_minus_s_activations_and_not_one_less(pp, microbatches):
    schedule, routing, crossing = case("1f1b", pp, microbatches)
    peak = [min(pp - s, microbatches) for s in range(pp)]
    validate(schedule, routing, crossing, memory=peak)
    with pytest.raises(ScheduleError, match="within memory"):
        validate(schedule, routing, crossing, memory=[peak[0] - 1, *peak[1:]])


def test_skip_connections_go_straight_to_their_consumer():
    schedule, routing, crossing = case("1f1b", 4, 4, skip=True)
    programs = lower(schedule, routing, crossing)
    assert {(i.stage, i.to_stage) for p in programs for i in p if isinstance(i, Send)} == {
        *((s, s + 1) for s in range(3)),
        *((s + 1, s) for s in range(3)),
        (0, 3),
        (3, 0),
    }


BROKEN = {
    "complete": lambda s: (s[0][1:], s[1]),
    "causal": lambda s: ((s[0][2], s[0][0], s[0][1], *s[0][3:]), s[1]),
    "canonical": lambda s: ((Forward(0, 0), Forward(0, 1), Backward(0, 1), Backward(0, 0)), s[1]),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_schedule_is_refused_with_the_rule_the_worker_and_a_cure(rule):
    schedule, routing, crossing = case("1f1b", 2, 2, blocks=1)
    with pytest.raises(ScheduleError, match=rf"{rule}: worker 0 \(stage 0, replica 0\)") as error:
        validate(BROKEN[rule](schedule), routing, crossing)
    assert error.value.cure


def test_two_workers_that_send_to_each_other_in_opposite_orders_deadlock():
    schedule, routing, crossing = case("1f1b", 2, 2)
    first, second = lower(schedule, routing, crossing)
    order = list(second)
    a, b = order.index(Recv(1, 1, 0, 0, "activation")), order.index(Send(1, 0, 0, 0, "gradient"))
    order.insert(b, order.pop(a))
    with pytest.raises(ScheduleError, match=r"paired|deadlock-free|causal"):
        order.remove(Recv(1, 1, 0, 0, "activation"))
        validate((first, tuple(order)), routing, crossing)


@pytest.mark.parametrize("name", registry.NAMES)
def test_csv_gives_the_same_schedule_back(name):
    schedule, _, _ = case(name, 3, 5)
    assert read_csv("# mine\n" + write_csv(schedule)) == schedule


def test_a_bad_cell_is_named_by_row_and_column():
    with pytest.raises(ScheduleError, match=r"row 2, column 2: '1Q0'"):
        read_csv("0F0,0B0\n1F0,1Q0\n")


def test_unknown_schedules_get_the_nearest_names():
    with pytest.raises(ScheduleError, match="interleaved"):
        registry.entry("interleave")


def mutate(programs, rng):
    """One random change of a valid set of programs: swap, delete, duplicate, move, retarget, renumber."""
    lists = [list(p) for p in programs]
    rank = rng.randrange(len(lists))
    order = lists[rank]
    a, b = rng.randrange(len(order)), rng.randrange(len(order))
    kind = rng.choice(["swap", "neighbours", "delete", "duplicate", "move", "retarget", "renumber"])
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
    elif hasattr(order[a], "microbatch"):
        order[a] = replace(order[a], microbatch=rng.randrange(3))
    return tuple(tuple(o) for o in lists)


def small_programs(rng):
    name = rng.choice(registry.NAMES)
    pp, microbatches = rng.choice([(1, 2), (2, 1), (2, 2), (2, 3), (3, 2)])
    replicas = rng.choice([1, 1, [1, 2, 1][:pp], 2]) if pp * microbatches <= 4 else 1
    schedule, routing, crossing = case(name, pp, microbatches, replicas=replicas, skip=rng.random() < 0.3)
    return lower(schedule, routing, crossing), routing, crossing


def compare(mutations, seed):
    rng = random.Random(seed)
    verdicts = {True: 0, False: 0}
    for _ in range(mutations):
        programs, routing, crossing = small_programs(rng)
        for _ in range(rng.choice([1, 1, 1, 2])):
            programs = mutate(programs, rng)
        fine = not problems(programs, routing, crossing)
        assert fine == good(programs, routing, crossing, all_orders=True), [" ".join(map(str, p)) for p in programs]
        verdicts[fine] += 1
    return verdicts


def test_verdict_equals_brute_force_on_random_mutations():
    verdicts = compare(150, seed=1)
    assert min(verdicts.values()) >= 10


@pytest.mark.full
def test_verdict_equals_brute_force_on_two_thousand_random_mutations():
    verdicts = compare(2000, seed=2)
    assert min(verdicts.values()) >= 100


@pytest.mark.full
@pytest.mark.parametrize("name", registry.NAMES)
def test_brute_force_finds_every_built_in_schedule_good(name):
    for pp, microbatches in product(range(1, 5), range(1, 7)):
        for chunks in (1, 2) if name == "interleaved" else (None,):
            schedule, routing, crossing = case(name, pp, microbatches, chunks)
            programs = lower(schedule, routing, crossing)
            states = 1
            for program in programs:
                states *= len(program)
            assert good(programs, routing, crossing, all_orders=states < 20_000)
