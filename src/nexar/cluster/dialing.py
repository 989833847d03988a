"""Dials a node on several transports with staggered starts; the first connection wins.

Firewalls may drop UDP silently, so the next scheme starts when the previous one has failed or is late. Transports race
the addresses of a scheme.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from nexar.cluster.control_loop import CancelToken, DialCancelled
from nexar.cluster.task_pool import Priority, TaskPool
from nexar.transport.base import Carrier, ConnectRefused, Expected, Transport

SCHEME_STAGGER: Final = 1.0
"""Seconds before the second scheme starts: several of the longest round trips, or a busy machine."""


MAX_DIAL_THREADS: Final = 8
_RESERVED_THREADS: Final = 2  # of them for name lookups and redials of probes, and for control messages


class Dialer:
    """Dials, and runs tasks that dial. Close it after the transports, whose end ends the dials.

    Attempts have their own threads, outside the pool: the dialing task holds a pool thread while it waits for them.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        cancel_token: CancelToken,
        stagger: float = SCHEME_STAGGER,
        *,
        own_delay: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._own_delay = own_delay
        self._transports = transports
        self._cancel_token = cancel_token
        self._stagger = stagger
        self._lock = threading.Lock()
        # Attempts; guarded by the lock. Each thread removes itself when it ends.
        self._threads: set[threading.Thread] = set()
        self._pool = TaskPool("nexar-dial", MAX_DIAL_THREADS, reserved=_RESERVED_THREADS)

    def dial(
        self,
        addresses: Mapping[str, Sequence[str]],
        expected: Expected,
        deadline: float,
        cancel_token: CancelToken | None = None,
        failed: Callable[[str], None] | None = None,
    ) -> Carrier:
        """Returns a carrier of the first scheme that connects; `addresses` is in order of preference. Blocks; any
        thread.

        Raises ConnectRefused with all reasons, TimeoutError at the deadline (time.monotonic), DialCancelled. Another
        thread calls `failed` with each scheme's reason; it must not block.
        """
        schemes = [scheme for scheme in addresses if addresses[scheme] and scheme in self._transports]
        if not schemes:
            offered, ours = ", ".join(addresses) or "none", ", ".join(self._transports) or "none"
            raise ConnectRefused("the peer", f"no transport in common: it offers {offered}, this node has {ours}")
        race = _SchemeRace(failed)
        try:
            with (
                self._cancel_token.waking(race.cancel),
                (cancel_token or self._cancel_token).waking(race.cancel),
            ):
                for scheme in schemes:
                    self._start(race, scheme, ",".join(addresses[scheme]), expected, deadline)
                    is_last = scheme == schemes[-1]
                    pause = self._stagger + self._own_delay()
                    if race.is_settled(deadline if is_last else min(deadline, time.monotonic() + pause)):
                        break
            return race.result(deadline)
        except BaseException:
            race.give_up()
            raise

    def _start(self, race: _SchemeRace, scheme: str, address: str, expected: Expected, deadline: float) -> None:
        thread = threading.Thread(
            target=self._attempt, args=(race, scheme, address, expected, deadline), name="nexar-connect", daemon=True
        )
        race.enter(scheme)
        # In one step: `close` joins registered threads, and a thread removes itself only after it was added.
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def _attempt(self, race: _SchemeRace, scheme: str, address: str, expected: Expected, deadline: float) -> None:
        try:
            race.succeeded(self._transports[scheme].connect(address, expected, deadline))
        except Exception as error:  # noqa: BLE001 - the dialing thread raises it
            race.failed(scheme, error)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def run_in_thread(self, task: Callable[[], None], priority: Priority = Priority.BACKGROUND) -> None:
        """As `TaskPool.submit`. Long tasks that do not dial belong in `Node.background`."""
        self._pool.submit(task, priority)

    def try_in_thread(self, task: Callable[[], None], otherwise: str) -> bool:
        """As `TaskPool.try_submit`."""
        return self._pool.try_submit(task, otherwise)

    def close(self) -> None:
        self._pool.close()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()


class _SchemeRace:
    def __init__(self, on_failure: Callable[[str], None] | None) -> None:
        self._on_failure = on_failure
        self._condition = threading.Condition()  # guards everything below
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
            carrier.abort("another transport connected first")

    def failed(self, scheme: str, error: Exception) -> None:
        if self._on_failure is not None:
            self._on_failure(_clause(scheme, error))
        with self._condition:
            self._failures[scheme] = error
            self._condition.notify_all()

    def cancel(self) -> None:
        with self._condition:
            self._cancelled = True
            self._condition.notify_all()

    def is_settled(self, until: float) -> bool:
        """Wait until an attempt won, all failed, or `until`. False if the dial continues."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._settled() or len(self._failures) == len(self._entered), until - time.monotonic()
            )
            return self._settled()

    def _settled(self) -> bool:
        return self._winner is not None or self._cancelled

    def result(self, deadline: float) -> Carrier:
        """Later successes are aborted."""
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
        """Abort a winner that `result` has not returned. Idempotent."""
        with self._condition:
            self._over = True
            winner, self._winner = self._winner, None
        if winner is not None:
            winner.abort("this connection is no longer needed")


def _explain(failures: Mapping[str, Exception], *, late: bool) -> Exception:
    """The first error that is not an OSError, else one with all reasons."""
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
