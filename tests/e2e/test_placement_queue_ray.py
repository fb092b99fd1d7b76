"""Tickets in the store of a real Ray cluster, and its room as the queue sees it."""

from pathlib import Path

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raypar.actors.placement_queue import PlacementQueue, RayTicketStore, look_at_cluster, placement_turn, ticket_key
from raypar.actors.ray_connection import connect_ray


def test_tickets_are_shared_and_the_room_names_the_runs_that_have_it():
    with connect_ray(None, 3, Path(__file__).parents[1]):
        store, said = RayTicketStore(), []
        assert store.items() == {} and store.put_if_absent(ticket_key(7), b"1") and not store.put_if_absent(ticket_key(7), b"2")
        store.put(ticket_key(7), b"3")
        assert store.items() == {ticket_key(7): b"3"}
        store.delete(ticket_key(7))
        with placement_turn("first", 2, 10, said.append) as first:
            second = PlacementQueue(RayTicketStore(), "my-second", 2)
            second.draw()
            assert (first.number, second.number) == (1, 2) and second.first_before().run == "first"
            group = placement_group([{"CPU": 1}] * 2, name="raypar-first-0", lifetime="detached")
            other = placement_group([{"CPU": 1}], name="others")
            ray.get([group.ready(), other.ready()], timeout=60)
            room = look_at_cluster()
            assert room.cpus == 4 and room.cpus_by_run == {"first": 2} and not room.may_add_nodes
        assert second.first_before() is None
        second.leave()
        assert store.items() == {} and said == []
        remove_placement_group(group)
