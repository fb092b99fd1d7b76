"""Four processes, one killed or stopped inside each operation: the others are free within 100 ms and start again.

Time counts from when the killed one has ended. Time in which a process had no processor is not counted, as in the deadlines
of a run.
"""

import signal
import time

import pytest
from helpers import transport_cases
from helpers.processes import Workers
from helpers.standin import needs_cupy
from helpers.transport_cases import FOREVER

pytestmark = pytest.mark.part(3)

VICTIM = 2
OTHERS = [0, 1, 3]
BOUND_S = 0.1


@pytest.fixture(scope="module", params=["tcp", pytest.param("unix", marks=pytest.mark.full), needs_cupy("nccl")])
def workers(request):
    """Unix sockets are `full`: they are TCP's code, and workers of `tests/e2e/test_elastic.py` die and hang on them."""
    made = Workers(4)
    made.kind = request.param
    yield made
    made.end()


@pytest.fixture(autouse=True)
def fresh_processes_after_a_failure(request, workers):
    """Who is left in the middle of a failed test would fail all others."""
    failed = request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        for index in range(len(workers.workers)):
            workers.replace(index)


generations = iter(range(1, 10**6))


def start(workers, name):
    """All four in a new generation and inside the operation."""
    addresses = workers.each(transport_cases.listen, workers.kind)
    generation = next(generations)
    workers.each(transport_cases.connect, addresses, [0, 1, 2, 3], generation)
    for index, worker in enumerate(workers.workers):
        worker.call(transport_cases.run_forever, index, name)
    time.sleep(0.06)  # inside, several times round
    return addresses, generation


def survivors_work_in_a_new_generation(workers, addresses):
    workers.each(transport_cases.close, on=OTHERS)
    workers.each(transport_cases.connect, addresses, OTHERS, next(generations), on=OTHERS)
    for case in ("all_reduces", "tags_overtake"):
        workers.each(transport_cases.run_case, case, on=OTHERS)


@pytest.mark.parametrize("name", FOREVER)
def test_a_killed_rank_frees_the_others_within_100_ms(name, workers):
    addresses, _ = start(workers, name)
    waited = workers.cpu_wait(OTHERS)
    at = workers.workers[VICTIM].kill()
    results = [workers.workers[i].result() for i in OTHERS]
    waited_s = waited.seconds()
    assert all(kind in ("CommError", "GroupAborted") for kind, _, _ in results), results
    assert max(when for _, _, when in results) - at - waited_s < BOUND_S, results
    assert any(f"rank {VICTIM}" in what for _, what, _ in results), results
    survivors_work_in_a_new_generation(workers, addresses)
    workers.each(transport_cases.close, on=OTHERS)
    workers.replace(VICTIM)


@pytest.mark.parametrize("name", FOREVER)
def test_abort_frees_the_others_of_a_stopped_rank_within_100_ms_and_its_return_is_harmless(name, workers):
    addresses, old = start(workers, name)
    victim = workers.workers[VICTIM]
    victim.signal(signal.SIGSTOP)
    try:
        time.sleep(0.05)
        waited = workers.cpu_wait(OTHERS)
        aborted = [workers.workers[i].control(transport_cases.abort_from_outside) for i in OTHERS]
        results = [workers.workers[i].result() for i in OTHERS]
        waited_s = waited.seconds()
        # Each from when it was told: between two of them this process, too, may have to wait for a processor.
        taken_s = [when - told_s for (_, _, when), told_s in zip(results, aborted, strict=True)]
        assert max(taken_s) - waited_s < BOUND_S, (results, aborted)
        assert all(kind in ("GroupAborted", "CommError") for kind, _, _ in results), results
        survivors_work_in_a_new_generation(workers, addresses)
    finally:
        victim.signal(signal.SIGCONT)
    kind, what, _ = victim.result()
    assert kind == "CommError" and "rank" in what, "its connections are gone"
    workers.each(transport_cases.run_case, "all_to_alls", on=OTHERS)
    workers.each(transport_cases.close, on=OTHERS)
    # It knocks with its old generation while the others form the next one: they wait for the last of them.
    new, last = next(generations), OTHERS[-1]
    for i in OTHERS[:-1]:
        workers.workers[i].call(transport_cases.connect, i, addresses, OTHERS, new)
    victim.call(transport_cases.connect_and_expect_refusal, VICTIM, addresses, [0, 1, 2, 3], old)
    assert f"generation {old} is over" in victim.result()
    workers.workers[last].call(transport_cases.connect, last, addresses, OTHERS, new)
    for i in OTHERS:
        workers.workers[i].result()
    workers.each(transport_cases.run_case, "all_reduces", on=OTHERS)
    workers.each(transport_cases.close, on=OTHERS)


@pytest.mark.full
@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("name", FOREVER)
def test_a_killed_rank_again_and_again(name, turn, workers):
    test_a_killed_rank_frees_the_others_within_100_ms(name, workers)


def test_many_lost_generations_leave_no_thread_and_no_open_file(workers):
    footprints = []
    for _ in range(4):
        start(workers, "all_reduce")
        workers.workers[VICTIM].control(transport_cases.abort_from_outside)
        for worker in workers.workers:
            worker.result()
        workers.each(transport_cases.close)
        footprints.append(workers.each(transport_cases.footprint))
    assert footprints == footprints[:1] * 4
