"""By way of which agents a driver calls its workers."""

import pytest

from raypar.elastic.call_routes import CallRoute, agents_below, make_call_routes


def depth(route: CallRoute) -> int:
    return 1 + max(map(depth, route.below.values()), default=0)


@pytest.mark.parametrize("nodes, levels", [(1, 1), (4, 1), (5, 2), (17, 2), (64, 2), (65, 3), (128, 3), (256, 3), (1250, 4)])
def test_every_worker_is_on_one_route_and_nobody_calls_many_agents(nodes, levels):
    routes = make_call_routes({f"node{n}": range(8 * n, 8 * n + 8) for n in range(nodes)})
    assert sorted(n for route in routes.values() for n in route) == list(range(8 * nodes))
    assert len(routes) <= 4
    below = agents_below(routes)
    assert len(below) == nodes, "one agent a node"
    assert max(map(len, below.values())) <= 15 * (levels - 1)
    assert max(map(depth, routes.values())) == levels


def test_a_route_to_a_part_of_its_workers_leaves_out_agents_that_have_nothing_to_do():
    route = CallRoute((0, 1), {"b": CallRoute((2, 3)), "c": CallRoute((4,))})
    assert list(route) == [0, 1, 2, 3, 4]
    assert route.only({1, 4}) == CallRoute((1,), {"c": CallRoute((4,))})
    assert route.only(()) is None
