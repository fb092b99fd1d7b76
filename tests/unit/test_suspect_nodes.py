"""A node whose worker did not answer gets no new workers for a while, but not for ever: networks heal."""

from raypar.elastic.suspect_nodes import MOST_SUSPECT_S, SUSPECT_S, SuspectNodes


def test_a_node_is_avoided_until_ray_has_noticed_its_death_and_may_be_used_again_after_that():
    nodes = SuspectNodes()
    nodes.suspect("a", 100.0)
    assert nodes.at(100.0) == nodes.at(99.0 + SUSPECT_S) == {"a"}
    assert nodes.at(100.0 + SUSPECT_S) == frozenset()


def test_after_every_machine_was_cut_off_once_there_are_machines_for_new_workers_again():
    """All nodes were avoided for the rest of the run, which trained with half of its workers beside free processors."""
    nodes = SuspectNodes()
    for number, node in enumerate(("a", "b", "c")):
        nodes.suspect(node, 12.0 * number)
    assert nodes.at(30.0) == {"a", "b", "c"}
    assert nodes.at(24.0 + SUSPECT_S) == frozenset()


def test_a_node_that_is_suspected_again_is_avoided_twice_as_long_each_time_up_to_a_limit():
    nodes, now_s, lasts = SuspectNodes(), 0.0, []
    for _ in range(8):
        nodes.suspect("a", now_s)
        lasts.append(next(after for after in range(10_000) if not nodes.at(now_s + after)))
        now_s += lasts[-1]
    assert lasts[:3] == [SUSPECT_S, 2 * SUSPECT_S, 4 * SUSPECT_S] and lasts[-1] == MOST_SUSPECT_S


def test_two_workers_of_one_node_that_are_lost_together_count_once():
    nodes = SuspectNodes()
    nodes.suspect("a", 0.0)
    nodes.suspect("a", 1.0)
    assert nodes.at(1.0 + SUSPECT_S) == frozenset()
