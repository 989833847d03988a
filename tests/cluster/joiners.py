"""Nodes that dial a seed: made of a transport and join messages, so that they can also misbehave."""

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from nexar.cluster.membership import Membership, decode_membership
from nexar.cluster.seed import SeedService
from nexar.links.progress import Progress
from nexar.security.authority import make_key
from nexar.security.certificates import Trust, make_request
from nexar.security.invitation import Invitation, parse_ticket
from nexar.security.proof import Role, make_nonce, prove, proves
from nexar.transport.base import Carrier, CarrierLost, Expected, Sleeper, Transport
from nexar.transport.registry import load
from nexar.transport.sleeper import PollSleeper
from nexar.types import UNKNOWN_NODE
from nexar.wire.frame import Frame, FrameKind, Lane, encode
from nexar.wire.hello import PROTOCOL_VERSION, Hello, encode_hello
from nexar.wire.join import (
    MAX_JOIN_BYTES,
    Challenge,
    Committed,
    JoinMessage,
    JoinRequest,
    Ready,
    ReserveRanks,
    Welcome,
    decode_join,
    encode_join,
)

EVENT_TIMEOUT = 60.0
"""Seconds until a test that waits for an event gives up. Long, because the machine may be busy."""
END = "the end"
Said = TypeVar("Said")


class Line:
    """A join line as a joiner holds it, which may say what it likes."""

    def __init__(self, carrier: Carrier, invitation: Invitation, node: int) -> None:
        self.carrier = carrier
        self.invitation = invitation
        self.node = node
        self.key = make_key()
        self.nonce = make_nonce()
        self.received: queue.SimpleQueue[bytes | str] = queue.SimpleQueue()
        carrier.attach(self)

    # -- saying

    def say(self, body: bytes, kind: int = FrameKind.CONTROL, lane: Lane = Lane.CONTROL) -> None:
        self.carrier.send_frame(lane, 0, encode(Frame(kind=kind, lane=lane, body=len(body))), body)

    def send(self, message: JoinMessage) -> None:
        self.say(encode_join(message))

    def hello(self, role: Role = "candidate", version: int = PROTOCOL_VERSION) -> None:
        self.say(encode_hello(Hello(self.node, cast(Any, role), frozenset({"test"}), self.nonce), version))

    def greet(self, role: Role = "candidate") -> Challenge:
        """Say hello, and believe the answer."""
        self.hello(role)
        challenge = self.receive(Challenge)
        secret, certificate = self.invitation.secret, self.carrier.peer.certificate
        assert certificate is not None
        assert proves(challenge.proof, secret, "seed", self.nonce, challenge.nonce, certificate)
        self.carrier.admit()
        return challenge

    def prove(self, challenge: Challenge, role: Role = "candidate") -> bytes:
        certificate = self.carrier.peer.certificate
        assert certificate is not None
        return prove(self.invitation.secret, role, self.nonce, challenge.nonce, certificate)

    def application(self, proof: bytes, host: str = "here", **more: Any) -> JoinRequest:
        return JoinRequest(proof, make_request(self.node, self.key), host, {"tls": ("10.0.0.1:1",)}, **more)

    def apply(self, **more: Any) -> None:
        self.send(self.application(self.prove(self.greet()), **more))

    def join(self, **more: Any) -> Welcome:
        self.apply(**more)
        welcome = self.receive(Welcome)
        self.send(Ready())
        return welcome

    def reserve(self, count: int, first_rank: int | None = None) -> Welcome:
        proof = self.prove(self.greet("launcher"), "launcher")
        self.send(ReserveRanks(proof, make_request(self.node, self.key), "here", count, first_rank))
        return self.receive(Welcome)

    # -- hearing

    def receive(self, kind: type[Said]) -> Said:
        body = self.received.get(timeout=EVENT_TIMEOUT)
        assert isinstance(body, bytes), body
        message = decode_join(body, MAX_JOIN_BYTES)
        assert isinstance(message, kind), message
        return message

    def receive_membership(self) -> Membership:
        return decode_membership(self.receive(Committed).membership)

    def receive_end(self) -> None:
        """The next thing is that the line is over."""
        assert self.received.get(timeout=EVENT_TIMEOUT) == END

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        self.received.put(bytes(body))

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        raise AssertionError("a payload on a join line")

    def carrier_finished(self, carrier: Carrier) -> None:
        self.received.put(END)
        carrier.finish()

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.received.put(END)


class JoinDialer:
    """Dials seeds over one transport; its lines are driven by a thread."""

    def __init__(self, scheme: str) -> None:
        self._poll_sleeper = None if scheme == "quic" else PollSleeper()
        if self._poll_sleeper is None:
            self.transport: Transport = load("quic")(None, Trust(b""), bind="127.0.0.1:0")
        else:
            self.transport = load(scheme)(self._poll_sleeper, None, Trust(b""))
        sleeper = self._poll_sleeper or cast(Sleeper, self.transport)
        self._progress = Progress(sleeper, [self.transport], spin=0.0)

    def dial(self, seed: SeedService, node: int, invitation: Invitation | None = None) -> Line:
        invitation = invitation or parse_ticket(seed.ticket)
        whom = Expected(UNKNOWN_NODE, parse_ticket(seed.ticket).fingerprint, anonymous=True)
        carrier = self.transport.connect(seed.address, whom, time.monotonic() + EVENT_TIMEOUT)
        return Line(carrier, invitation, node)

    def close(self) -> None:
        self._progress.close()
        if self._poll_sleeper is not None:
            self._poll_sleeper.close()


@contextmanager
def join_dialer(scheme: str) -> Iterator[JoinDialer]:
    dialer = JoinDialer(scheme)
    try:
        yield dialer
    finally:
        dialer.close()


def wait_for_event(seed: SeedService, kind: str, part: str = "", count: int = 1) -> None:
    """Until that many events of this kind have been noted whose reason has this part."""
    deadline = time.monotonic() + EVENT_TIMEOUT
    while len(found := [note for note in seed.events if note.kind == kind and part in note.reason]) < count:
        assert time.monotonic() < deadline, (kind, part, found, seed.events)
        time.sleep(0.005)
