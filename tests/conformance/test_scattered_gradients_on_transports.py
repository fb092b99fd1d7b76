"""Gradients that are scattered, on threads and real sockets: owners have the bits of one process, whatever comes first."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from helpers.transport_cases import CREDENTIAL, LIMIT_S
from test_gradient_reduction import SHAPES, block_gradients, by_one_process, parameters, same_bits
from test_reduction_to_owners import owners_of

from raypar.comm.faulty_transport import Fault, FaultyTransport
from raypar.comm.gradient_scatter import ScatterReduction
from raypar.comm.local_transport import LocalMesh
from raypar.comm.owner_sums import BucketFold
from raypar.comm.routine import run_routine
from raypar.comm.tcp.endpoint import TcpEndpoint
from raypar.errors import CommError
from raypar.plan.gradient_scatter import replicas_by_share, stack_steps
from raypar.plan.microbatches import Microbatches

pytestmark = pytest.mark.part(4)


def tcp_transports(count, generation):
    """One for each of so many threads."""
    endpoints = [TcpEndpoint.listen(credential=CREDENTIAL) for _ in range(count)]
    addresses, found = [endpoint.address for endpoint in endpoints], [None] * count

    def connect(rank):
        found[rank] = endpoints[rank].connect(
            rank=rank, size=count, addresses=addresses, generation=generation, deadline_s=LIMIT_S
        )

    in_threads([lambda r=r: connect(r) for r in range(count)])
    return found, lambda: [one.close() for one in (*found, *endpoints)]


def in_threads(works):
    """Run each in a thread; the first error is raised here."""
    errors = []

    def run(work):
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a replica hangs"
    if errors:
        raise errors[0]


def run_replica(transport, gradients, shares, pool_bytes, found, steps=3):
    """Hand over the gradients of this replica's microbatches, with pauses; keeps what each step gave."""
    count, dtype = len(gradients), gradients[0][0].dtype
    replica_of, pauses = replicas_by_share(count, shares), random.Random(transport.rank)
    made = ScatterReduction(
        transport,
        group=range(len(shares)),
        replica_of=replica_of,
        steps=stack_steps(Microbatches(count, count)),
        parameters=parameters(dtype),
        owners=owners_of(len(shares)),
        bucket_bytes=1500,
        pool_bytes=pool_bytes,
        timeout_s=LIMIT_S,
    )
    for _ in range(steps):
        made.start()
        for m in (m for m, replica in enumerate(replica_of) if replica == transport.rank):
            for index in reversed(range(len(SHAPES))):
                if pauses.random() < 0.1:
                    time.sleep(0.002)
                gradient = gradients[m][index]
                made.submit_gradients([index], {(m, m + 1): {index: None if gradient is None else gradient.clone()}})
        results = run_routine(made.finish(), LIMIT_S)
        assert not any(one is not None for one in results), "nobody has a whole one"
        found.append(made.owned_totals)


def check(found, gradients, replicas):
    """Each owner has the totals of its runs."""
    dtype = gradients[0][0].dtype
    totals = by_one_process(gradients)
    want = [torch.full(SHAPES[i], -0.0, dtype=dtype) if one is None else one for i, one in enumerate(totals)]
    owners = owners_of(replicas)
    for number, steps in enumerate(found):
        assert len(steps) == 3
        for mine in steps:
            assert mine.keys() == set(range(len(SHAPES)))
            for index, runs in mine.items():
                right = [want[index].reshape(-1)[start:stop] for start, stop in owners[index][number]]
                assert len(runs) == len(right) and all(map(same_bits, runs, right)), (number, index)


@pytest.mark.parametrize("pool_bytes", [8 << 20, 16 << 10, 6_000])
@pytest.mark.parametrize("shares, count", [((1, 1), 8), ((1, 1, 1), 7), ((3, 1), 6), ((1, 1, 1, 1), 3)], ids=str)
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_owners_have_the_bits_of_one_process(kind, shares, count, pool_bytes):
    gradients, replicas = block_gradients(count, seed=count), len(shares)
    transports, close = (LocalMesh(replicas).transports, list) if kind == "local" else tcp_transports(replicas, 1)
    found = [[] for _ in range(replicas)]
    try:
        in_threads([lambda t=t: run_replica(t, gradients, shares, pool_bytes, found[t.rank]) for t in transports])
    finally:
        close()
    check(found, gradients, replicas)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    gradients, mesh = block_gradients(5, dtype, seed=3), LocalMesh(3)
    found = [[] for _ in range(3)]
    in_threads([lambda t=t: run_replica(t, gradients, (1, 1, 1), 6_000, found[t.rank]) for t in mesh.transports])
    check(found, gradients, 3)


@pytest.mark.parametrize("call_index", [0, 5, 17, 40])
def test_a_message_that_comes_late_changes_nothing(call_index):
    gradients, mesh = block_gradients(6, seed=1), LocalMesh(2)
    late = [Fault(rank, "run_phases", "delay", call_index + rank, delay_s=0.05) for rank in range(2)]
    transports, found = [FaultyTransport(t, late) for t in mesh.transports], [[], []]
    in_threads([lambda t=t: run_replica(t, gradients, (1, 1), 6_000, found[t.rank]) for t in transports])
    check(found, gradients, 2)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_replica_that_leaves_ends_the_waits_of_the_others(kind):
    """Inside of a backward pass, too, where they wait for room."""
    gradients = block_gradients(6, seed=2)
    transports, close = (LocalMesh(3).transports, list) if kind == "local" else tcp_transports(3, 1)
    errors = []

    def stay(transport):
        try:
            run_replica(transport, gradients, (1, 1, 1), 6_000, [])
        except CommError as error:
            errors.append(error)

    def leave():
        time.sleep(0.1)
        transports[2].close()

    try:
        in_threads([lambda: stay(transports[0]), lambda: stay(transports[1]), leave])
    finally:
        close()
    assert len(errors) == 2


SPARSE = [[((0, 500),) if replica == (i % 6 != 5) else () for replica in range(3)] for i in range(12)]
"""Replica 0 owns buckets 0 and 6, replica 1 all others."""
HALVES = [[((0, 240),), ((240, 500),), ()]] * 12


def step_of_twelve_buckets(transport, owners, submit_at, timeout_s):
    """A step of three replicas with twelve buckets and two slots.

    `submit_at`: (replica, bucket) -> called before that is handed over."""
    made = ScatterReduction(
        transport,
        group=range(3),
        replica_of=range(3),
        steps=stack_steps(Microbatches(3, 3)),
        parameters=[(torch.Size([500]), torch.float32)] * 12,
        owners=owners,
        bucket_bytes=2000,
        pool_bytes=40_000,
        timeout_s=timeout_s,
    )
    assert (not made.ahead, len(made.layouts)) == (True, 12)
    assert transport.rank or owners is HALVES or made.kept == [0, 6]
    made.start()
    m = transport.rank
    for bucket in range(12):
        submit_at.get((m, bucket), bool)()
        made.submit_gradients([11 - bucket], {(m, m + 1): {11 - bucket: torch.full([500], 1.0)}})
    run_routine(made.finish(), timeout_s)
    return made.owned_totals


def test_a_replica_waits_for_no_message_that_is_later_than_its_slot(monkeypatch):
    """While another thread adds up bucket 0, the receive of bucket 6 is posted: it needs what this replica sends next."""
    sent, adds = threading.Event(), threading.Event()

    def slow(fold, leave=BucketFold._leave_slots):
        if not adds.is_set():
            adds.set()
            time.sleep(0.2)
        leave(fold)

    monkeypatch.setattr(BucketFold, "_leave_slots", slow)
    submit_at = {(0, 2): lambda: (sent.set(), adds.wait(LIMIT_S)), (2, 0): lambda: sent.wait(LIMIT_S)}
    totals, mesh = {}, LocalMesh(3)
    in_threads([lambda t=t: totals.update({t.rank: step_of_twelve_buckets(t, SPARSE, submit_at, 5)}) for t in mesh.transports])
    assert all(one.eq(3).all() for mine in totals.values() for runs in mine.values() for one in runs)
    assert sum(len(runs) for mine in totals.values() for runs in mine.values()) == 12


def test_additions_that_fail_in_another_thread_end_a_wait_for_other_messages(monkeypatch):
    """So that a replica without memory says so at once, and the others do not wait for it."""
    waits = threading.Event()
    submit_at = {(0, 2): waits.set, (2, 0): lambda: waits.wait(LIMIT_S) and time.sleep(0.2)}

    def fails(fold):
        raise RuntimeError("no memory")

    def replica(transport):
        try:
            step_of_twelve_buckets(transport, HALVES, submit_at, LIMIT_S)
        except CommError as error:
            errors.append(str(error))
            transport.abort("a replica has failed")

    monkeypatch.setattr(BucketFold, "_leave_slots", fails)
    errors, start = [], time.monotonic()
    mesh = LocalMesh(3)
    in_threads([lambda t=t: replica(t) for t in mesh.transports])
    assert time.monotonic() - start < LIMIT_S / 2
    assert len(errors) == 3 and any("no memory" in error for error in errors), errors
