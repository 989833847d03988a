"""A stage for QUIC carriers: nodes of one cluster in this process, and sinks that remember what they received."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from nexar_native import quic

from nexar.security.authority import Authority
from nexar.security.certificates import Credentials, Trust, certificate_fingerprint, node_name
from nexar.transport.base import Carrier, CarrierLost, Expected
from nexar.transport.quic.carrier import QuicCarrier
from nexar.transport.quic.transport import QuicSettings, QuicTransport
from nexar.wire.frame import Frame, FrameKind, Lane, encode

CLUSTER = "stage"
EVENT_TIMEOUT = 60.0


class Memory:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.frames: list[tuple[Frame, bytes]] = []
        self.payloads: list[int] = []
        self.finished = 0
        self.lost: list[CarrierLost] = []
        self.calls: list[str] = []
        self.on_frame: Callable[[Carrier, Frame, memoryview], None] | None = None

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        self.calls.append("frame")
        self.frames.append((frame, bytes(body)))
        if self.on_frame is not None:
            self.on_frame(carrier, frame, body)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        self.calls.append("payload")
        self.payloads.append(transfer)

    def carrier_finished(self, carrier: Carrier) -> None:
        self.calls.append("finished")
        self.finished += 1

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.calls.append("lost")
        self.lost.append(error)

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body in self.frames]


class Acceptor:
    """An acceptor that remembers. Attaches a fresh sink to each carrier unless asked not to."""

    def __init__(self) -> None:
        self.carriers: list[QuicCarrier] = []
        self.sinks: list[Memory] = []
        self.refused: list[tuple[str, str]] = []
        self.attach = True

    def carrier_accepted(self, carrier: Carrier) -> None:
        assert isinstance(carrier, QuicCarrier)
        self.carriers.append(carrier)
        self.sinks.append(Memory())
        if self.attach:
            carrier.attach(self.sinks[-1])

    def candidate_refused(self, address: str, reason: str) -> None:
        self.refused.append((address, reason))


class Node:
    """One node: its transport, its acceptor, its credentials."""

    def __init__(self, credentials: Credentials | None, trust: Trust, settings: QuicSettings | None) -> None:
        self.credentials = credentials
        self.transport = QuicTransport(credentials, trust, bind="127.0.0.1:0", settings=settings)
        self.acceptor = Acceptor()
        self.address = self.transport.listen("127.0.0.1:0", self.acceptor) if credentials else ""

    @property
    def id(self) -> int:
        assert self.credentials is not None
        return self.credentials.node

    @property
    def native_address(self) -> tuple[str, int]:
        host, port = self.address.rsplit(":", 1)
        return host, int(port)

    def dial(self, other: "Node", timeout: float = EVENT_TIMEOUT, **expected: object) -> QuicCarrier:
        whom = Expected(**{"node": other.id, **expected})  # type: ignore[arg-type]
        return self.transport.connect(other.address, whom, time.monotonic() + timeout)


class Scene:
    """Nodes that trust one authority."""

    def __init__(self) -> None:
        self.authority = Authority.create(CLUSTER)
        self.trust = Trust(self.authority.certificate_pem)
        self.nodes: list[Node] = []
        self.raw: list[quic.Endpoint] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.transport.close()
        for endpoint in self.raw:
            endpoint.close()

    def node(
        self, number: int, *, trust: Trust | None = None, settings: QuicSettings | None = None, **kept: object
    ) -> Node:
        credentials = kept.get("credentials", self.authority.admit(number))
        made = Node(credentials, trust or self.trust, settings)  # type: ignore[arg-type]
        self.nodes.append(made)
        return made

    def pair(self, settings: QuicSettings | None = None) -> "Pair":
        return Pair(self, self.node(1, settings=settings), self.node(2, settings=settings))

    def drive(self, until: Callable[[], object], timeout: float = EVENT_TIMEOUT) -> None:
        """Drive every node, in this one thread, until it is so."""
        deadline = time.monotonic() + timeout
        while not until():
            assert time.monotonic() < deadline, "it did not happen in time"
            busy = [node.transport.poll() for node in self.nodes]
            if not any(busy):
                self.nodes[0].transport.sleep(0.001, 0.0)

    def unauthenticated(self, victim: Node, number: int = 66) -> quic.Connection:
        """A member of the cluster whose software is not ours: a bare native connection."""
        known = self.authority.admit(number)
        endpoint = quic.Endpoint(
            ("127.0.0.1", 0),
            quic.Credentials(known.certificate_chain, known.private_key),
            quic.Trust(self.authority.certificate_pem),
        )
        self.raw.append(endpoint)
        return endpoint.connect(victim.native_address, node_name(victim.id, CLUSTER), EVENT_TIMEOUT)


class Pair:
    """Two nodes and the carrier between them; `left` dialed `right`."""

    def __init__(self, scene: Scene, left: Node, right: Node) -> None:
        self.scene = scene
        self.left_node, self.right_node = left, right
        self.left = left.dial(right)
        scene.drive(lambda: right.acceptor.carriers)
        self.right = right.acceptor.carriers[0]
        self.left_sink, self.right_sink = Memory(), right.acceptor.sinks[0]
        self.left.attach(self.left_sink)

    def drive(self, until: Callable[[], object], timeout: float = EVENT_TIMEOUT) -> None:
        self.scene.drive(until, timeout)


def send(carrier: Carrier, body: bytes, lane: Lane = Lane.CONTROL, communicator: int = 0, **fields: int) -> None:
    """One frame with this body."""
    header = encode(Frame(kind=FrameKind.CONTROL, lane=lane, communicator=communicator, body=len(body), **fields))
    carrier.send_frame(lane, communicator, header, body)


def pin(credentials: Credentials) -> bytes:
    """The fingerprint that a membership would pin."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    loaded = x509.load_pem_x509_certificate(credentials.certificate_chain)
    return certificate_fingerprint(loaded.public_bytes(Encoding.DER))
