"""Dial all addresses of a peer in parallel; the first to answer wins and the others are cancelled.

The next attempt starts when one fails, or after ADDRESS_STAGGER. No failure ends the dial while another attempt may
succeed, not even a rejected certificate: an address may have been reassigned. Everything runs in the dialing thread.
Names come last, because resolving blocks.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from typing import Final, Generic, Protocol, TypeVar

from nexar.transport.address import format_address, parse_addresses
from nexar.transport.base import ConnectRefused

ADDRESS_STAGGER: Final = 0.05  # seconds; longer than a handshake in a data centre, too short to matter

DialTarget = TypeVar("DialTarget")
Made = TypeVar("Made")
Made_co = TypeVar("Made_co", covariant=True)


class TargetFailed(Exception):
    """One address failed; another may work. `reason` fits after a colon. `verification`: the reason is the certificate
    or its absence.
    """

    def __init__(self, reason: str, *, verification: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.verification = verification


class DialMethod(Protocol[DialTarget, Made_co]):
    """How a transport starts attempts and waits for them."""

    def begin(self, target: DialTarget) -> None:
        """Raises TargetFailed if it cannot start."""

    def wait(self, timeout: float) -> tuple[DialTarget, Made_co | TargetFailed] | None:
        """Return one ended attempt, None at the timeout or spuriously. Any exception ends the dial."""
        ...

    def describe(self, target: DialTarget) -> str: ...

    def cancel_all(self) -> None:
        """Cancel every attempt that `wait` has not returned."""


def dial_in_parallel(
    address: str,
    deadline: float,
    resolve: Callable[[str], list[DialTarget]],
    method: DialMethod[DialTarget, Made],
    advice: str = "",
) -> tuple[DialTarget, Made]:
    """Return the first target that answered and the result of its attempt.

    `address` may list several, separated by commas; `resolve` returns the targets of one (OSError if none). Raises
    ConnectRefused with all reasons, and with `advice` if a certificate was rejected. Raises TimeoutError at the
    deadline if none was rejected.
    """
    targets = _targets(address, resolve)
    dial = _ParallelDial(address, deadline, targets, method, advice)
    try:
        return dial.run()
    finally:
        method.cancel_all()


class _ParallelDial(Generic[DialTarget, Made]):
    def __init__(
        self,
        address: str,
        deadline: float,
        targets: Iterator[DialTarget | TargetFailed],
        method: DialMethod[DialTarget, Made],
        advice: str,
    ) -> None:
        self._address = address
        self._advice = advice
        self._deadline = deadline
        self._method = method
        self._targets_left = targets
        self._more = True  # targets may be left
        self._next = time.monotonic()  # latest start of the next attempt
        self._running: dict[DialTarget, None] = {}
        self._failures: list[tuple[str, TargetFailed]] = []  # (target, empty if the reason names it; reason)

    def run(self) -> tuple[DialTarget, Made]:
        while True:
            now = time.monotonic()
            if self._more and (now >= self._next or not self._running):
                self._begin_next(now)
            elif not self._running or now >= self._deadline:
                raise self._failure(now)
            elif (ended := self._method.wait(self._until_next(now) - now)) is not None:
                target, outcome = ended
                if not isinstance(outcome, TargetFailed):
                    return target, outcome
                del self._running[target]
                self._failed(self._method.describe(target), outcome)

    def _until_next(self, now: float) -> float:
        return min(self._next, self._deadline) if self._more else self._deadline

    def _begin_next(self, now: float) -> None:
        target = next(self._targets_left, None)
        if target is None:
            self._more = False
        elif isinstance(target, TargetFailed):
            self._failed("", target)
        else:
            self._begin(target, now)

    def _begin(self, target: DialTarget, now: float) -> None:
        try:
            self._method.begin(target)
        except TargetFailed as failure:
            return self._failed(self._method.describe(target), failure)
        self._running[target] = None
        self._next = now + ADDRESS_STAGGER
        return None

    def _failed(self, target: str, failure: TargetFailed) -> None:
        self._failures.append((target, failure))
        self._next = 0.0  # start the next attempt at once

    def _failure(self, now: float) -> ConnectRefused | TimeoutError:
        silent = [(self._method.describe(target), TargetFailed("no answer in time")) for target in self._running]
        reasons = self._failures + silent
        text = _list(reasons) or "the name has no address"
        verification = any(failure.verification for _, failure in reasons)
        if now >= self._deadline and not verification:
            return TimeoutError(f"cannot connect to {self._address}: {text}")
        advice = f" ({self._advice})" if verification and self._advice else ""
        return ConnectRefused(self._address, text + advice, verification=verification)


def _list(reasons: list[tuple[str, TargetFailed]]) -> str:
    if len(reasons) == 1:  # the message already names the address
        return reasons[0][1].reason
    return "; ".join(f"{target}: {failure.reason}" if target else failure.reason for target, failure in reasons)


def _targets(address: str, resolve: Callable[[str], list[DialTarget]]) -> Iterator[DialTarget | TargetFailed]:
    """Yield each target once, numeric addresses first."""
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
        yield from (target for target in dict.fromkeys(found) if target not in seen)
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
