"""Integers that a dict of CPython takes quadratic time for, although their hashes differ."""

import numpy as np

_SHIFT = 5  # by which CPython shifts a hash before each further place that it looks at
_CANDIDATES = 1 << 20


def colliding_keys(bits: int) -> list[int]:
    """Two thirds of 2**bits keys. The first half takes consecutive places of the sequence i -> 5 i + 1, one each. Each
    of the others meets taken places only, until nothing is left of its hash; then it walks along that sequence, up to
    its end.
    """
    mask = (1 << bits) - 1
    count = (1 << bits) // 3 - 8
    sequence = [1]
    for _ in range(count - 1):
        sequence.append((5 * sequence[-1] + 1) & mask)
    taken = np.zeros(mask + 1, bool)
    taken[sequence] = True
    random = np.random.default_rng(1)
    walkers: set[int] = set()
    while len(walkers) < count:
        walkers.update(_walkers(random.integers(mask + 1, 1 << 32, _CANDIDATES), taken, mask))
    return [*sequence, *sorted(walkers)[:count]]


def _walkers(hashes: np.ndarray, taken: np.ndarray, mask: int) -> list[int]:
    place, rest = hashes & mask, hashes
    while rest.any():
        kept = taken[place]
        hashes, place, rest = hashes[kept], place[kept], rest[kept] >> _SHIFT
        place = (5 * place + rest + 1) & mask
    return [int(each) for each in hashes[taken[place]]]
