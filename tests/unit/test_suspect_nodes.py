"""A node whose worker did not answer gets no new workers for a while, but not for ever: networks heal."""

from raypar.elastic.suspect_nodes import CALM_S, LEAST_AGE_S, MOST_SUSPECT_S, SUSPECT_S, YOUNG_S, FlappingNodes, SuspectNodes


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


def flapped(times: int) -> FlappingNodes:
    """Two nodes stay; others join and are lost 8 s later, one every 10 s, each under a new id."""
    nodes = FlappingNodes()
    nodes.see(["head", "stays"], 0.0)
    for number in range(times):
        nodes.see(["head", "stays", f"flaps {number}"], 10.0 * number)
        nodes.lose(f"flaps {number}", 10.0 * number + 8.0)
    return nodes


def test_while_nodes_flap_a_new_one_gets_no_worker_before_it_has_lived_for_a_while():
    """A run moved to every node that joined, lost it seconds later, and recovered."""
    nodes = flapped(2)
    nodes.see(["head", "stays", "new"], 20.0)
    assert nodes.at(20.0) == nodes.at(19.0 + LEAST_AGE_S) == {"new"}
    assert nodes.at(20.0 + LEAST_AGE_S) == frozenset()


def test_each_node_that_flaps_doubles_the_age_up_to_that_of_nodes_which_do_not_flap():
    ages_s = [flapped(times).least_age_s(10.0 * times) for times in (0, 1, 2, 3, 4, 9, 2000)]
    assert ages_s == [0.0, 0.0, LEAST_AGE_S, 2 * LEAST_AGE_S, YOUNG_S, YOUNG_S, YOUNG_S], "one may be lost young"


def test_nodes_that_were_there_before_the_run_or_lived_for_long_do_not_flap():
    nodes = flapped(1)
    assert nodes.lose("stays", 12.0) is None
    nodes.see(["head", "new"], 15.0)
    assert nodes.lose("new", 16.0 + YOUNG_S) is None
    assert nodes.lose("never seen", 17.0) is None
    assert nodes.least_age_s(18.0 + YOUNG_S) == 0.0


def test_when_no_node_has_flapped_for_ten_minutes_new_nodes_are_trusted_again():
    nodes = flapped(3)
    assert nodes.least_age_s(28.0 + 60.0 + CALM_S) == 60.0
    assert nodes.least_age_s(29.0 + 60.0 + CALM_S) == 0.0
    nodes.see(["later", "and later"], 2000.0)
    assert nodes.lose("later", 2001.0) is None and nodes.lose("and later", 2002.0) == LEAST_AGE_S, "it begins anew"
