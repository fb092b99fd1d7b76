"""Runs on one cluster are placed one after the other, and a waiting one says for what it waits."""

import pytest

from raypar.actors.queue_of_waiting_runs import DEAD_S, ClusterRoom, PlacementQueue, Ticket, placement_obstacle, ticket_key
from raypar.errors import ClusterError, Interrupted

FULL = ClusterRoom(cpus=6, free_cpus=1, may_add_nodes=False, cpus_by_run={"first": 4})
EMPTY = ClusterRoom(cpus=6, free_cpus=6, may_add_nodes=False, cpus_by_run={})


class Store:
    """The key-value store of a cluster, in memory."""

    def __init__(self):
        self.values: dict[str, bytes] = {}

    def put_if_absent(self, key, value):
        return self.values.setdefault(key, value) is value

    def put(self, key, value):
        self.values[key] = value

    def delete(self, key):
        self.values.pop(key, None)

    def items(self):
        return dict(self.values)


class Time:
    """A clock that goes on only while somebody sleeps; `alive` change their tickets meanwhile."""

    def __init__(self):
        self.now = 0.0
        self.alive: list[PlacementQueue] = []

    def sleep(self, seconds):
        self.now += seconds
        for queue in self.alive:
            queue.beat()

    def queue(self, store, run, cpus=4):
        made = PlacementQueue(store, run, cpus, clock=lambda: self.now, sleep=self.sleep)
        made.draw()
        return made


def test_the_line_says_what_is_missing_and_who_has_it():
    assert placement_obstacle(4, EMPTY, None) is None
    assert placement_obstacle(4, FULL, None) == "waiting for 4 CPUs: 1 of 6 is free, run first has 4, others have 1"
    assert placement_obstacle(1, FULL, None) is None
    shared = ClusterRoom(3, 0.97, False, {"first": 2})  # three trials of Ray Tune have a hundredth of a CPU each
    assert placement_obstacle(2, shared, None) == "waiting for 2 CPUs: 0.97 of 3 are free, run first has 2, others have 0.03"
    scaled = ClusterRoom(6, 1, True, {})
    assert placement_obstacle(4, scaled, None) is None, "the reservation is what makes the cluster grow"
    assert placement_obstacle(4, EMPTY, Ticket(1, "second", 2)) == (
        "waiting for 4 CPUs, behind run second, which needs 2: 6 of 6 are free"
    )


def test_a_run_waits_for_room_and_says_so_once_until_something_changes():
    time, said = Time(), []
    queue = time.queue(Store(), "second")
    full2 = ClusterRoom(6, 2, False, {"first": 4})
    lags = ClusterRoom(6, 2, False, {})
    rooms = [*[FULL] * 20, *[full2] * 20, lags, EMPTY]
    queue.wait_for_turn(lambda: rooms.pop(0), 60, said.append)
    assert said == [
        "waiting for 4 CPUs: 1 of 6 is free, run first has 4, others have 1",
        "waiting for 4 CPUs: 2 of 6 are free, run first has 4",
        "the cluster has room for run second now",
    ]


def test_a_run_behind_another_has_a_line_for_each_run_before_it_not_for_all_that_these_get():
    time, store, said = Time(), Store(), []
    first, second, third = (time.queue(store, run) for run in ("first", "second", "third"))
    time.alive = [first, second]
    rooms = [*[EMPTY] * 6, *[FULL] * 6, None, *[FULL] * 6, None, EMPTY, EMPTY]

    def look():
        if rooms[0] is None:
            rooms.pop(0)
            gone = time.alive.pop(0)
            gone.leave()
        return rooms.pop(0)

    third.wait_for_turn(look, 60, said.append)
    assert [line.partition(":")[0] for line in said] == [
        "waiting for 4 CPUs, behind run first, which needs 4",
        "waiting for 4 CPUs, behind run second, which needs 4",
        "the cluster has room for run third now",
    ]


def test_what_an_earlier_driver_of_the_run_has_left_is_room_for_it():
    time, said = Time(), []
    time.queue(Store(), "first").wait_for_turn(lambda: FULL, 60, said.append)
    assert said == [] and time.now == 0


def test_what_ended_runs_hold_is_given_back_before_and_while_a_run_waits():
    """A run that had lost Ray's control store kept its CPUs for ever, and the next run waited for them until it failed."""
    time, said = Time(), []
    held, looks = {"gone": 1}, []

    def sweep():
        looks.append(time.now)
        found = {run: groups for run, groups in held.items() if run != "ends later" or time.now >= 7}
        for run in found:
            del held[run]
        return found

    held["ends later"] = 2
    time.queue(Store(), "second").wait_for_turn(lambda: FULL if held else EMPTY, 60, said.append, sweep=sweep)
    assert looks == [0, 5, 10]
    assert said == [
        "removed 1 placement group of run gone, which has no driver any more",
        "waiting for 4 CPUs: 1 of 6 is free, run first has 4, others have 1",
        "removed 2 placement groups of run ends later, which has no driver any more",
        "the cluster has room for run second now",
    ]


def test_a_short_lag_of_rays_account_is_not_told():
    time, said = Time(), []
    rooms = [FULL, FULL, EMPTY]
    time.queue(Store(), "second").wait_for_turn(lambda: rooms.pop(0), 60, said.append)
    assert said == []


def test_tickets_are_in_the_order_of_drawing_and_the_next_one_comes_when_the_first_leaves():
    time, store, said = Time(), Store(), []
    first, second, third = (time.queue(store, run) for run in ("first", "second", "third"))
    time.alive = [first, second, third]
    assert [queue.number for queue in (first, second, third)] == [1, 2, 3]
    assert first.first_before() is None and second.first_before().run == third.first_before().run == "first"
    first.leave()
    first.leave()
    time.sleep(1)
    assert second.first_before() is None and third.first_before().run == "second"
    second.wait_for_turn(lambda: EMPTY, 60, said.append)
    assert said == [] and time.queue(store, "fourth").number == 4


def test_two_that_draw_at_once_get_two_tickets():
    store = Store()
    seen = store.items

    def raced():
        found = seen()
        store.items = seen
        store.put(ticket_key(1), b'{"run": "other", "cpus": 1}')
        return found

    store.items = raced
    assert Time().queue(store, "second").number == 2


def test_a_ticket_without_an_owner_is_removed_and_a_slow_owners_is_not():
    time, store, said = Time(), Store(), []
    slow, _gone, mine = (time.queue(store, run) for run in ("slow", "gone", "mine"))
    time.alive = [slow]
    assert mine.first_before().run == "slow"
    for _ in range(30):
        time.sleep(DEAD_S / 20)
        assert mine.first_before().run == "slow"
    assert [*store.values] == [ticket_key(1), ticket_key(3)], "the second one was dead"
    time.alive = []
    began = time.now
    mine.wait_for_turn(lambda: EMPTY, 60, said.append)
    assert DEAD_S <= time.now - began < DEAD_S + 2
    assert said[0] == "waiting for 4 CPUs, behind run slow, which needs 4: 6 of 6 are free"
    store.put(ticket_key(2), b"\xff not ours")
    assert mine.first_before() == Ticket(2, "?", 0)


def test_a_run_that_is_stopped_while_it_waits_ends_as_interrupted_not_as_failed():
    """A queued job that was stopped printed Ray's stack of the signal, and left its ticket and its folder."""
    time, asked = Time(), []

    def look():
        asked.extend(["SIGTERM"] * (time.now > 5))
        return FULL

    with pytest.raises(
        Interrupted, match="run second has not begun: SIGTERM while it was waiting for 4 CPUs: 1 of 6"
    ) as stopped:
        time.queue(Store(), "second").wait_for_turn(look, 60, lambda text: None, asked)
    assert time.now < 7 and stopped.value.exit_code == 130


def test_a_signal_in_the_last_moment_of_the_wait_is_not_lost():
    """It was forgotten if the cluster had room at the next look: the run began although somebody had stopped it."""
    with pytest.raises(Interrupted, match="run second has not begun: Ctrl-C while it was about to begin"):
        Time().queue(Store(), "second").wait_for_turn(lambda: EMPTY, 60, lambda text: None, ["Ctrl-C"])


def test_a_run_that_gets_no_room_is_an_error_that_names_what_it_waited_for():
    with pytest.raises(ClusterError, match="no room for run second within 20 s; it was waiting for 4 CPUs: 1 of 6") as error:
        Time().queue(Store(), "second").wait_for_turn(lambda: FULL, 20, lambda text: None)
    assert "raypar stop" in error.value.cure
