"""Two processes that take turns, each asleep while it is the other's turn. Nothing but the doorbell wakes them."""

import random
import time

from tests.conformance.harness import Side

MESSAGES = 20_000
OVERSLEPT = 10.0
"""Seconds. The timed re-check is left out, so who misses a wake-up sleeps this long."""


def alternate(side: Side, *, seed: int, begins: bool) -> None:
    """MESSAGES frames altogether, in turns. AssertionError if a wake-up was lost."""
    generator = random.Random(seed)
    if begins:
        side.send()
    for turn in range(1, MESSAGES // 2 + 1):
        _wait_for(side, turn, generator)
        _pause(generator)
        if not begins or turn < MESSAGES // 2:
            side.send()


def _wait_for(side: Side, count: int, generator: random.Random) -> None:
    while len(side.received.frames) < count:
        assert not side.received.lost, side.received.lost
        if not side.node.poll() and side.node.transport.prepare_sleep():
            _pause(generator)
            begin = time.monotonic()
            side.node.sleeper.sleep(OVERSLEPT, 0.0)
            assert time.monotonic() - begin < OVERSLEPT, f"no wake-up for message {count}"


def _pause(generator: random.Random) -> None:
    """Move the moments of falling asleep and of sending against each other: mostly not at all, at times by 100 µs."""
    end = time.perf_counter() + generator.choice((0, 0, 0, 0, 0, 1e-6, 3e-6, 10e-6, 30e-6, 100e-6)) * generator.random()
    while time.perf_counter() < end:
        continue
