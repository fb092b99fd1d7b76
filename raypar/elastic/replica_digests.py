"""Which state can be trusted: comparison of replicas' digests, which finds silent corruption.

Workers that hold the same state must have equal bits; they report a digest of it with every mirror snapshot. The first error
cannot be told from its consequences: wrong weights give wrong gradients, which all replicas add. So all go back to the last
snapshot whose digests agreed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from raypar.elastic.actions import ForgetValidations, WarnUser
from raypar.elastic.phases import Phase
from raypar.elastic.run_state import RunState
from raypar.errors import DataError, ModelError, RayparError, WorkerLost
from raypar.plan.pieces import AdoptedStages, Digest
from raypar.plan.wording import after_steps, format_worker_numbers

MAX_DOUBTS = 3
"""Roll-backs in a row because of differing digests; after one more the run fails, because it is no accident."""


class InitialDigestCheck:
    """Compares what workers begin with: the values of tensors, or slices of them, and the fields of the first microbatch."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[int, int]] = {}
        """Name of a tensor -> (digest, the worker that reported it first)."""
        self._fields: dict[str, tuple[int, int]] = {}
        """The same by field of the first microbatch."""

    def add(self, worker: int, described: AdoptedStages) -> RayparError | None:
        """Take what a worker has built. Returns the error if any digest differs from another worker's."""
        if (found := _first_difference(self._values, worker, described["initial"])) is not None:
            other, names = found
            return ModelError(
                f"the model function is not reproducible: workers {other} and {worker} begin with other values of {names}",
                cure="it may draw from Python's, numpy's and torch's own generators only, seeded before it is called: "
                "no clock, no os.urandom, no generator seeded by itself, no order of a set of strings; and read the same "
                "files on every node",
            )
        if (found := _first_difference(self._fields, worker, described["collated"])) is not None:
            other, names = found
            return DataError(
                f"data.collate depends on the process that calls it: of the first microbatch, workers {other} and {worker} "
                f"have other numbers in {names}",
                cure="let it depend on its samples and the seeded generators of python, numpy and torch alone: no process id, "
                "no host name, no order of a set of strings; and read the same files on every node",
            )
        return None


def _first_difference(first: dict[str, tuple[int, int]], worker: int, digests: Mapping[str, int]) -> tuple[int, str] | None:
    """(a worker that has reported other digests, their names), if there is one. Takes those that are new into `first`."""
    different: dict[int, list[str]] = defaultdict(list)
    for name, digest in digests.items():
        known, other = first.setdefault(name, (digest, worker))
        if digest != known:
            different[other].append(name)
    if not different:
        return None
    other, names = next(iter(different.items()))
    return other, ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def find_differing_workers(digests: Mapping[int, Digest]) -> tuple[set[int], set[int]]:
    """(workers whose digest differs from that of a majority, workers of groups without a majority).

    A group is all workers that hold the same pieces of state.
    """
    groups: dict[int, dict[int, int]] = defaultdict(dict)
    for worker, (what, bits) in digests.items():
        groups[what][worker] = bits
    wrong: set[int] = set()
    unsure: set[int] = set()
    for group in groups.values():
        common, count = Counter(group.values()).most_common(1)[0]
        if 2 * count > len(group):
            wrong |= {worker for worker, bits in group.items() if bits != common}
        else:
            unsure |= set(group)
    return wrong, unsure


def compare_replica_digests(m: RunState, done: int, digests: Mapping[int, Digest]) -> bool:
    """Whether the replicas agreed after `done` steps. If not, state newer than the last agreement is used no more."""
    wrong, unsure = find_differing_workers(digests)
    if not wrong | unsure:
        m.trust.agreed, m.trust.doubts = done, 0
        m.trust.untrusted_snapshots.discard(done)
        return True
    who = (
        f"{format_worker_numbers(wrong)} differs from that of the others that hold the same"
        if wrong
        else f"{format_worker_numbers(unsure)} differs"
    )
    what = f"silent corruption: the state of {who} {after_steps(done)}"
    if m.stopping.interrupted:
        m.decide(WarnUser(f"{what}; what is saved now may be wrong"), "the run is being interrupted")
        return True
    m.trust.untrusted_snapshots.add(done)
    m.trust.tainted |= set(m.membership.members) | set(m.recovery.statuses)
    m.trust.doubt, m.trust.doubts = what, m.trust.doubts + 1
    m.trust.doubted_steps = range(m.trust.agreed, m.progress.journalled)
    doubt_followed_validations(m)
    # They leave once the others have sound state. Earlier, a new driver would find that the remaining ones agree, and go on.
    m.trust.wrong |= wrong
    m.membership.leaving |= wrong
    if m.trust.doubts <= MAX_DOUBTS:
        m.decide(
            WarnUser(f"{what}; all go back to the last state that agreed, that {after_steps(m.trust.agreed)} or before"), what
        )
    return False


def end_run_if_doubts_stay(m: RunState) -> Phase | None:
    """End the run if digests have differed too often in a row."""
    if m.trust.doubts <= MAX_DOUBTS:
        return None
    what = m.trust.doubt
    cure = "one of these machines computes wrongly, or the job is not reproducible; `raypar resume` without them goes on"
    return m.end_run("failed", what, WorkerLost(f"{what}, for the {m.trust.doubts}th time in a row", cure=cure))


def doubt_followed_validations(m: RunState) -> None:
    """Have the validations of state that may have been wrong run again in the replay, if the learning rates follow them.

    Also one after as many steps as the copies that agreed: it has used the workers' state after these were taken. A validation
    at the end of a run only is followed by none.
    """
    every, p = m.policy.validate_every, m.progress
    if not m.policy.rates_follow_validations or not every or p.validated is None:
        return
    p.doubted_validations = tuple(range(max(1, -(-m.trust.agreed // every)) * every, p.validated + 1, every))
    if p.doubted_validations:
        m.decide(ForgetValidations(p.doubted_validations[0]), "the learning rates follow them, and the state may be wrong")


def compare_digests_in_recovery(m: RunState) -> None:
    """Compare digests that this driver has not seen: recovering workers report them."""
    statuses = m.recovery.statuses
    done = {step for status in statuses.values() for step in status.digests}
    for step in sorted(done - m.trust.untrusted_snapshots):
        if step > m.trust.agreed and not m.trust.doubt:
            compare_replica_digests(m, step, {w: s.digests[step] for w, s in statuses.items() if step in s.digests})
