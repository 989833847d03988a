"""The seed's vote in a world of threads: the same machine, without a line in between.

A world of one process cannot be cut in two, so whoever is left may always go on; with the witness it does so by the
same rules as everywhere else.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from nexar.cluster.decisions.succession_events import Action, Event, Heard, Probe, Probed, Say, Word
from nexar.cluster.decisions.witness import Witness
from nexar.cluster.errands import Errands
from nexar.cluster.membership import Attendant, Membership
from nexar.security.invitation import FINGERPRINT_BYTES
from nexar.types import MAX_NODE, NodeId
from nexar.wire.messages import Message


def local_seed() -> Attendant:
    """As the membership names it."""
    return Attendant(secrets.randbelow(MAX_NODE) + 1, bytes(FINGERPRINT_BYTES))


class LocalWitness:
    """Of one world. Any thread."""

    def __init__(self, membership: Membership) -> None:
        self._lock = threading.Lock()
        self._machine = Witness(membership)  # under the lock
        self._hearers: dict[NodeId, Callable[[Message], None]] = {}  # those that are here; dict methods are atomic
        self._errands = Errands(self._do)  # filled under the lock

    def introduce(self, node: NodeId, hear: Callable[[Message], None]) -> Callable[[Message], bool]:
        """`hear` gets what it says to this node. Returns what tells it something."""
        self._hearers[node] = hear

        def tell(message: Message) -> bool:
            if isinstance(message, Word):
                self._put(Heard(node, message))
            return True

        return tell

    def forget(self, node: NodeId) -> None:
        """It has left: whoever asks is told so."""
        self._hearers.pop(node, None)

    def _put(self, event: Event) -> None:
        with self._lock:
            self._errands.add(self._machine.step(event, time.monotonic()))
        self._errands.run()

    def _do(self, action: Action) -> None:
        if isinstance(action, Say):
            hear = self._hearers.get(action.node)
            if hear is not None:
                hear(action.word)
        elif isinstance(action, Probe):
            self._put(Probed(action.node, None if action.node in self._hearers else "it has left"))
