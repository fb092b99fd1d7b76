"""Rules for stragglers: report them, and ask one to leave if the job wants it."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.elastic.actions import ReportStraggler
from raypar.elastic.run_state import RunState
from raypar.elastic.stragglers import StragglerFinding


def begin_straggler_watch(m: RunState) -> None:
    """Begin to compare the workers of a new generation with those that compute the same."""
    if m.membership.plan is None:
        return
    places: dict[tuple[int, int], list[int]] = {}
    for worker, place in zip(m.membership.members, m.membership.plan.compute_keys, strict=True):
        places.setdefault(place, []).append(worker)
    m.health.stragglers.begin(list(places.values()))


def check_stragglers(m: RunState, busy_s: Mapping[int, float]) -> None:
    """Report stragglers after a committed step, and ask one of them to leave if the job wants that and another can come.

    Only one leaves at a time, and only one of a node: if the worker that came in its place is slow too, the node is.
    """
    watch, slow_nodes, nodes = m.health.stragglers, m.health.slow_nodes, m.membership.nodes
    found = watch.step(busy_s)
    leaver = next(iter(watch.now()), None) if _can_replace(m) else None
    if leaver is not None and nodes.get(leaver.worker, f"of worker {leaver.worker}") in slow_nodes:
        leaver = None
    for finding in found:
        if leaver is None or finding.worker != leaver.worker:
            m.decide(
                _report(finding), "its replicas wait for it in every step" if not finding.recovered else "it has caught up"
            )
    if leaver is None:
        return
    slow_nodes.add(nodes.get(leaver.worker, f"of worker {leaver.worker}"))
    m.decide(_report(leaver, leaves=True), "elastic.stragglers is replace")
    m.membership.leaving.add(leaver.worker)
    m.planned.reason = f"worker {leaver.worker} leaves: it takes {leaver.slowdown:.1f} times as long as it should"


def _can_replace(m: RunState) -> bool:
    """Whether one worker may leave now, and another can come."""
    policy, who = m.policy, m.membership
    if not policy.elastic or not policy.replace_stragglers:
        return False
    if who.leaving or m.planned.reason is not None or m.stopping.request is not None:
        return False
    another = bool(who.spares) or policy.hires
    return another and len(who.members) + len(who.spares) - 1 >= policy.min_workers and len(who.members) > 1


def _report(finding: StragglerFinding, leaves: bool = False) -> ReportStraggler:
    return ReportStraggler(finding.worker, finding.slowdown, finding.steps, finding.alone, finding.recovered, leaves)
