"""Inbound connections: who knocked, who was let in, who was refused and why. All in the driving thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nexar_quic import Connection, Endpoint, Operation, QuicError

from nexar.transport.address import format_address
from nexar.transport.base import Acceptor, CarrierLost, Peer
from nexar.transport.quic.carrier import QuicCarrier
from nexar.transport.quic.driver import Driver
from nexar.transport.quic.endings import CloseCode, shorten
from nexar.transport.quic.identification import WrongPeer

REFUSALS_INTERVAL: Final = 0.5
"""Seconds between two looks at the refused handshakes: a flood of strangers costs two calls a second."""


class Listener:
    """Accepts for one acceptor."""

    def __init__(
        self,
        endpoint: Endpoint,
        driver: Driver,
        acceptor: Acceptor,
        identify: Callable[[Connection], Peer],
        welcome: Callable[[Connection, Peer], QuicCarrier],
    ) -> None:
        self._endpoint = endpoint
        self._driver = driver
        self._acceptor = acceptor
        self._identify = identify
        self._welcome = welcome
        self.next_look = 0.0  # when to ask for refusals again

    def start(self) -> None:
        """Wait for the next one."""
        self._endpoint.post_accept(self._driver.completions, token=self.accepted)

    def accepted(self, operation: Operation) -> None:
        """A handshake has succeeded."""
        try:
            connection = operation.result()
            self.start()
        except QuicError:
            return  # the endpoint is closed
        self._let_in(connection)

    def look_for_refusals(self, now: float) -> None:
        """Tell the acceptor of handshakes that failed, now and then."""
        if now < self.next_look:
            return
        self.next_look = now + REFUSALS_INTERVAL
        for address, reason in self._endpoint.refusals():
            self._acceptor.candidate_refused(format_address(*address), reason)

    def interrupted(self, error: BaseException) -> None:
        """See Handler. The next accept is posted already; the connection in hand was closed."""

    def _let_in(self, connection: Connection) -> None:
        try:
            peer = self._identify(connection)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            self._acceptor.candidate_refused(format_address(*connection.remote_address), str(error))
            return
        carrier = self._welcome(connection, peer)
        try:
            self._acceptor.carrier_accepted(carrier)
        except BaseException as error:
            carrier.fail(CarrierLost("fault", f"the acceptor raised {error!r}"))
            raise
