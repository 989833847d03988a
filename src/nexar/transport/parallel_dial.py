"""Dialing a peer at all its places side by side: the first that answers wins, the others are called off.

Law: attempts begin in the given order, the next one as soon as an earlier one has failed, else after STAGGER. So an
address that works is hardly ever raced, one that does not costs a moment, and one that is silent costs its successor
no more than that. No failure ends the race while another place may still answer, not even a certificate that is not
believed: at an address that was given to somebody else anybody may live. But if nobody wins, that is what is told.

Everything happens in the thread that dials. Names are looked up when it is their turn, behind all numeric addresses,
because a lookup blocks, and the attempts under way wait for it.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from nexar.transport.address import format_address, parse_addresses
from nexar.transport.base import ConnectRefused

STAGGER: Final = 0.05
"""Seconds. More than a handshake takes in a data centre, less than anybody minds waiting."""

DialTarget = TypeVar("DialTarget")
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class TargetFailed(Exception):
    """This place does not do; another one may. The text is a clause that fits behind a colon."""

    def __init__(self, reason: str, *, verification: bool = False) -> None:
        """`verification`: because of what a certificate says, or says not."""
        super().__init__(reason)
        self.reason = reason
        self.verification = verification


class DialMethod(Protocol[DialTarget, Made_co]):
    """What a race is run on: a transport's way to begin attempts and to wait for them."""

    def begin(self, place: DialTarget) -> None:
        """Set out for `place`. Failed if that cannot even begin."""

    def wait(self, timeout: float) -> tuple[DialTarget, Made_co | TargetFailed] | None:
        """One attempt that has ended; None if the time is up, or for no reason. What else it raises ends the race."""
        ...

    def show(self, place: DialTarget) -> str:
        """The place as text."""
        ...

    def call_off(self) -> None:
        """Give up every attempt that has not been handed out by `wait`."""


def dial_in_parallel(
    address: str,
    deadline: float,
    resolve: Callable[[str], list[DialTarget]],
    method: DialMethod[DialTarget, Made],
    advice: str = "",
) -> tuple[DialTarget, Made]:
    """Where somebody answered, and what that attempt made. `address`: one, or several separated by commas; `resolve`
    gives the places behind one of them (OSError if there are none).

    If nobody does: ConnectRefused with every reason, and with `advice` if a certificate was refused; TimeoutError when
    the time is up and none was.
    """
    places = _targets(address, resolve)
    runners = _ParallelDial(address, deadline, places, method, advice)
    try:
        return runners.run()
    finally:
        method.call_off()


class _ParallelDial(Generic[DialTarget, Made]):
    def __init__(
        self,
        address: str,
        deadline: float,
        places: Iterator[DialTarget | TargetFailed],
        method: DialMethod[DialTarget, Made],
        advice: str,
    ) -> None:
        self._address = address
        self._advice = advice
        self._deadline = deadline
        self._method = method
        self._places = places
        self._more = True  # places may be left
        self._next = time.monotonic()  # when the next one may begin at the latest
        self._running: dict[DialTarget, None] = {}
        self._failures: list[tuple[str, TargetFailed]] = []  # (place, or empty if the text names it; why)

    def run(self) -> tuple[DialTarget, Made]:
        while True:
            now = time.monotonic()
            if self._more and (now >= self._next or not self._running):
                self._begin_next(now)
            elif not self._running or now >= self._deadline:
                raise self._verdict(now)
            elif (ended := self._method.wait(self._until_next(now) - now)) is not None:
                place, outcome = ended
                if not isinstance(outcome, TargetFailed):
                    return place, outcome
                del self._running[place]
                self._failed(self._method.show(place), outcome)

    def _until_next(self, now: float) -> float:
        return min(self._next, self._deadline) if self._more else self._deadline

    def _begin_next(self, now: float) -> None:
        place = next(self._places, None)
        if place is None:
            self._more = False
        elif isinstance(place, TargetFailed):
            self._failed("", place)
        else:
            self._begin(place, now)

    def _begin(self, place: DialTarget, now: float) -> None:
        try:
            self._method.begin(place)
        except TargetFailed as failure:
            return self._failed(self._method.show(place), failure)
        self._running[place] = None
        self._next = now + STAGGER
        return None

    def _failed(self, place: str, failure: TargetFailed) -> None:
        self._failures.append((place, failure))
        self._next = 0.0  # whoever waits for its turn has it now

    def _verdict(self, now: float) -> ConnectRefused | TimeoutError:
        silent = [(self._method.show(place), TargetFailed("no answer in time")) for place in self._running]
        reasons = self._failures + silent
        text = _list(reasons) or "the name stands for no address"
        verification = any(failure.verification for _, failure in reasons)
        if now >= self._deadline and not verification:
            return TimeoutError(f"cannot connect to {self._address}: {text}")
        advice = f" ({self._advice})" if verification and self._advice else ""
        return ConnectRefused(self._address, text + advice, verification=verification)


def _list(reasons: list[tuple[str, TargetFailed]]) -> str:
    if len(reasons) == 1:  # the message names the address already
        return reasons[0][1].reason
    return "; ".join(f"{place}: {failure.reason}" if place else failure.reason for place, failure in reasons)


def _targets(address: str, resolve: Callable[[str], list[DialTarget]]) -> Iterator[DialTarget | TargetFailed]:
    """Each place once, numbers before names."""
    texts = [format_address(*part) for part in sorted(parse_addresses(address), key=lambda part: _is_name(part[0]))]
    return _resolved(texts, resolve)


def _resolved(texts: list[str], resolve: Callable[[str], list[DialTarget]]) -> Iterator[DialTarget | TargetFailed]:
    seen: set[DialTarget] = set()
    for text in texts:
        try:
            found = resolve(text)
        except OSError as error:
            reason = _why_unresolved(text, error)
            yield TargetFailed(reason if len(texts) == 1 else f"{text}: {reason}")
            continue
        yield from (place for place in dict.fromkeys(found) if place not in seen)
        seen.update(found)


def _why_unresolved(text: str, error: OSError) -> str:
    reason = error.strerror or str(error)
    if not isinstance(error, socket.gaierror):
        return reason
    return f"the host name {parse_addresses(text)[0][0]!r} cannot be resolved ({reason})"


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return bool(host)
    return False
