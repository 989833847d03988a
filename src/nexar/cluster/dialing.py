"""Dialing a node on several transports side by side: the preferred one first, the next when that takes its time.

Which transport gets through is not known beforehand (a firewall drops UDP without a word), and waiting for one to give
up before trying the next would make every first contact slow. So the next scheme starts when the one before it has
failed, or has not come through within a while; the first that succeeds wins, and whatever the others still bring is
thrown away. Addresses of one scheme are raced by its transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nexar.cluster.control_threads import CancelToken, DialCancelled
from nexar.transport.base import Carrier, ConnectRefused, Expected, Transport

STAGGER: Final = 1.0
"""Seconds that the preferred transport has for itself: several round trips around the earth, or a busy machine."""


class Dialer:
    """Dials for one node. Its threads are its own: `close` it after the transports, which ends their dials."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        cancel_token: CancelToken,
        stagger: float = STAGGER,
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`own_delay`: seconds by which the preferred transport has more time, because this process runs slowly."""
        self._own_delay = own_delay
        self._transports = transports
        self._cancel_token = cancel_token
        self._stagger = stagger
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()  # under the lock; each takes itself out when it ends

    def dial(
        self,
        addresses: Mapping[str, Sequence[str]],
        expected: Expected,
        deadline: float,
        cancel_token: CancelToken | None = None,
        failed: Callable[[str], None] | None = None,
    ) -> Carrier:
        """A carrier of the first scheme that gets through; those that come first in `addresses` are preferred. `failed`
        is told why one of them did not, while others may still get through; by another thread, and must not block.
        ConnectRefused with every reason, TimeoutError at the deadline (time.monotonic), Recalled when the node
        closes, or when `recall`, that of this dial, is made. May run in several threads at once.
        """
        schemes = [scheme for scheme in addresses if addresses[scheme] and scheme in self._transports]
        if not schemes:
            offered, ours = ", ".join(addresses) or "none", ", ".join(self._transports) or "none"
            raise ConnectRefused("the peer", f"no transport in common: it offers {offered}, this node has {ours}")
        race = _SchemeRace(failed)
        try:
            with (
                self._cancel_token.waking(race.cancel_token),
                (cancel_token or self._cancel_token).waking(race.cancel_token),
            ):
                for scheme in schemes:
                    self._start(race, scheme, ",".join(addresses[scheme]), expected, deadline)
                    is_last = scheme == schemes[-1]
                    patience = self._stagger + self._own_delay()
                    if race.is_settled(deadline if is_last else min(deadline, time.monotonic() + patience)):
                        break
            return race.result(deadline)
        except BaseException:
            race.give_up()
            raise

    def _start(self, race: _SchemeRace, scheme: str, address: str, expected: Expected, deadline: float) -> None:
        thread = threading.Thread(
            target=self._attempt, args=(race, scheme, address, expected, deadline), name="nexar-dial", daemon=True
        )
        race.enter(scheme)
        self._run(thread)

    def _attempt(self, race: _SchemeRace, scheme: str, address: str, expected: Expected, deadline: float) -> None:
        try:
            race.succeeded(self._transports[scheme].connect(address, expected, deadline))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the thread that dials
            race.failed(scheme, error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def run_in_thread(self, task: Callable[[], None]) -> None:
        """Run it in a thread of its own, for nobody who waits. It must end when the node closes, and raise nothing."""

        def run() -> None:
            try:
                task()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="nexar-dial-aside", daemon=True)
        self._run(thread)

    def _run(self, thread: threading.Thread) -> None:
        """Start it, in one step with knowing it: who closes can join only what was started. It cannot take itself out
        before it is in.
        """
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def close(self) -> None:
        """Wait for the threads. The transports are closed by now, so every dial has ended or is about to."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()


class _SchemeRace:
    """What several attempts at one peer have come to."""

    def __init__(self, on_failure: Callable[[str], None] | None) -> None:
        self._on_failure = on_failure
        self._condition = threading.Condition()  # over everything below
        self._entered: list[str] = []
        self._failures: dict[str, Exception] = {}
        self._winner: Carrier | None = None
        self._cancelled = False
        self._over = False

    def enter(self, scheme: str) -> None:
        with self._condition:
            self._entered.append(scheme)

    def succeeded(self, carrier: Carrier) -> None:
        with self._condition:
            late = self._over or self._winner is not None
            if not late:
                self._winner = carrier
                self._condition.notify_all()
        if late:
            carrier.abort("another way was quicker")

    def failed(self, scheme: str, error: Exception) -> None:
        if self._on_failure is not None:
            self._on_failure(_clause(scheme, error))
        with self._condition:
            self._failures[scheme] = error
            self._condition.notify_all()

    def cancel_token(self) -> None:
        """Whoever waits for the result waits no longer."""
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def is_settled(self, until: float) -> bool:
        """Wait until somebody won (True), all that started have failed, or the time is up; or nobody asks any more."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._settled() or len(self._failures) == len(self._entered), until - time.monotonic()
            )
            return self._settled()

    def _settled(self) -> bool:
        return self._winner is not None or self._cancelled

    def result(self, deadline: float) -> Carrier:
        """The winner, or the reasons why there is none. From now on nobody can win any more."""
        with self._condition:
            self._over = True
            winner, self._winner = self._winner, None
            missing = {scheme: TimeoutError("no answer in time") for scheme in self._entered}
            failures = {**missing, **self._failures}
        if winner is not None:
            return winner
        if self._cancelled:
            raise DialCancelled
        raise _explain(failures, late=time.monotonic() >= deadline)

    def give_up(self) -> None:
        """Nobody wants a result any more. Idempotent, and without effect on one that was given."""
        with self._condition:
            self._over = True
            winner, self._winner = self._winner, None
        if winner is not None:
            winner.abort("nobody waits for this connection any more")


def _explain(failures: Mapping[str, Exception], *, late: bool) -> Exception:
    """One error for all: what is not the network's fault as it is, else the reasons side by side."""
    for error in failures.values():
        if not isinstance(error, OSError):
            return error
    refused = {scheme: error for scheme, error in failures.items() if isinstance(error, ConnectRefused)}
    text = "; ".join(_clause(scheme, error) for scheme, error in failures.items())
    if late and not refused:
        return TimeoutError(text)
    address = ", ".join(dict.fromkeys(error.address for error in refused.values())) or "the peer"
    return ConnectRefused(address, text, verification=any(error.verification for error in refused.values()))


def _clause(scheme: str, error: Exception) -> str:
    return f"{scheme}: {getattr(error, 'reason', None) or error}"
