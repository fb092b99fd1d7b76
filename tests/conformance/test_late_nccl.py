"""The nccl transport on devices whose work is done late, in any legal order (`helpers.late_device`).

The numbers are right under every seed, and nothing that orders or keeps them can be left out. Many more seeds, and the table of
mutations: `python tests/helpers/late_device_seeds.py`.
"""

import logging
from types import SimpleNamespace

import pytest
import torch
from helpers import late_device, pretend
from helpers.late_device import WaitFor, World
from helpers.late_mutations import MUTATIONS
from helpers.late_nccl import connected
from helpers.late_programs import Launched, communicators, ending_in_one_thread, owned_runs
from helpers.late_runs import failure, runs_late
from helpers.parity import Layout
from helpers.zero_layouts import small_pieces

from raypar.comm.gradient_reduction import CanonicalReduction
from raypar.comm.gradient_scatter_on_device import DeviceScatterReduction
from raypar.comm.routine import RoutineWait
from raypar.comm.transport import CommunicatorKey
from raypar.worker.run_in_one_process import OneProcessRun

pytestmark = pretend.NEEDED
SEEDS = 400
"""Most seeds until a mutation is caught; nearly all are within twenty."""
AT_ONCE = ("an operation waits for the poster's stream", "record_stream of what was received")
"""Mutations that the first seed catches, in the default suite."""


def in_default(seeds, *chosen):
    """Seeds, of which the default suite takes a few."""
    return [seed if seed in chosen else pytest.param(seed, marks=pytest.mark.ci) for seed in seeds]


@pytest.fixture(scope="module", autouse=True)
def device():
    logging.disable(logging.ERROR)  # of communicators that a killed rank leaves
    with pretend.differentiable():
        yield pretend.device()
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", in_default(range(16), 2))
def test_all_numbers_are_right_under_every_seed(seed):
    assert failure("messages and collectives", seed) is None


@pytest.mark.parametrize("seed", in_default(range(12), 0, 3))
def test_activations_in_the_hosts_memory_give_the_bits_of_all_in_the_devices_under_every_seed(seed):
    assert failure("offloaded", seed, sanitize=True) is None
    assert failure("pinned copies", seed, sanitize=True) is None


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(3))
def test_what_travels_in_parts_between_nodes_is_whole_and_right_under_every_seed(seed):
    assert failure("parts", seed, sanitize=True) is None


@pytest.mark.parametrize("seed", range(10))
def test_memory_of_a_message_to_itself_is_given_to_nobody_before_its_copy_even_if_the_transport_ends(seed):
    """Received into one stream's memory, and copied in another's, which had sent it last."""
    with World(seed, 1) as world:
        (device,), (end,) = world.devices, connected(world, [])
        stream = device.stream()
        with stream.current():
            out = torch.full((5,), -2.0, device=pretend.device())
            end.recv(out, source=0, tag=1)
        end.send(torch.full((5,), 1.0, device=pretend.device()), to=0, tag=1)
        del out
        end.close()
        with stream.current():
            other = torch.full((5,), 7.0, device=pretend.device())
        world.drain()
        assert other.raw.tolist() == [7.0] * 5


def on_gpu(value):
    return torch.full((1000,), value, device=pretend.device())


def runs(seed, *programs):
    """Run a program of (end, device) for each rank to its end, and the devices to theirs."""
    with World(seed, len(programs)) as world, ending_in_one_thread(world):
        ends = connected(world, communicators(len(programs)))
        world.run([program(end, device) for program, end, device in zip(programs, ends, world.devices, strict=True)])
        world.drain()
        assert not any(stream.queue for stream in world.streams)


def sums(end):
    """Post a sum of both ranks, behind which the rest of the current stream waits; its handle."""
    handle = end.all_reduce(on_gpu(1.0), group=[0, 1])
    handle.wait_on_stream()
    return handle


@pytest.mark.parametrize("seed", range(10))
def test_a_receive_that_is_posted_late_waits_for_no_later_message(seed):
    """The later one waits for a sum, which the receiver posts once it has the earlier one."""

    def sends(end, device):
        end.send(on_gpu(1.0), to=1, tag=1)
        sums(end)
        end.send(on_gpu(2.0), to=1, tag=2)
        yield from ()

    def receives(end, device):
        later = end.recv(None, source=0, tag=2)
        yield RoutineWait(Launched(later), "both to be on their way")
        out = on_gpu(0.0)
        yield RoutineWait(end.recv(out, source=0, tag=1), "the earlier one")
        assert out.sum().item() == 1000
        sums(end)
        yield RoutineWait(later, "the later one")
        assert later.tensor().sum().item() == 2000

    runs(seed, sends, receives)


@pytest.mark.parametrize("seed", range(10))
def test_no_message_waits_until_the_memory_of_another_receive_may_be_written(seed):
    """It may be after a sum, which the sender posts once a later message has been taken."""

    def sends(end, device):
        end.send(on_gpu(1.0), to=1, tag=1)
        yield RoutineWait(end.send(on_gpu(2.0), to=1, tag=2), "the later one to be taken")
        sums(end)

    def receives(end, device):
        sums(end)
        out = on_gpu(0.0)
        earlier = end.recv(out, source=0, tag=1)
        yield RoutineWait(earlier, "the earlier one", on_stream=True)
        assert out.sum().item() == 1000

    runs(seed, sends, receives)


@pytest.mark.parametrize("seed", range(10))
def test_a_message_to_itself_makes_no_stream_wait_that_was_not_told_to(seed):
    """The receive's memory may be written after a sum, which the other rank posts once it has what was sent last."""

    def messages_itself(end, device):
        side = device.stream()
        with side.current():
            sums(end)
            out = on_gpu(0.0)
            taken = end.recv(out, source=0, tag=1)
        end.send(on_gpu(1.0), to=0, tag=1)
        end.send(on_gpu(2.0), to=1, tag=2)
        yield RoutineWait(taken, "the message")
        assert out.sum().item() == 1000

    def other(end, device):
        yield RoutineWait(end.recv(None, source=0, tag=2), "what was sent behind the message")
        sums(end)

    runs(seed, messages_itself, other)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("to", [0, 1])
def test_a_message_in_host_memory_waits_for_no_device(seed, to):
    """Whoever receives it has given its device work that waits for what the other one posts after an answer."""

    def sends(end, device):
        if to == 1:
            end.send(torch.ones(3), to=1, tag=1)
        answer = end.recv(None, source=1, tag=2)
        yield RoutineWait(answer, "the answer")
        sums(end)

    def receives(end, device):
        sums(end)
        yield RoutineWait(device.stream().record_event(), "time to pass")
        if to == 0:
            out = torch.zeros(3)
            early = end.recv(out, source=1, tag=1)
            sent = end.send(torch.ones(3), to=1, tag=1)
            yield RoutineWait(sent, "a message to itself")
            yield RoutineWait(early, "a message to itself")
        else:
            fresh = end.recv(None, source=0, tag=1)
            yield RoutineWait(fresh, "the message")
            out = fresh.tensor()
        assert out.tolist() == [1.0] * 3
        yield RoutineWait(end.send(torch.ones(3), to=0, tag=2), "the answer")

    runs(seed, sends, receives)


@pytest.mark.parametrize("seed", range(5))
def test_what_has_arrived_is_received_though_its_sender_is_lost(seed):
    def leaves(end, device):
        end.send(on_gpu(1.0), to=1, tag=1)
        end.send(on_gpu(2.0), to=1, tag=2)
        yield RoutineWait(end.recv(None, source=1, tag=3), "the word that both are there")
        end.abort("this rank leaves")

    def receives(end, device):
        yield RoutineWait(end.recv(None, source=0, tag=2), "both to be there")
        end.send(torch.ones(1), to=0, tag=3)
        yield RoutineWait(SimpleNamespace(done=lambda: bool(end._gone)), "the other rank to leave")
        out = on_gpu(0.0)
        yield RoutineWait(end.recv(out, source=0, tag=1), "the earlier one")
        assert out.sum().item() == 1000
        end.abort("the other rank has left")

    runs(seed, leaves, receives)


def test_a_sum_of_more_than_two_ranks_is_one_operation_in_its_communicators_stream(monkeypatch):
    everybody, given = (0, 1, 2), []
    keys = [CommunicatorKey(everybody, name) for name in ("all_reduce", "reduce_scatter")]
    launch = late_device.launch

    def counted(device, name, *more):
        given.append((name, device.current))
        launch(device, name, *more)

    monkeypatch.setattr(late_device, "launch", counted)

    def program(end):
        small, large, piece = on_gpu(1.0), torch.full((5000,), 1.0, device=pretend.device()), on_gpu(1.0)
        pieces = [on_gpu(float(rank)) for rank in everybody]
        given.clear()
        end.all_reduce(small, group=everybody), end.all_reduce(large, group=everybody)
        end.reduce_scatter(piece, pieces, group=everybody)
        streams = [end.stream_of(key).device_stream for key in (keys[0], keys[0], keys[1])]
        assert given == [("raypar.add_over_tree.default", stream) for stream in streams]
        yield from ()

    with World(1, len(everybody)) as world, ending_in_one_thread(world):
        world.run([program(end) for end in connected(world, keys)])
        world.drain()


@pytest.mark.parametrize("seed", in_default([*range(16), 32], 3, 32))
def test_a_rank_that_gives_up_leaves_nothing_that_writes_to_memory_of_others(seed):
    assert failure("kills", seed) is None


@pytest.mark.parametrize("seed", in_default(range(40), 14, 33))
def test_the_cases_of_all_transports_pass(seed):
    assert failure("conformance", seed) is None


@pytest.mark.parametrize("seed", in_default(range(100, 116), 101))
def test_pytorchs_sanitizer_finds_no_two_accesses_that_nothing_orders(seed):
    assert failure("messages and collectives", seed, sanitize=True) is None


@pytest.mark.parametrize("seed", in_default(range(30), 1))
def test_gradients_are_reduced_right_also_where_some_replicas_have_none(seed):
    assert failure("reductions", seed, sanitize=seed % 2 == 1) is None


@pytest.mark.parametrize("replicas, holders", [(2, 0), (3, 0), (4, 0), (2, 1), (3, 2)])
def test_all_of_a_reduction_is_enqueued_when_its_gradients_are_ready(replicas, holders):
    """The host is ahead of the device: what is enqueued only when a first phase is done comes after the backward pass. A pool
    with room for two buckets changes nothing; neither the host nor the stream that computes waits for it."""
    everybody = tuple(range(replicas))
    names = ("halving_all_reduce",) if replicas == 4 else ("all_to_all",) if holders else ("all_to_all", "all_gather")
    owners = owned_runs([600] * 3, replicas) if holders else []
    keys = [CommunicatorKey(everybody, name, 0) for name in names]

    def routine(end):
        reduction = CanonicalReduction(
            end, group=everybody, runs=[range(r, r + 1) for r in everybody], block_count=replicas,
            parameters=[(torch.Size((600,)), torch.float32)] * 3, bucket_bytes=2400, device=pretend.device(), owners=owners,
            holders=holders or 1,
        )  # fmt: skip
        reduction.start()
        node = (end.rank, end.rank + 1)
        for index in (2, 1, 0):
            row = {index: torch.full((600,), 1.0 + end.rank, device=pretend.device())}
            reduction.submit_gradients([index], {node: row})
        assert len({id(bucket.replicas.slot) for bucket in reduction.buckets}) == 2 < len(reduction.buckets)
        assert not any(bucket.first_phase.done() or bucket.second_phase.done() for bucket in reduction.buckets)
        assert end.device.default.queue and not any(isinstance(one, WaitFor) for one in end.device.default.queue)
        found = yield from reduction.finish()
        for total in [one for of in reduction.owned_totals.values() for one in of] if holders else found:
            assert bool((total == sum(range(1, replicas + 1))).all())
        yield from reduction.stream_waits.finish()

    with World(1, replicas) as world:
        world.run([routine(end) for end in connected(world, keys)])


@pytest.mark.parametrize("seed", [*in_default(range(20), 7), *(pytest.param(s, marks=pytest.mark.full) for s in range(20, 85))])
def test_steps_of_all_workers_have_the_bits_of_a_device_that_computes_at_once(seed):
    assert failure("steps", seed, sanitize=seed % 4 == 3) is None


@pytest.mark.parametrize("seed", in_default(range(24), 5))
def test_gradients_of_uses_that_travel_apart_are_added_once_they_and_all_newer_ones_are_there(seed):
    """Where a layer has several uses, how many is read by the host, and their receives are posted late."""
    replicas, schedule = [((1, 1, 1, 1), "1f1b"), ((1, 2, 1), "gpipe"), ((1,) * 6, "gpipe")][seed % 3]
    runs_late(Layout("branching", schedule, replicas, 3), seed, sanitize=seed % 4 == 3)


@pytest.mark.parametrize("seed", in_default(range(12), 4))
def test_what_replicas_write_into_buffers_arrives_before_it_is_folded(seed):
    assert failure("buffers", seed, sanitize=seed % 4 == 3) is None


@pytest.mark.parametrize("seed", in_default(range(24), 5, 19))
def test_owners_have_the_bits_of_replicas_that_divide_nothing(seed):
    """At level 1 and 2, with one holder and two, with ties and on shards."""
    assert failure("owners", seed, sanitize=seed % 4 == 3) is None


@pytest.mark.parametrize("seed", in_default(range(32), 1, 6, 11))
def test_gradients_that_are_never_whole_have_the_bits_too(seed):
    """At all levels, and with replicas whose streams wait for room."""
    assert failure("scattered", seed, sanitize=seed % 4 == 3) is None


@pytest.mark.parametrize("level", [2, pytest.param(0, marks=pytest.mark.ci)])
def test_messages_and_gradients_that_wait_for_them_take_no_more_than_the_pool(level):
    """With a transport on which the host takes each step."""
    layout, found = Layout("tangled", "1f1b", (2, 3), 5), []
    for plan in (layout.plan, layout.plan.with_zero(level).with_gradients("scatter")):
        with small_pieces(), OneProcessRun(layout.job, plan, "1f1b", graph=layout.graph, device=pretend.device()) as run:
            found.append([{(r.loss, r.norm) for r in run.step(step)} for step in range(2)])
            made = [one for core in run.cores for one in core.step_commit.reductions.values() if len(one.group) > 1]
    assert found[0] == found[1] and all(isinstance(one, DeviceScatterReduction) for one in made)
    for one in made:
        slots = [*one.sending, *(slot for of in one.receiving.values() for slot in of)]
        waiting = one.ahead * max(bucket.nbytes for bucket in one.layouts)
        assert sum(slot.nbytes for slot in slots) + waiting <= layout.job.reduction_buffer_bytes


@pytest.mark.parametrize("layout", [Layout("tangled", "1f1b", (2, 3), 6), Layout("tangled", "1f1b", (3,), 4)], ids=str)
def test_of_gradients_what_is_owned_alone_lives_on_a_device_too_at_level_2(layout):
    """As memory for what is on its way there is the pool, whatever the size of the model."""
    plan = layout.plan.with_zero(2)
    with small_pieces(), OneProcessRun(layout.job, plan, layout.schedule, graph=layout.graph, device=pretend.device()) as run:
        run.step(0)
        for core in run.cores:
            for index, owned in core.step_commit.owned.items():
                kept = [each.parameter.grad.raw for each in owned if each.parameter.grad is not None]
                assert all(one.untyped_storage().nbytes() == one.nbytes for one in kept), "no part of a larger tensor"
                if core.ownership.divides(index[0], "gradient"):
                    assert not any(one is not None for one in core.step_commit._settled[index].values())
                slots = {
                    id(bucket.replicas.slot): bucket.replicas.slot for bucket in core.step_commit.reductions[index].buckets
                }
                assert sum(slot._memory.nbytes for slot in slots.values()) <= layout.job.reduction_buffer_bytes


@pytest.mark.parametrize(
    "mutation",
    [pytest.param(one, id=one.what, marks=() if one.what in AT_ONCE else pytest.mark.ci) for one in MUTATIONS if not one.stays],
)
def test_a_seed_fails_without(mutation):
    caught, _ = mutation.seeds_until_caught(SEEDS)
    assert caught is not None


def test_a_mutation_leaves_the_function_as_it_was():
    mutation = MUTATIONS[0]
    before = mutation._target().__code__
    with mutation.made():
        assert mutation._target().__code__ is not before
    assert mutation._target().__code__ is before and len(MUTATIONS) >= 30
