"""The course of a QUIC dial: one posted operation per place, all waited for together."""

from __future__ import annotations

from typing import Final, TypeAlias

from nexar_quic import Cancelled, ConnectError, Connection, Endpoint, EndpointClosed, Operation, VerificationError

from nexar.security.credentials import Credentials, Trust
from nexar.transport.address import format_address
from nexar.transport.base import Expected, Peer
from nexar.transport.quic.endings import CloseCode, shorten
from nexar.transport.quic.identification import WrongPeer, name_for_dial, peer_of_dial, trust_for_dial
from nexar.transport.race import Failed

Place: TypeAlias = tuple[str, int]
Found: TypeAlias = tuple[Connection, Peer]

_GAVE_UP: Final = "timed out"
"""What the endpoint says of a dial that took longer than its handshake timeout."""


class QuicCourse:
    """See Course. What it raises besides Failed: EndpointClosed, ForkedError."""

    def __init__(self, endpoint: Endpoint, identity: tuple[Credentials | None, Trust], expected: Expected) -> None:
        credentials, trust = identity
        self._endpoint = endpoint
        self._expected = expected
        self._trust = trust_for_dial(trust, expected)
        self._name = name_for_dial(credentials, expected)
        self._anonymous = credentials is None or expected.anonymous
        self._dials: dict[Operation, Place] = {}

    def begin(self, place: Place) -> None:
        """See Course."""
        try:
            dial = self._endpoint.post_connect(
                place, self._name, trust=self._trust, verify=self._trust is not None, anonymous=self._anonymous
            )
        except EndpointClosed:
            raise
        except (OSError, ValueError) as error:  # ValueError: of a family that the socket does not speak
            raise Failed(str(error)) from error
        self._dials[dial] = place

    def wait(self, timeout: float) -> tuple[Place, Found | Failed] | None:
        """See Course."""
        done, _ = self._endpoint.wait(list(self._dials), max(timeout, 0.0))
        if not done:
            return None
        place = self._dials.pop(done[0])
        try:
            return place, self._judge(done[0])
        except Failed as failure:
            return place, failure
        except _GaveUp:
            return self._try_again(place)

    def show(self, place: Place) -> str:
        """See Course."""
        return format_address(*place)

    def call_off(self) -> None:
        """See Course."""
        for dial in self._dials:
            if not dial.cancel():
                _hang_up(dial)
        self._dials.clear()

    def _judge(self, dial: Operation) -> Found:
        try:
            connection: Connection = dial.result()
        except EndpointClosed:
            raise
        except VerificationError as error:
            raise Failed(str(error), verification=True) from error
        except ConnectError as error:
            if error.reason == _GAVE_UP:
                raise _GaveUp from error
            raise Failed(str(error)) from error
        except OSError as error:
            raise Failed(str(error)) from error
        try:
            return connection, peer_of_dial(connection, self._expected)
        except WrongPeer as error:
            connection.close(CloseCode.REFUSED, shorten(str(error)))
            raise Failed(str(error), verification=True) from error

    def _try_again(self, place: Place) -> tuple[Place, Failed] | None:
        """The deadline of the race alone says how long a place may be silent."""
        try:
            self.begin(place)
        except Failed as failure:
            return place, failure
        return None


class _GaveUp(Exception):
    """The endpoint has waited for this place as long as it does."""


def _hang_up(dial: Operation) -> None:
    """It was done before it could be cancelled."""
    try:
        connection: Connection = dial.result()
    except (ConnectError, Cancelled, EndpointClosed):
        return
    connection.close(CloseCode.ABORTED, "another address answered first")
