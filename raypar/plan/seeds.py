"""Random seeds that depend on the place in the data and the model, never on the worker."""

from __future__ import annotations

import hashlib


def seed_of(seed: int, *place: int | str) -> int:
    """The 63-bit seed for `place`, e.g. `seed_of(1337, "init", "block0.mlp.up.weight")`.

    The text `seed/part/part/...` is hashed (blake2b, 8 bytes, little endian) and the top bit dropped, so that any
    program can compute it in one line; `examples/plain_gpt.py` does.
    """
    text = "/".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
