"""A simulated network: which packets arrive, and when."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "cluster"))  # the forwarder is a program of its own, started without packages

from link_rules import QUEUE_S, LinkRules, LinkShape

A, B, C = "10.77.0.2", "10.77.0.3", "10.77.0.4"


def arrivals(rules, source, destination, count=1, size=1000, now_s=0.0):
    return [rules.arrival_s(source, destination, size, now_s) for _ in range(count)]


def test_a_network_that_nobody_has_touched_delivers_at_once():
    assert arrivals(LinkRules(), A, B, now_s=5.0) == [5.0]


def test_a_partition_drops_what_it_names_in_one_direction_until_it_heals():
    rules = LinkRules()
    rules.block([A], [B, C])
    assert (arrivals(rules, A, B), arrivals(rules, A, C)) == ([None], [None])
    assert (arrivals(rules, B, A), arrivals(rules, B, C)) == ([0.0], [0.0])
    rules.heal()
    assert arrivals(rules, A, B) == [0.0]


def test_bandwidth_delays_packets_one_after_the_other_and_drops_those_of_a_full_queue():
    """1,000 bytes at 0.08 Mbit/s take 0.1 s each; half a second of them fits the queue."""
    rules = LinkRules(shapes={B: LinkShape(bandwidth_mbit_s=0.08)})
    found = arrivals(rules, A, B, count=8)
    assert found[:6] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) and found[6:] == [None, None]
    assert arrivals(rules, B, A) == pytest.approx([0.1]), "the other direction has its own queue"
    assert arrivals(rules, A, B, now_s=10.0) == pytest.approx([10.1]), "the queue has emptied"
    assert QUEUE_S == 0.5


def test_delays_of_both_links_add_up():
    rules = LinkRules(shapes={A: LinkShape(delay_s=0.02), B: LinkShape(delay_s=0.03)})
    assert arrivals(rules, A, B) == pytest.approx([0.05]) and arrivals(rules, A, C) == pytest.approx([0.02])


def test_losses_are_random_with_a_seed():
    first, again, other = (LinkRules(seed, shapes={A: LinkShape(loss=0.05)}) for seed in (1, 1, 2))
    found = [arrivals(rules, A, B, count=2000) for rules in (first, again, other)]
    assert found[0] == found[1] != found[2]
    assert all(60 < each.count(None) < 140 for each in found)


@pytest.mark.parametrize("wrong", [{"loss": 1.1}, {"loss": -0.1}, {"delay_s": -1.0}, {"bandwidth_mbit_s": 0.0}])
def test_impossible_links_are_refused(wrong):
    with pytest.raises(ValueError, match="a link needs"):
        LinkShape(**wrong)
