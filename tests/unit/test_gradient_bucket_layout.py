"""How gradients are cut into buckets, and what two replicas of one machine let each other read in place."""

import pytest
import torch

from raypar.comm.bucket_layout import BucketRoom, bucket_layouts
from raypar.comm.buffer_pool import CPU
from raypar.comm.shared_memory_buckets import bucket_groups, turn_bytes

SHAPES = [(torch.Size((64, 3)), torch.float32), (torch.Size((32,)), torch.float32)]
ROOM = BucketRoom(1 << 20, (1, 1))
OWNERS = [[[(0, 128)], [(128, 192)]], [[], [(0, 32)]]]


def test_each_shares_what_the_other_one_owns_alone():
    (whole,) = bucket_layouts(SHAPES, 1 << 20, CPU, room=ROOM)
    (owned,) = bucket_layouts(SHAPES, 1 << 20, CPU, OWNERS, room=ROOM)
    assert [whole.nbytes_shared_by(replica) for replica in range(2)] == [4 * 224] * 2
    assert owned.segments == ((0, 128), (128, 224))
    assert [owned.nbytes_shared_by(replica) for replica in range(2)] == [4 * 96, 4 * 128]
    parts = [tuple(part) for part in owned.parts]
    assert parts == [(1, 0, 32, 128, 1), (0, 0, 128, 0, 0), (0, 128, 192, 160, 1)], "last layer first"


@pytest.mark.parametrize("owners", [[], OWNERS], ids=["nobody owns", "owners"])
@pytest.mark.parametrize("subtrees", [(1, 1), (2, 1), (0, 3)])
def test_buckets_fit_their_room_and_have_each_element_once(owners, subtrees):
    room = BucketRoom(1600, subtrees)
    layouts = bucket_layouts(SHAPES, 1 << 20, CPU, owners, room=room)
    assert len(layouts) > 1
    found = {0: [], 1: []}
    for layout in layouts:
        segments = None if layout.segments is None else [stop - start for start, stop in layout.segments]
        assert room.needed(layout.length, segments, 4) <= 1600 <= room.needed(224, None, 4)
        taken = [(part.offset, part.offset + part.stop - part.start) for part in layout.parts]
        assert all(a % 16 == 0 for a, _ in taken) and max(b for _, b in taken) <= layout.length
        assert all(b <= c for (_, b), (c, _) in zip(sorted(taken), sorted(taken)[1:], strict=False))
        for part in layout.parts:
            found[part.parameter] += range(part.start, part.stop)
            assert layout.segments is None or any(
                a <= part.start and part.stop <= b for a, b in owners[part.parameter][part.owner]
            ), "a part is of its owner's runs"
    assert {index: sorted(of) for index, of in found.items()} == {0: list(range(192)), 1: list(range(32))}


def test_each_piece_of_a_large_parameter_has_a_part_of_every_owners_runs():
    owners = [[[(0, 4096)], [(4096, 8192)]]]
    layouts = bucket_layouts([(torch.Size((8192,)), torch.float32)], 1 << 20, CPU, owners, room=BucketRoom(8192, (1, 1)))
    assert len(layouts) > 4 and all([part.owner for part in layout.parts] == [0, 1] for layout in layouts)


def test_groups_of_buckets_fit_a_turn():
    layouts = bucket_layouts([(torch.Size((1024,)), torch.float32)] * 7, 4096, CPU, room=ROOM)
    assert bucket_groups(layouts, 3 * 4096) == [range(3), range(3, 6), range(6, 7)]
    assert turn_bytes(layouts, bucket_groups(layouts, 3 * 4096)) == [3 * 4096] * 2
    assert [len(group) for group in bucket_groups(layouts, 100)] == [1] * 7, "one that is too large is alone"
