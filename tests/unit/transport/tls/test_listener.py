"""The two halves of a dial on their way to one carrier."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from nexar.security.authority import Authority
from nexar.security.credentials import Trust
from nexar.security.tls import client_context
from nexar.transport.base import Carrier, CarrierLost, Expected, Peer
from nexar.transport.sleep import PollSleeper
from nexar.transport.tls import TlsTransport
from nexar.transport.tls.handshake import HandshakeFailed
from nexar.transport.tls.hello import Half, Hello, encode_hello
from nexar.transport.tls.trust import Believer
from nexar.wire.frame import HEADER_BYTES
from tests.conformance.harness import PATIENCE, Node, Pair, Recorder, Side, dial, in_thread, pump

OURS = Authority.create("ours")
TRUST = Trust(OURS.certificate_pem)
SERVER, CLIENT = 1, 2


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """A listening server, and a client."""
    with ExitStack() as stack:
        made = []
        for number in (SERVER, CLIENT):
            sleeper = PollSleeper()
            made.append(Node(number, TlsTransport(sleeper, OURS.admit(number), TRUST), sleeper))
            stack.callback(made[-1].close)
        made[0].transport.listen("127.0.0.1:0", made[0])
        yield made


def test_a_node_closes_while_a_half_waits_for_the_other(nodes: list[Node]) -> None:
    server = nodes[0]
    host, _, port = str(server.transport.address).rpartition(":")
    context = client_context(OURS.admit(CLIENT), TRUST)
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as half:
        with server.driving():
            secured = context.wrap_socket(half, server_hostname="0000000000000001.ours.nexar")
            secured.sendall(encode_hello(Hello(Half.CONTROL, b"t" * 16, False)))
            assert len(secured.recv(HEADER_BYTES)) == HEADER_BYTES  # it is welcome
        server.transport.close()
        secured.close()
    assert (server.refused, server.accepted) == ([], [])


def test_a_dialer_that_is_believed_no_longer_when_its_second_half_comes_is_refused(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = nodes
    verdicts = iter([True, True, False])  # on each hello, and on both together

    def accepted_peer(self: Believer, certificate: bytes | None, address: str) -> Peer:
        if not next(verdicts, True):
            raise HandshakeFailed("the credentials were replaced meanwhile")
        return believed(self, certificate, address)

    believed = Believer.accepted_peer
    monkeypatch.setattr(Believer, "accepted_peer", accepted_peer)
    address = str(server.transport.address)
    deadline = time.monotonic() + PATIENCE
    thread, outcome = in_thread(lambda: client.transport.connect(address, Expected(SERVER), deadline))
    pump([server], lambda: outcome, "the dial")  # it was welcome when it said who it is
    thread.join()
    (near,) = outcome
    assert isinstance(near, Carrier), near
    pump([server], lambda: len(server.refused) == 2, "the refusal of both halves")
    assert {reason for _, reason in server.refused} == {"the credentials were replaced meanwhile"}
    assert server.accepted == []
    heard = Recorder()
    near.attach(heard)
    pump(nodes, lambda: heard.lost, "the loss at the dialer")
    with pytest.raises(CarrierLost):
        near.finish()
    ends = dial(client, server)
    pair = Pair(Side(client, ends[0]), Side(server, ends[1]))
    for side in (pair.left, pair.right):
        side.carrier.attach(side.heard)
    pair.check_usable()
