"""A seed at the other end of a join line, which says what a test wants said."""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from random import Random
from typing import Any, cast

from cryptography.hazmat.primitives.serialization import Encoding

from nexar.cluster.control_loop import CancelToken, ControlLoop
from nexar.cluster.node import Node
from nexar.config import Config
from nexar.security.authority import Authority, make_key
from nexar.security.certificates import Credentials, Trust, read_request
from nexar.security.invitation import Invitation
from nexar.security.proof import make_nonce, prove
from nexar.transport.base import Buffer, Carrier, Expected, Peer
from nexar.wire.frame import Lane
from nexar.wire.hello import Hello, decode_hello
from nexar.wire.join import Challenge, JoinMessage, JoinRequest, Renew, ReserveRanks, Welcome
from tests.ranks import EVENT_TIMEOUT
from tests.unit.cluster.fake_carrier import FakeCarrier, as_carrier

SECRET = bytes(range(32))
CERTIFICATE = b"what the seed showed"
INVITATION = Invitation(("seed:1", "seed:2"), SECRET, None)


class SeedSide(FakeCarrier):
    """The carrier, as the one who joins holds it. What it says is in `hello` and `sent`."""

    scheme = "tls"
    dialed = True

    def __init__(self, secret: bytes = SECRET, certificate: bytes | None = CERTIFICATE) -> None:
        super().__init__("seed:1")
        self.peer = Peer(0, certificate, False, "seed:1")
        self.secret = secret
        self.nonce = make_nonce()
        self.hello: Hello | None = None
        self.received: queue.SimpleQueue[JoinMessage] = queue.SimpleQueue()
        self.ended = threading.Event()

    def send_frame(self, lane: Lane, communicator: int, header: bytes, *body: Buffer) -> None:
        if self.hello is None:
            self._check()
            self.hello = decode_hello(b"".join(body))
            self.greeted()
        else:
            super().send_frame(lane, communicator, header, *body)
            self.received.put(self.sent[-1])
            self.reported(self.sent[-1])

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.ended.set()

    def finish(self) -> None:
        super().finish()
        self.ended.set()

    def challenge(self) -> None:
        assert self.hello is not None
        proof = prove(self.secret, "seed", self.hello.nonce, self.nonce, CERTIFICATE)
        self.say_message(Challenge(self.nonce, proof))

    def receive(self) -> JoinMessage:
        """The next message of the other side."""
        return self.received.get(timeout=EVENT_TIMEOUT)

    def greeted(self) -> None:
        """A hello has come. Nothing is answered, unless a test says what."""

    def reported(self, message: JoinMessage) -> None:
        """A message has come: likewise."""


class Opening(SeedSide):
    """A seed that lets everybody in, and goes on as a test says."""

    def __init__(self, authority: Authority, *then: JoinMessage, size: int = 1) -> None:
        super().__init__()
        self.authority = authority
        self.then = then
        self.size = size

    def greeted(self) -> None:
        self.challenge()

    def reported(self, message: JoinMessage) -> None:
        if isinstance(message, (JoinRequest, ReserveRanks)):
            self.say_message(self.welcome(message))
            for sent in self.then:
                self.say_message(sent)

    def welcome(self, message: JoinRequest | ReserveRanks) -> Welcome:
        ranks = (3, 1) if isinstance(message, ReserveRanks) else (None, None)
        return Welcome(
            cluster=self.authority.cluster,
            certificate=self.certify(message),
            authority=self.authority.certificate_pem,
            seen_address="10.0.0.9:9",
            size=self.size,
            first_rank=ranks[0],
            group_rank=ranks[1],
        )

    def certify(self, message: JoinRequest | ReserveRanks | Renew) -> bytes:
        """PEM, for whoever asked."""
        assert self.hello is not None
        return certificate_for(self.authority, message.request, self.hello.node)


def certificate_for(authority: Authority, request: bytes, node: int, seconds: float = 3600.0) -> bytes:
    """PEM."""
    issued = authority.issue(node, read_request(request, node), timedelta(seconds=seconds))
    return issued.public_bytes(Encoding.PEM)


class FakeNode:
    """What a worker asks of a node; its dials end as a test says, the last answer again and again."""

    id = 77
    host = "here"
    network_schemes = ("quic", "tls")
    schemes = frozenset({"quic", "tls"})

    def __init__(self, *answers: Callable[[], FakeCarrier]) -> None:
        self.key = make_key()
        self.cancel_token = CancelToken()
        self.control_loop = ControlLoop()
        self.config = Config()
        self.dialer = self
        self.dials: list[tuple[Mapping[str, Sequence[str]], Expected]] = []
        self.certified: list[tuple[Credentials, Trust]] = []
        self._answers = list(answers)

    def dial(
        self,
        addresses: Mapping[str, Sequence[str]],
        expected: Expected,
        deadline: float,
        failed: Callable[[str], None] | None = None,
    ) -> Carrier:
        self.dials.append((addresses, expected))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return as_carrier(answer())

    def certify(self, credentials: Credentials, trust: Trust) -> None:
        self.certified.append((credentials, trust))

    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {"tls": ("10.0.0.9:9",)}


def as_node(fake: FakeNode) -> Node:
    return cast(Any, fake)


class AtOnce(Random):
    """Always draws the lower bound, so that no test sleeps."""

    def uniform(self, a: float, b: float) -> float:
        return a
