"""Stories at the seed, in few lines: a node dials, says hello, applies; what does the machine want done?"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from nexar.cluster.decisions.admission import Admission
from nexar.cluster.decisions.admission_checks import AdmissionLimits
from nexar.cluster.decisions.admission_events import (
    AdmissionAction,
    AdmissionEvent,
    ConnectionOpened,
    DropConnection,
    FailFormation,
    HelloReceived,
    JoinerReady,
    JoinRequested,
    NotifyConnections,
    RanksRequested,
    RefuseConnection,
    SeedEvent,
)
from nexar.cluster.membership import PinnedNode
from nexar.security.proof import NONCE_BYTES, PROOF_BYTES
from nexar.wire.hello import Hello, Role
from nexar.wire.join import JoinMessage, JoinRequest, ReserveRanks

_Kind = TypeVar("_Kind", bound=AdmissionAction)
_Message = TypeVar("_Message", bound=JoinMessage)
PROOF = bytes(PROOF_BYTES)
SEED = PinnedNode(900, b"S" * 32)


def key(node: int) -> bytes:
    return node.to_bytes(32, "big")


def hello(node: int, role: Role = "candidate") -> Hello:
    return Hello(node, role, frozenset({"quic", "tls"}), bytes(NONCE_BYTES))


def application(host: str = "a", rank: int | None = None, launcher: int = 0, epoch: int = 0) -> JoinRequest:
    return JoinRequest(PROOF, b"request", host, {"quic": ("10.0.0.1:1",)}, rank, launcher, epoch)


@dataclass
class AdmissionScene:
    """An Admission, and everything it wanted so far."""

    machine: Admission
    now: float = 0.0
    actions: list[AdmissionAction] = field(default_factory=list)

    def feed(self, *events: AdmissionEvent) -> list[AdmissionAction]:
        """What it wants done about these."""
        answer = [action for event in events for action in self.machine.step(event, self.now)]
        self.actions += answer
        return answer

    def greet(self, connection: int, node: int | None = None, role: Role = "candidate") -> list[AdmissionAction]:
        """Dial and say hello."""
        said = hello(connection if node is None else node, role)
        return self.feed(ConnectionOpened(connection, f"10.0.0.9:{connection}"), HelloReceived(connection, said))

    def join(
        self,
        connection: int,
        *,
        node: int | None = None,
        host: str = "a",
        rank: int | None = None,
        launcher: int = 0,
        epoch: int = 0,
        knows_secret: bool = True,
        fingerprint: bytes | None = None,
    ) -> list[AdmissionAction]:
        """All that a candidate does. Its node id is the number of its connection unless given."""
        node = connection if node is None else node
        shown = key(node) if fingerprint is None else fingerprint
        asked = application(host, rank, launcher, epoch)
        applied = JoinRequested(connection, asked, knows_secret, shown)
        return self.greet(connection, node) + self.feed(applied, JoinerReady(connection))

    def reserve(
        self, connection: int, count: int, first_rank: int | None = None, *, node: int | None = None, ok: bool = True
    ) -> list[AdmissionAction]:
        """All that a launcher does."""
        node = connection if node is None else node
        asked = ReserveRanks(PROOF, b"request", "a", count, first_rank)
        return self.greet(connection, node, "launcher") + self.feed(RanksRequested(connection, asked, ok, key(node)))

    def order(self) -> list[int]:
        """Nodes in order of rank."""
        assert self.machine.membership is not None
        return [member.node for member in self.machine.membership.members]


def an_admission(
    size: int,
    *,
    timeout: float = 60.0,
    max_pending: int = 256,
    auth_timeout: float = 10.0,
    elastic: bool = False,
    most: int = 0,
    seed: PinnedNode = SEED,
    own_delay: Callable[[], float] = lambda: 0.0,
) -> AdmissionScene:
    rules = AdmissionLimits(
        max_pending=max_pending, auth_timeout=auth_timeout, elastic=elastic, most=most, own_delay=own_delay
    )
    return AdmissionScene(Admission("cluster", size, started=0.0, formation_timeout=timeout, limits=rules, seed=seed))


def only(actions: list[AdmissionAction], kind: type[_Kind]) -> _Kind:
    """The one action of this kind."""
    (found,) = every(actions, kind)
    return found


def every(actions: list[AdmissionAction], kind: type[_Kind]) -> list[_Kind]:
    return [action for action in actions if isinstance(action, kind)]


def notes(actions: list[AdmissionAction]) -> list[str]:
    return [note.kind for note in every(actions, SeedEvent)]


def ends(actions: list[AdmissionAction]) -> list[int]:
    """Connections that were ended by the machine."""
    failed = [connection for fail in every(actions, FailFormation) for connection in fail.connections]
    return [action.connection for action in actions if isinstance(action, RefuseConnection | DropConnection)] + failed


def notified(actions: list[AdmissionAction], kind: type[_Message]) -> list[tuple[_Message, tuple[int, ...]]]:
    """Messages of this kind, and to whom."""
    return [
        (feed.message, feed.connections) for feed in every(actions, NotifyConnections) if isinstance(feed.message, kind)
    ]
