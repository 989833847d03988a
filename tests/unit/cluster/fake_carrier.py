"""A carrier that remembers what was done with it, and gives its sink what a test wants said."""

from typing import cast

from nexar.transport.base import Buffer, Carrier, CarrierLost, Peer, Sink
from nexar.wire.frame import Frame, FrameKind, Lane
from nexar.wire.join import MAX_JOIN_BYTES, JoinMessage, decode_join, encode_join


class FakeCarrier:
    scheme = "fake"
    dialed = False

    def __init__(self, address: str = "10.0.0.1:7", *, verified: bool = False) -> None:
        self.peer = Peer(0, None, verified, address)
        self.sink: Sink | None = None
        self.sent: list[JoinMessage] = []
        self.admitted = False
        self.finished = False
        self.aborted: str | None = None
        self.queued = 0
        """Bytes that the other side has not taken."""
        self.lost = False
        """Verbs raise from now on."""

    def attach(self, sink: Sink) -> None:
        self.sink = sink

    def admit(self) -> None:
        self.admitted = True

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        assert not self.finished
        self._check()
        self.sent.append(decode_join(b"".join(body), MAX_JOIN_BYTES))

    def queued_bytes(self, lane: Lane) -> int:
        self._check()
        return self.queued

    def finish(self) -> None:
        self._check()
        self.finished = True

    def abort(self, reason: str) -> None:
        self.aborted = reason

    def _check(self) -> None:
        if self.lost:
            raise CarrierLost("peer", "it is gone")

    # -- the other side

    def say(self, body: bytes, kind: int = FrameKind.CONTROL) -> None:
        assert self.sink is not None
        self.sink.frame_arrived(as_carrier(self), Frame(kind=kind, body=len(body)), memoryview(body))

    def say_message(self, message: JoinMessage) -> None:
        self.say(encode_join(message))

    def half_close(self) -> None:
        assert self.sink is not None
        self.sink.carrier_finished(as_carrier(self))

    def lose(self, kind: str = "peer") -> None:
        assert self.sink is not None
        self.lost = True
        self.sink.carrier_lost(as_carrier(self), CarrierLost(kind, "it is gone"))


def as_carrier(fake: FakeCarrier) -> Carrier:
    return cast(Carrier, fake)
