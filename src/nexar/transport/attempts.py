"""Dialing a name that stands for several addresses: one after another, each with its fair share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from nexar.transport.base import ConnectRefused

Place = TypeVar("Place")
Made = TypeVar("Made")


class Failed(Exception):
    """This address does not do; the next one may. The text is a clause that fits behind a colon."""


def try_each(address: str, places: Sequence[Place], deadline: float, attempt: Callable[[Place, float], Made]) -> Made:
    """What the first successful `attempt(place, until)` made. One that ends with TimeoutError at `until`, or with
    Failed, leaves the rest of the time to the others; any other exception ends the dial. If none succeeds: TimeoutError
    when the time is up, else ConnectRefused, with every reason.
    """
    reasons: list[str] = []
    for number, place in enumerate(places):
        until = _share(deadline, len(places) - number)
        try:
            return attempt(place, until)
        except TimeoutError:
            reasons.append("no answer in time")
        except Failed as failure:
            reasons.append(str(failure))
    text = "; ".join(dict.fromkeys(reasons)) or "the name stands for no address"
    if time.monotonic() >= deadline:
        raise TimeoutError(f"cannot connect to {address}: {text}")
    raise ConnectRefused(address, text)


def _share(deadline: float, attempts_left: int) -> float:
    if attempts_left == 1:
        return deadline
    now = time.monotonic()
    return now + (deadline - now) / attempts_left
