"""Making carriers: who may come in, who is believed, and the sleep of the driving thread."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from nexar.errors import UsageError
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.base import CarrierLost, ConnectRefused, Expected
from nexar.transport.quic.transport import QuicSettings, QuicTransport
from nexar.types import UNKNOWN_NODE
from tests.unit.transport.quic.scene import CLUSTER, EVENT_TIMEOUT, Acceptor, pin, send


def test_both_ends_know_who_the_other_is(scene):
    pair = scene.pair()
    assert (pair.left.peer.node, pair.right.peer.node) == (2, 1)
    assert pair.left.peer.verified
    assert pair.right.peer.verified
    assert (pair.left.dialed, pair.right.dialed) == (True, False)
    assert pair.left.peer.address == pair.right_node.address


def test_a_pinned_key_is_checked(scene):
    one, two = scene.node(1), scene.node(2)
    one.dial(two, fingerprint=pin(two.credentials)).abort("checked")
    with pytest.raises(ConnectRefused, match="another key") as refused:
        one.dial(two, fingerprint=pin(one.credentials))
    assert refused.value.verification


def test_a_node_of_another_name_is_refused_by_the_dialer(scene):
    one, two = scene.node(1), scene.node(2)
    with pytest.raises(ConnectRefused) as refused:
        one.dial(two, node=3)
    assert refused.value.verification


def test_a_listener_of_another_authority_is_refused_by_the_dialer(scene):
    other = Authority.create(CLUSTER)
    one, two = scene.node(1), scene.node(2, credentials=other.admit(2))
    with pytest.raises(ConnectRefused) as refused:
        one.dial(two)
    assert refused.value.verification


def test_a_dialer_of_another_authority_is_refused_by_the_listener_which_is_notified(scene):
    other = Authority.create(CLUSTER)
    one, two = scene.node(1), scene.node(2, credentials=other.admit(2))
    with pytest.raises(ConnectRefused) as refused:
        two.dial(one)
    assert refused.value.verification
    scene.drive(lambda: one.acceptor.refused)
    address, reason = one.acceptor.refused[0]
    assert address == f"127.0.0.1:{two.transport._endpoint.address[1]}"
    assert reason
    assert one.acceptor.carriers == []


def test_a_candidate_without_a_certificate_is_refused_unless_allowed(scene):
    closed, open_node = scene.node(1), scene.node(2, trust=Trust(scene.trust.authorities, allow_anonymous=True))
    candidate = scene.node(0, credentials=None, trust=Trust(b""))
    with pytest.raises(ConnectRefused):
        candidate.dial(closed, node=UNKNOWN_NODE, fingerprint=pin(closed.credentials))
    carrier = candidate.dial(open_node, node=UNKNOWN_NODE, fingerprint=pin(open_node.credentials))
    assert carrier.peer.verified
    assert carrier.peer.node == 2
    scene.drive(lambda: open_node.acceptor.carriers)
    unauthenticated = open_node.acceptor.carriers[0].peer
    assert (unauthenticated.node, unauthenticated.certificate, unauthenticated.verified) == (UNKNOWN_NODE, None, False)


def test_a_candidate_that_knows_only_an_address_gets_an_unverified_carrier(scene):
    seed = scene.node(2, trust=Trust(scene.trust.authorities, allow_anonymous=True))
    candidate = scene.node(0, credentials=None, trust=Trust(b""))
    carrier = candidate.dial(seed, node=UNKNOWN_NODE)
    assert not carrier.peer.verified
    assert carrier.peer.certificate


def test_a_candidate_is_not_fooled_by_another_key(scene):
    seed = scene.node(2, trust=Trust(scene.trust.authorities, allow_anonymous=True))
    candidate = scene.node(0, credentials=None, trust=Trust(b""))
    with pytest.raises(ConnectRefused) as refused:
        candidate.dial(seed, node=UNKNOWN_NODE, fingerprint=b"\x01" * 32)
    assert refused.value.verification


def test_credentials_replaced_while_running_count_for_new_carriers_only(scene):
    pair = scene.pair()
    successor = Authority.create(CLUSTER)
    trust = Trust(successor.certificate_pem)
    pair.right_node.transport.replace_credentials(successor.admit(2), trust)
    with pytest.raises(ConnectRefused):
        pair.left_node.dial(pair.right_node)
    pair.left_node.transport.replace_credentials(successor.admit(1), trust)
    assert pair.left_node.dial(pair.right_node).peer.verified
    send(pair.left, b"the old one lives")
    pair.drive(lambda: pair.right_sink.bodies == [b"the old one lives"])


def test_a_candidate_becomes_a_member_when_it_gets_credentials(scene):
    seed, candidate = scene.node(1), scene.node(0, credentials=None, trust=Trust(b""))
    with pytest.raises(UsageError, match="without credentials"):
        candidate.transport.listen("127.0.0.1:0", candidate.acceptor)
    candidate.transport.replace_credentials(scene.authority.admit(9), scene.trust)
    assert candidate.dial(seed).peer.node == 1
    assert candidate.transport.listen("127.0.0.1:0", candidate.acceptor)


def test_nobody_there_is_a_timeout_at_the_deadline(scene):
    one = scene.node(1)
    with pytest.raises(TimeoutError):
        one.transport.connect("127.0.0.1:9", Expected(2), time.monotonic() + 0.1)
    with pytest.raises(TimeoutError):
        one.transport.connect("127.0.0.1:9", Expected(2), time.monotonic() - 1)


def test_a_host_that_does_not_exist_is_refused(scene):
    with pytest.raises(ConnectRefused) as refused:
        scene.node(1).transport.connect("no-such-host.invalid:1", Expected(2), time.monotonic() + 5)
    assert not refused.value.verification


def test_many_threads_may_dial_at_once(scene):
    hub, carriers = scene.node(1), []
    others = [scene.node(number) for number in range(2, 5)]
    dials = [threading.Thread(target=lambda n=n: carriers.append(n.dial(hub))) for n in others * 3]
    for thread in dials:
        thread.start()
    for thread in dials:
        thread.join()
    scene.drive(lambda: len(hub.acceptor.carriers) == 9)
    assert sorted(carrier.peer.node for carrier in hub.acceptor.carriers) == [2, 2, 2, 3, 3, 3, 4, 4, 4]


def test_a_socket_listens_where_it_is_bound_and_nowhere_else(scene):
    transport = QuicTransport(scene.authority.admit(5), scene.trust, bind="127.0.0.1:0")
    try:
        with pytest.raises(OSError, match="bound to"):
            transport.listen("0.0.0.0:0", None)
        assert transport.address_for(1) is None
        address = transport.listen("127.0.0.1:0", None)
        assert transport.address_for(1) == address
        with pytest.raises(OSError, match="already"):
            transport.listen(address, None)
    finally:
        transport.close()


@pytest.mark.parametrize(("host", "number"), [("127.0.0.1", errno.EADDRINUSE), ("192.0.2.99", errno.EADDRNOTAVAIL)])
def test_an_address_that_is_not_to_be_had_is_refused_with_the_systems_number(scene, host, number):
    port = scene.node(1).native_address[1]
    with pytest.raises(OSError, match=r"(?i)address") as refused:
        QuicTransport(scene.authority.admit(5), scene.trust, bind=f"{host}:{port}")
    assert refused.value.errno == number


@pytest.mark.parametrize("bind", [":0", "127.0.0.1:0", "[::1]:0"])
def test_a_node_is_dialed_by_name_and_by_number(scene, bind):
    acceptor, transport = Acceptor(), QuicTransport(scene.authority.admit(8), scene.trust, bind=bind)
    dialer = QuicTransport(scene.authority.admit(9), scene.trust, bind=bind)
    try:
        port = transport.listen(bind, acceptor).rpartition(":")[2]
        hosts = {":0": ["127.0.0.1", "[::1]", "localhost"], "127.0.0.1:0": ["127.0.0.1", "localhost"]}
        for host in hosts.get(bind, ["[::1]"]):
            carrier = dialer.connect(f"{host}:{port}", Expected(8), time.monotonic() + EVENT_TIMEOUT)
            assert carrier.peer.node == 8
    finally:
        dialer.close()
        transport.close()


def test_a_silent_peer_is_lost_at_the_idle_timeout(scene):
    code = """
        import sys, time
        from tests.unit.transport.quic.scene import Scene, Node, Memory
        from nexar.security.certificates import Credentials, Trust
        from nexar.transport.quic.transport import QuicTransport
        from nexar.transport.base import Expected
        chain, key, authority, address = (bytes.fromhex(text) for text in sys.stdin.readline().split())
        transport = QuicTransport(Credentials(7, "stage", chain, key), Trust(authority), bind="127.0.0.1:0")
        carrier = transport.connect(address.decode(), Expected(1), time.monotonic() + 10)
        carrier.attach(Memory())
        print("here", flush=True)
        while True:
            transport.sleep(1.0, 0.0)
    """
    node = scene.node(1, settings=QuicSettings(idle_timeout=0.5, keep_alive_interval=0.1))
    known = scene.authority.admit(7)
    facts = (known.certificate_chain, known.private_key, scene.trust.authorities, node.address.encode())
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        child.stdin.write(" ".join(fact.hex() for fact in facts) + "\n")
        child.stdin.flush()
        scene.drive(lambda: node.acceptor.carriers)
        assert child.stdout.readline() == "here\n"
        child.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    scene.drive(lambda: node.acceptor.sinks[0].lost)
    assert node.acceptor.sinks[0].lost[0].kind == "timeout"
    assert time.monotonic() - killed < 5


def test_a_closed_transport_notifies_its_peers_and_ends_its_carriers(scene):
    pair = scene.pair()
    pair.left_node.transport.close()
    pair.left_node.transport.close()
    scene.nodes.remove(pair.left_node)
    pair.drive(lambda: pair.right_sink.lost)
    assert pair.right_sink.lost[0].kind == "peer"
    assert pair.left_sink.calls == []
    with pytest.raises(CarrierLost, match="closed"):
        send(pair.left, b"")
    scene.drive(lambda: not pair.left_node.transport.poll())


def test_closing_ends_the_sleep_of_the_driving_thread(scene):
    node = scene.node(1)
    sleeper = threading.Thread(target=node.transport.sleep, args=(EVENT_TIMEOUT, 0.0))
    sleeper.start()
    node.transport.close()
    sleeper.join(EVENT_TIMEOUT)
    assert not sleeper.is_alive()


def test_a_kick_ends_the_sleep_and_is_never_lost(scene):
    transport = scene.node(1).transport
    transport.wake()
    began = time.monotonic()
    transport.sleep(EVENT_TIMEOUT, 0.0)
    assert time.monotonic() - began < EVENT_TIMEOUT / 2


def test_a_watched_descriptor_ends_the_sleep(scene):
    transport = scene.node(1).transport
    reading, writing = os.pipe()
    try:
        transport.watch(reading)
        os.write(writing, b"x")
        began = time.monotonic()
        transport.sleep(EVENT_TIMEOUT, 0.0)
        assert time.monotonic() - began < EVENT_TIMEOUT / 2
        transport.unwatch(reading)
    finally:
        os.close(reading)
        os.close(writing)


def test_other_transports_may_go_on_when_it_is_closed_already(scene):
    """They are closed after it, and a dial of theirs may just then have got through."""
    transport = scene.node(1).transport
    transport.close()
    reading, writing = os.pipe()
    try:
        transport.watch(reading)
        transport.watch(reading, readable=False)
        transport.unwatch(reading)
        transport.wake()
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("what", ["sleep", "connect"])
def test_ctrl_c_ends_a_wait_and_leaves_the_transport_usable(scene, what):
    pair = scene.pair()
    transport = pair.left_node.transport
    waits = {
        "sleep": lambda: transport.sleep(EVENT_TIMEOUT, 0.0),
        "connect": lambda: transport.connect("127.0.0.1:9", Expected(2), time.monotonic() + EVENT_TIMEOUT),
    }
    interrupt = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))

    def wait():
        interrupt.start()
        while True:  # an acknowledgement may end a sleep
            waits[what]()

    with pytest.raises(KeyboardInterrupt):
        wait()
    interrupt.join()
    send(pair.left, b"still here")
    pair.drive(lambda: pair.right_sink.bodies == [b"still here"])


def test_a_forked_child_lets_go_and_the_parent_goes_on(scene):
    pair = scene.pair()
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            pair.left_node.transport.abandon()
            pair.left_node.transport.close()
            pair.left.abort("nobody hears this")
            pair.left_node.transport.wake()
            assert not pair.left_node.transport.poll()
            with pytest.raises(ConnectRefused, match="forked"):
                pair.left_node.dial(pair.right_node)
            try:
                send(pair.left, b"from the child")
            except CarrierLost as lost:
                verdict = 0 if lost.kind == "fault" and "forked" in lost.reason else 2
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    send(pair.left, b"from the parent")
    pair.drive(lambda: pair.right_sink.bodies == [b"from the parent"])


def test_a_child_that_abandons_nothing_gets_a_clear_reason(scene):
    pair = scene.pair()
    send(pair.left, b"opens a stream")
    child = os.fork()
    if child == 0:
        verdict = 1
        try:
            send(pair.left, b"from the child")
        except CarrierLost as lost:
            verdict = 0 if lost.kind == "fault" and "forked" in lost.reason else 2
        finally:
            os._exit(verdict)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_nothing_is_left_of_many_transports(scene):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10, 20):
        node = scene.node(number)
        node.dial(scene.nodes[0]).attach(node.acceptor)
        if number > 10:
            node.transport.close()
            scene.nodes.remove(node)
    scene.nodes[0].transport.close()
    scene.nodes.clear()
    assert len(os.listdir("/proc/self/fd")) <= before
