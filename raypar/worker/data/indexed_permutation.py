"""A permutation of [0, N) whose entries are computed one by one from their index: no list of N numbers is made (rule 1)."""

from __future__ import annotations

import math

import numpy
from numpy.typing import NDArray

ROUNDS = 8
"""Rounds of the network. Four make it indistinguishable from random for few queries (Luby and Rackoff 1988), and more for the
small domains of small data sets."""

Words = NDArray[numpy.uint64]
"""Unsigned 64-bit integers, with arithmetic modulo 2**64."""


def permuted(indices: NDArray[numpy.integer], size: int, key: int) -> NDArray[numpy.int64]:
    """Entries of the permutation of [0, size) under `key`: `indices` [n] in [0, size) -> [n], int64, in O(n) time and memory.

    It is the generalised Feistel cipher of Black and Rogaway ("Ciphers with arbitrary finite domains", CT-RSA 2002, section 5):
    with a = ceil(sqrt(size)), x stands for (left, right) = divmod(x, a); even rounds add a hash of `right` to `left`, odd ones
    a hash of `left` to `right`, modulo a. What lies in [size, a**2), fewer than 2 sqrt(size) + 1 numbers, is permuted again
    until it is below `size` (cycle walking), so that the whole is a permutation of [0, size). Shuffles of this kind are
    `tf.random_index_shuffle` and those of Mitchell et al. ("Bandwidth-optimal random shuffling for GPUs", 2021).
    """
    side = math.isqrt(max(size - 1, 0)) + 1
    keys = [numpy.uint64(each) for each in _round_keys(key)]
    found = numpy.asarray(indices, dtype=numpy.uint64).copy()
    walking = numpy.arange(len(found))
    while len(walking):
        found[walking] = now = _encrypted(found[walking], numpy.uint64(side), keys)
        walking = walking[now >= numpy.uint64(size)]
    return found.astype(numpy.int64)


def _encrypted(values: Words, side: numpy.uint64, keys: list[numpy.uint64]) -> Words:
    """One pass of the network over [0, side**2)."""
    left, right = numpy.divmod(values, side)
    for number, key in enumerate(keys):
        if number % 2:
            right = (right + _mixed(left + key) % side) % side
        else:
            left = (left + _mixed(right + key) % side) % side
    return left * side + right


def _mixed(values: Words) -> Words:
    """The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    values = (values ^ (values >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> numpy.uint64(31))
    return mixed


def _round_keys(key: int) -> list[int]:
    """The keys of the rounds: the first outputs of SplitMix64 from the state `key`."""
    states = numpy.array([(key + (number + 1) * 0x9E3779B97F4A7C15) % 2**64 for number in range(ROUNDS)], dtype=numpy.uint64)
    return [int(each) for each in _mixed(states)]
