"""What every class of instructions declares, and that a new one needs nothing but its declarations."""

import ast
import re
from pathlib import Path

import pytest
from helpers.sources import PACKAGE, nodes_of
from helpers.toy_instructions import add_toy_instructions

from raypar.draw.chrome_trace import chrome_trace
from raypar.draw.swimlane_svg import swimlane_svg
from raypar.draw.text_grid import text_grid
from raypar.errors import ScheduleError
from raypar.plan import Microbatches, MicrobatchRouting, ParallelPlan, StageConnections
from raypar.schedule.instructions import (
    ACTIVATIONS,
    INPUT_GRADIENTS,
    INSTRUCTIONS,
    KEPT_INPUTS,
    RESIDENT,
    STASH,
    VALUES,
    WEIGHT_GRADIENTS,
    Backward,
    BackwardInput,
    BackwardWeight,
    CheckpointedForward,
    Compute,
    ExchangeBuffers,
    ExchangeTies,
    ExchangeVotes,
    Fetch,
    FetchKeptInputs,
    Forward,
    FreeActivations,
    Gather,
    OffloadedCheckpointedForward,
    OffloadedForward,
    OptimizerStep,
    Recompute,
    Recv,
    ReduceGradients,
    Release,
    Send,
    ServeParameters,
)
from raypar.schedule.lower import lower_schedule
from raypar.schedule.schedule_csv import format_schedule_csv, parse_schedule_csv
from raypar.schedule.simulate import SimulationCosts, simulate_schedule
from raypar.schedule.step_timeline import parse_instruction, peak_activation_memory, peak_activations
from raypar.schedule.validate import find_schedule_problems

ROOT = Path(__file__).parents[2]

TABLE = [
    # class, letter, role, cost, needs, makes, allocates, frees
    (Forward, "F", "compute", ("forward",), (VALUES,), (VALUES,), (ACTIVATIONS,), ()),
    (CheckpointedForward, "C", "compute", ("forward",), (VALUES,), (VALUES,), (KEPT_INPUTS,), ()),
    (Recompute, "R", "compute", ("recompute",), (KEPT_INPUTS,), (), (ACTIVATIONS,), (KEPT_INPUTS,)),
    (OffloadedForward, "U", "compute", ("forward",), (VALUES,), (VALUES,), (RESIDENT,), ()),
    (OffloadedCheckpointedForward, "J", "compute", ("forward",), (VALUES,), (VALUES,), (RESIDENT,), ()),
    (Fetch, "H", "compute", (), (RESIDENT,), (), (ACTIVATIONS,), (RESIDENT,)),
    (FetchKeptInputs, "K", "compute", (), (RESIDENT,), (), (KEPT_INPUTS,), (RESIDENT,)),
    (
        Backward,
        "B",
        "compute",
        ("input", "weight"),
        (ACTIVATIONS, INPUT_GRADIENTS),
        (INPUT_GRADIENTS, WEIGHT_GRADIENTS),
        (),
        (ACTIVATIONS,),
    ),
    (BackwardInput, "I", "compute", ("input",), (ACTIVATIONS, INPUT_GRADIENTS), (INPUT_GRADIENTS,), (STASH,), (ACTIVATIONS,)),
    (BackwardWeight, "W", "compute", ("weight",), (STASH,), (WEIGHT_GRADIENTS,), (), (STASH,)),
    (Send, "SEND", "communication", (), (), (), (), ()),
    (Recv, "RECV", "communication", (), (), (), (), ()),
    (FreeActivations, "X", "release", (), (), (), (), ()),
    (ServeParameters, "SERVE", "communication", (), (), (), (), ()),
    (Gather, "A", "communication", ("gather",), (), (), (), ()),
    (Release, "Z", "release", (), (), (), (), ()),
    (ReduceGradients, "G", "reduction", ("reduce",), (WEIGHT_GRADIENTS,), (), (), ()),
    (ExchangeTies, "T", "step", (), (), (), (), ()),
    (ExchangeBuffers, "S", "step", (), (), (), (), ()),
    (ExchangeVotes, "V", "step", ("step",), (), (), (), ()),
    (OptimizerStep, "O", "step", (), (), (), (), ()),
]


def test_every_class_declares_its_letter_role_cost_needs_makes_and_memory():
    declared = [(k, k.letter, k.role, k.cost, k.needs, k.makes, k.allocates, k.frees) for k in INSTRUCTIONS.values()]
    assert declared == TABLE


@pytest.mark.parametrize("kind", [kind for kind in INSTRUCTIONS.values() if issubclass(kind, Compute)])
def test_compute_instructions_declare_all_of_it_in_their_own_class(kind):
    assert {"letter", "cost", "needs", "makes", "allocates", "frees", "drawing"} <= vars(kind).keys()


def test_what_computes_with_parameters_says_so_and_weight_gradients_do_not():
    assert {kind for kind in INSTRUCTIONS.values() if kind.needs_weights} == {
        Forward,
        CheckpointedForward,
        Recompute,
        OffloadedForward,
        OffloadedCheckpointedForward,
        Backward,
        BackwardInput,
    }
    assert [str(i) for i in (ServeParameters(1, 3, 8), Gather(1), Release(1))] == ["1SERVE_8@3", "1A", "1Z"]


def test_letters_are_single_capitals_and_each_belongs_to_one_class():
    assert [kind.letter for kind in INSTRUCTIONS.values()] == list(INSTRUCTIONS)
    assert all(re.fullmatch("[A-Z]", kind.letter) for kind in INSTRUCTIONS.values() if kind.role != "communication")


def test_messages_print_as_those_of_pytorch_do_with_their_peer():
    assert str(Send(0, 5, 1, 3, "activation")) == "0SEND_F5>1@3" and str(Recv(1, 5, 0, 2, "activation")) == "1RECV_F5<0@2"
    assert str(Send(1, 5, 0, 2, "gradient")) == "1SEND_B5>0@2" and str(Recv(0, 5, 1, 3, "gradient")) == "0RECV_B5<1@3"


def test_what_takes_time_says_how_it_is_drawn():
    undrawn = {Send, Recv, FreeActivations, ServeParameters, Release}
    assert {kind for kind in INSTRUCTIONS.values() if kind.drawing is None} == undrawn
    looks = [kind.drawing for kind in INSTRUCTIONS.values() if kind.drawing is not None]
    assert len({look.category for look in looks}) == len({look.legend for look in looks}) == len(looks)


def test_a_microbatch_leaves_nothing_behind_with_the_backward_whole_or_split():
    ways = (
        (Forward,),
        (CheckpointedForward, Recompute),
        (OffloadedForward, Fetch),
        (OffloadedCheckpointedForward, FetchKeptInputs, Recompute),
    )
    splits = (Backward,), (BackwardInput, BackwardWeight)
    for order in ((*forward, *split) for forward in ways for split in splits):
        held: list[str] = []
        for kind in order:
            for kept in kind.frees:
                held.remove(kept)
            held += kind.allocates
            assert kind.last_use == (not held)
        assert held == [] and sum(kind.held_change for kind in order) == 0


def test_between_input_and_weight_gradients_a_stage_keeps_as_much_as_between_forward_and_backward():
    split = (Forward(0, 0), BackwardInput(0, 0), Forward(0, 1), BackwardInput(0, 1), BackwardWeight(0, 0), BackwardWeight(0, 1))
    assert peak_activations(split) == 2
    assert peak_activation_memory(split, [100]) == 200


def test_both_ends_of_a_message_name_the_same_bundle_and_workers():
    for kind, bundle in (("activation", ("activation", 0, 1, 5)), ("gradient", ("gradient", 1, 0, 5))):
        send, recv = Send(0, 5, 1, 3, kind), Recv(1, 5, 0, 2, kind)
        assert send.bundle == recv.bundle == bundle
        assert send.ends(2) == recv.ends(3) == (2, 3)


def test_no_module_asks_an_instruction_for_its_class():
    """They read declarations, or have a table keyed on the class. The bases `Compute` and `Communication` may be asked for."""
    classes = {kind.__name__ for kind in INSTRUCTIONS.values()}
    found = []
    for place in ("schedule", "worker", "planner", "elastic", "actors", "commands"):
        for path in (PACKAGE / place).rglob("*.py"):
            for node in nodes_of(path):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                    asked = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                    found += [f"{path.name}:{node.lineno}"] * bool(asked & classes)
    assert found == []


# -- an instruction that only this test knows ---------------------------------------------------------------------------


@pytest.fixture
def added(monkeypatch):
    return add_toy_instructions(monkeypatch)


LEAN = "0L0,0L1,0L2,0M0,0B0,0M1,0B1,0M2,0B2\n1L0,1M0,1B0,1L1,1M1,1B1,1L2,1M2,1B2\n"
ROUTING, CROSSING = MicrobatchRouting(ParallelPlan.mesh(pp=2), Microbatches(3)), StageConnections.chain(2)
UNIT = SimulationCosts.uniform(2, forward_ms=1, backward_ms=2)


def edited(*changes):
    """Problems of `LEAN` with texts replaced, as a bare schedule."""
    text = LEAN
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return [problem.text for problem in find_schedule_problems(parse_schedule_csv(text), ROUTING, CROSSING)]


def test_an_added_instruction_is_read_and_written(added):
    schedule = parse_schedule_csv(LEAN)
    assert schedule[0][3] == added.MakeAgain(0, 0) == parse_instruction("0M0")
    assert format_schedule_csv(schedule) == LEAN


def test_without_its_line_in_the_table_nobody_knows_it():
    with pytest.raises(ScheduleError, match="'0L0' is not an instruction"):
        parse_schedule_csv(LEAN)


def test_an_added_instruction_is_simulated_and_priced(added):
    timeline = simulate_schedule(parse_schedule_csv(LEAN), ROUTING, CROSSING, UNIT)
    # The last worker computes L M B three times, after the first L of the first one; then that has one M B to do.
    assert timeline.busy_ms == (3 * (1 + 1 + 2),) * 2
    assert timeline.makespan_ms == 1 + 3 * 4 + 2
    assert timeline.peak_activations == (1, 1)


def test_its_memory_is_counted_from_its_own_declarations(added):
    whole = parse_schedule_csv(
        LEAN.replace("L", "F").replace("0M0,", "").replace("0M1,", "").replace("0M2,", "")[: LEAN.index("\n")]
    )
    assert peak_activation_memory(whole[0], [10]) == 30
    assert peak_activation_memory(parse_schedule_csv(LEAN)[0], [10]) == 10


def test_an_added_instruction_is_lowered(added):
    first, last = (" ".join(map(str, program)) for program in lower_schedule(parse_schedule_csv(LEAN), ROUTING, CROSSING))
    assert first == (
        "0L0 0SEND_F0>1@1 0L1 0SEND_F1>1@1 0L2 0SEND_F2>1@1 0M0 0RECV_B0<1@1 0B0 0X0 0M1 0RECV_B1<1@1 0B1 0X1 "
        "0M2 0RECV_B2<1@1 0B2 0X2 0G V O"
    )
    assert last == (
        "1RECV_F0<0@0 1RECV_F1<0@0 1L0 1RECV_F2<0@0 1M0 1B0 1SEND_B0>0@0 1X0 1L1 1M1 1B1 1SEND_B1>0@0 1X1 "
        "1L2 1M2 1B2 1SEND_B2>0@0 1X2 1G V O"
    )


def test_an_added_instruction_is_validated(added):
    assert edited() == []
    assert find_schedule_problems(lower_schedule(parse_schedule_csv(LEAN), ROUTING, CROSSING), ROUTING, CROSSING) == []
    assert find_schedule_problems(parse_schedule_csv(LEAN), ROUTING, CROSSING, memory=[1, 1]) == []


def test_wrong_orders_of_an_added_instruction_are_found(added):
    assert edited(("0M1,0B1", "0B1,0M1")) == ["0B1 stands before 0M1"]
    assert edited(("0M1,", "")) == ["0B1 stands before 0M1"]
    assert edited(("0L0,0L1,0L2,0M0", "0M0,0L0,0L1,0L2")) == ["0M0 stands before 0L0"]
    assert edited(("0L2", "0F2")) == ["0M2 stands before 0L2"]
    assert edited(("0L2,", "")) == ["0F2 0 times, 0L2 0 times"]
    assert edited(("0M2,0B2", "0M2,0B2,0M3")) == ["0M3: microbatch 3 of stage 0 is not routed to this worker"]
    assert edited(("0L2,", "0F2,"), ("0M2,", "")) == []
    assert edited(("0M2,", "")) == ["0B2 stands before 0M2"]


def test_what_is_kept_for_nothing_is_found(added, monkeypatch):
    monkeypatch.setattr(added.MakeAgain, "needs", ())
    assert edited(("0M2,0B2", "0M2,0B2,0M2")) == ["the activations of 0F2 are kept after their last use"]


def test_an_added_instruction_is_drawn(added):
    timeline = simulate_schedule(parse_schedule_csv(LEAN), ROUTING, CROSSING, UNIT)
    assert text_grid(timeline).splitlines()[1].startswith("worker 0  L0 L1 L2 M0")
    picture = swimlane_svg(timeline, title="added")
    assert "made again (M)" in picture and "#008080" in picture
    events = [e for e in chrome_trace(timeline)["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in events} == {"lean forward", "make again", "backward"}
