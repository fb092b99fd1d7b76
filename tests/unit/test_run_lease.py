"""The lease of a run on shared storage: one owner at a time, whatever is killed, stopped or lost on the way."""

import contextlib
import itertools
from dataclasses import replace

import pytest

from raypar.errors import ClusterError, LeaseHeldError, LeaseLostError
from raypar.storage import held_lease
from raypar.storage.held_lease import HeldLease
from raypar.storage.run_lease import (
    LEASE_S,
    MARGIN_S,
    RENEW_S,
    FoundLease,
    Lease,
    claim_lease,
    may_write,
    parse_lease,
    renew_lease,
)

PLACE = "s3://bucket/runs/mine"


class Clock:
    now_s = 1000.0


class LeasesInMemory:
    """A `LeaseStore` with a clock of its own, as S3 has one. `before`: what others do before the next write."""

    has_clock = True

    def __init__(self, clock: Clock) -> None:
        self.clock, self.content, self.version, self.written_s = clock, b"", 0, 0.0
        self.before = self.unanswered = lambda: None

    def read(self) -> FoundLease | None:
        self.unanswered()
        return (
            FoundLease(
                parse_lease(self.content),
                str(self.version),
                self.clock.now_s - self.written_s if self.has_clock else None,
            )
            if self.version
            else None
        )

    def put(self, lease: Lease, version: str | None) -> str | None:
        self.unanswered()
        before, self.before = self.before, lambda: None
        before()
        if version != (str(self.version) if self.version else None):
            return None
        self.content, self.version, self.written_s = lease.to_bytes(), self.version + 1, self.clock.now_s
        return str(self.version)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(held_lease, "seconds_since_boot", lambda: clock.now_s)
    return clock


def held(store: LeasesInMemory, owner: str) -> HeldLease:
    return HeldLease(store, owner, "mine", PLACE)


def test_a_lease_is_given_back_although_the_driver_renews_it_or_somebody_asks_for_a_stop_at_that_moment(clock: Clock):
    """Else the same command would be refused for the rest of the lease."""
    store = LeasesInMemory(clock)
    client, driver, second = held(store, "one"), held(store, "one"), held(store, "two")
    client.take()
    store.before = driver.renew
    client.release()
    second.take()
    assert store.read().lease.owner == "two"


def test_a_second_owner_is_refused_by_name_until_the_lease_ends(clock: Clock):
    store = LeasesInMemory(clock)
    first, second = held(store, "one"), held(store, "two")
    first.take()
    clock.now_s += 20
    with pytest.raises(LeaseHeldError, match=r"run mine is under way: process \d+ of .* last heard of 20 s ago") as caught:
        second.take()
    assert f"its lease ends in {LEASE_S - 20:.0f} s" in caught.value.cure and PLACE in caught.value.cure
    first.renew()
    clock.now_s += LEASE_S - 1
    with pytest.raises(LeaseHeldError):
        second.take()
    clock.now_s += 1
    second.take()
    with pytest.raises(LeaseLostError, match=r"process .* has it now; nothing more is written there"):
        first.renew()
    second.check()


def test_of_two_that_take_it_at_once_one_is_refused(clock: Clock):
    for gap in (False, True):  # there is none yet, or one that is over
        store = LeasesInMemory(clock)
        if gap:
            held(store, "old").take()
            clock.now_s += LEASE_S
        first, second = held(store, "one"), held(store, "two")
        store.before = second.take
        with pytest.raises(LeaseHeldError):
            first.take()
        second.check()


def test_client_and_driver_of_one_run_renew_the_same_lease(clock: Clock):
    store = LeasesInMemory(clock)
    client, driver = held(store, "one"), held(store, "one")
    client.take()
    for _ in range(5):
        store.before = driver.renew
        client.renew()
        clock.now_s += RENEW_S
    client.check(), driver.check()


def test_a_write_whose_answer_was_lost_counts(clock: Clock):
    store = LeasesInMemory(clock)
    lease = held(store, "one")
    put = store.put
    store.put = lambda mine, version: put(mine, version) and None  # type: ignore[method-assign,func-returns-value]
    lease.take()
    lease.renew()


def test_an_owner_who_cannot_renew_writes_nothing_before_anybody_may_take_it(clock: Clock):
    store = LeasesInMemory(clock)
    lease = held(store, "one")
    lease.take()

    def unanswered() -> None:
        raise ClusterError("no answer")

    store.unanswered = unanswered
    for _ in range(int(LEASE_S - MARGIN_S)):
        lease.check()
        clock.now_s += 1
    with pytest.raises(ClusterError, match=f"could not be renewed for {LEASE_S - MARGIN_S:.0f} s"):
        lease.check()
    store.unanswered = lambda: None
    lease.renew()  # nobody has taken it
    lease.check()


def test_a_lease_that_was_given_back_is_free_at_once_and_not_renewed_any_more(clock: Clock):
    store = LeasesInMemory(clock)
    lease = held(store, "one")
    lease.take()
    lease.release()
    with pytest.raises(LeaseLostError):
        lease.renew()
    held(store, "two").take()


def test_without_a_clock_of_the_store_a_lease_is_watched_and_clocks_of_machines_are_not_compared(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """As in Ray's store. However far two clocks are apart, a living owner keeps the lease, and a dead one loses it."""
    store, lines = LeasesInMemory(clock), list[str]()
    store.has_clock = False
    first, second = held(store, "one"), held(store, "two")
    second.take(lines.append), second.release()
    first.take(lines.append)
    assert lines == [], "nobody waits for a lease that is free"
    lives = True

    def sleep(seconds: float) -> None:
        clock.now_s += seconds
        if lives and clock.now_s % RENEW_S == 0:
            first.renew()

    monkeypatch.setattr(held_lease.time, "sleep", sleep)
    began_s = clock.now_s
    with pytest.raises(LeaseHeldError, match="run mine is under way"):
        second.take(lines.append)
    assert clock.now_s - began_s <= RENEW_S and "waiting up to 45 s to see whether process" in lines[0]
    lives, began_s = False, clock.now_s
    second.take(lines.append)
    assert LEASE_S <= clock.now_s - began_s < LEASE_S + 2
    with pytest.raises(LeaseLostError):
        first.renew()


def test_a_request_to_stop_reaches_every_process_of_the_run_and_no_later_start(clock: Clock):
    store = LeasesInMemory(clock)
    client, driver = held(store, "one"), held(store, "one")
    client.take()
    found = store.read()
    assert found is not None and store.put(replace(found.lease, stop_requested=True), found.version)
    client.renew(), driver.renew(), client.renew()
    assert client.stop_requested and driver.stop_requested
    client.release()
    later = held(store, "two")
    later.take(), later.renew()
    assert not later.stop_requested


def test_one_that_was_removed_is_lost():
    with pytest.raises(LeaseLostError, match="its lease was removed"):
        renew_lease(None, Lease("one", "me"), "mine", PLACE)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 90,
        b"[1]",
        b'{"owner": 1, "holder": "x", "renewal": "y", "released": 3}',
        b'{"owner": "a", "holder": "x", "renewal": 1, "released": false, "stop_requested": "no"}',
        b"x" * 9000,
    ],
)
def test_what_is_no_lease_is_somebodys_until_it_is_old(content: bytes):
    found = FoundLease(parse_lease(content), "7", LEASE_S - 1)
    with pytest.raises(LeaseHeldError, match="a process whose lease raypar cannot read"):
        claim_lease(found, Lease("one", "me"), "mine", PLACE)
    assert claim_lease(FoundLease(parse_lease(content), "7", LEASE_S), Lease("one", "me"), "mine", PLACE)[1] == "7"


@pytest.mark.parametrize("turns", [5, pytest.param(6, marks=pytest.mark.full)])
def test_no_two_owners_may_write_at_once_under_any_order_of_renewals_stops_and_takeovers(clock: Clock, turns: int):
    """Two processes; in every turn one of them renews, or takes, or is stopped, and time passes. Clocks run alike."""
    for moves in itertools.product("aAbB.", repeat=turns):
        clock.now_s, store = 1000.0, LeasesInMemory(clock)
        owners = {"a": held(store, "a"), "b": held(store, "b")}
        for move in moves:
            clock.now_s += 17.0
            if move != ".":
                owner = owners[move.lower()]
                with contextlib.suppress(ClusterError):
                    owner.renew() if move.islower() else owner.take()
            assert sum(may_write(owner.renewed_s, clock.now_s) for owner in owners.values()) <= 1, moves
