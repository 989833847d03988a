"""Connections that say a little and never authenticate, 400 a second: a node with 50 ms of latency, each way, joins
beside them. The figures are in the test's record.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import pytest

from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.security.invitation import Invitation, format_ticket, parse_ticket
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import ConnectRefused, Expected
from nexar.transport.sleeper import PollSleeper
from nexar.transport.tls import TlsTransport
from tests.cluster.joiners import EVENT_TIMEOUT
from tests.conformance.harness import Node
from tests.hostile.attack_scene import Process, process
from tests.hostile.slow_path import slow_path
from tests.hostile.unauthenticated_peers import has_quic
from tests.processes.scale import MIB, measured

ROOT = Path(__file__).parents[2]
RATE = 400
LATENCY = 0.05
ALLOWED_DELAY = 5.0
ALLOWED_GROWTH = 32 * MIB
LEAST_RATE = RATE / 8
"""Connections a second below which it is no attack. On a busy machine there are fewer of them than wanted: handshakes
cost the attacker as much as the seed."""
WARM_UP = {"byte": (3 * 256, 0), "hello": (256, 0), "quic": (256, 100)}
"""Connections begun and completed after which the attack is in full swing."""
EVERY_TRANSPORT = ""

JOIN = """
import sys, time, nexar
settings = {"transports": tuple(sys.argv[2].split(","))} if sys.argv[2] else {}
begin = time.monotonic()
with nexar.connect(sys.argv[1], bind="127.0.0.1", **settings) as comm:
    print(time.monotonic() - begin)
"""

Record = Callable[[str, object], None]
needs_quic = pytest.mark.skipif(not has_quic(), reason="nexar_native is not installed")


class Attack:
    """Connections of a process of its own."""

    def __init__(self, asked: IO[bytes], answers: IO[bytes]) -> None:
        self._asked = asked
        self._answers = answers
        self._start = time.monotonic()

    def count(self) -> tuple[int, int]:
        """Connections begun so far, and completed."""
        self._asked.write(b"\n")
        self._asked.flush()
        begun, completed = map(int, self._answers.readline().split())
        return begun, completed

    def rate(self) -> float:
        """Connections begun a second, since the attack began."""
        return self.count()[0] / (time.monotonic() - self._start)

    def await_full_swing(self, kind: str) -> None:
        begun, completed = WARM_UP[kind]
        deadline = time.monotonic() + 3 * EVENT_TIMEOUT
        while (count := self.count())[0] < begun or count[1] < completed:
            assert time.monotonic() < deadline, f"the attack did not begin: {count}"
            self._start = self._start if count[0] else time.monotonic()
            time.sleep(0.05)


@contextmanager
def talkers(kind: str, place: tuple[str, int], sources: int) -> Iterator[Attack]:
    """An attack that is under way."""
    arguments = (kind, place[0], str(place[1]), str(sources), str(RATE))
    command = [sys.executable, "-m", "tests.hostile.slow_connections_main", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            attack = Attack(process.stdin, process.stdout)
            attack.await_full_swing(kind)
            yield attack
        finally:
            process.kill()


def join(invitation: Invitation, place: tuple[str, int], transports: str) -> float:
    """Seconds that a node of its own process takes to join over `place`."""
    ticket = format_ticket(Invitation((format_address(*place),), invitation.secret, invitation.fingerprint))
    command = [sys.executable, "-c", JOIN, ticket, transports]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * EVENT_TIMEOUT)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def resident(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


@contextmanager
def distant_seed() -> Iterator[tuple[Process, Invitation, tuple[str, int], tuple[str, int]]]:
    """A seed in a process of its own, its invitation, its place, and the place where a distant node finds it."""
    with process("seed", "1", "{}") as seed:
        opened = seed.receive()
        place = parse_address(opened["address"])
        with slow_path(place, LATENCY) as path:
            yield seed, parse_ticket(opened["ticket"]), place, path.place


def join_undisturbed(transports: str) -> float:
    """Seconds that a distant node takes to join a seed that nobody attacks."""
    with distant_seed() as (_, invitation, _, path):
        return join(invitation, path, transports)


@pytest.mark.full
@pytest.mark.parametrize("sources", [1, 64])
@pytest.mark.parametrize(
    ("attack", "transports"),
    [
        ("byte", "tls"),
        ("hello", "tls"),
        pytest.param("quic", "quic", marks=needs_quic),
        pytest.param("quic", EVERY_TRANSPORT, marks=needs_quic, id="quic-every"),
    ],
)
def test_a_distant_node_joins_beside_connections_that_never_authenticate(
    attack: str, transports: str, sources: int, record_property: Record
) -> None:
    """`byte`: TCP connections that send one byte. `hello`: they complete TLS, say hello and prove nothing. `quic`: the
    same over QUIC.
    """
    normal = join_undisturbed(transports)
    with distant_seed() as (seed, invitation, place, path):
        before = resident(seed.pid, "VmRSS")
        with talkers(attack, place, sources) as under_way:
            seconds = join(invitation, path, transports)
            rate, completed = under_way.rate(), under_way.count()[1]
        grown = resident(seed.pid, "VmHWM") - before
    normal = max(normal, join_undisturbed(transports))  # the load of the machine may have changed meanwhile
    measured(record_property, normal_s=round(normal, 2), join_s=round(seconds, 2), rate=round(rate))
    measured(record_property, completed=completed, grown_mb=round(grown / MIB, 1))
    assert seconds < normal + ALLOWED_DELAY
    assert grown < ALLOWED_GROWTH
    assert rate > LEAST_RATE


OURS = Authority.create("ours")
SERVER, CLIENT = 1, 2


@contextmanager
def member(number: int) -> Iterator[Node]:
    sleeper = PollSleeper()
    node = Node(number, TlsTransport(sleeper, OURS.admit(number), Trust(OURS.certificate_pem)), sleeper)
    try:
        yield node
    finally:
        node.close()


def dial(client: Node, place: tuple[str, int]) -> float:
    """Seconds until a member is connected to another; it dials again when it is refused, as members do."""
    begin = time.monotonic()
    while True:
        try:
            deadline = begin + 3 * EVENT_TIMEOUT
            client.transport.connect(format_address(*place), Expected(SERVER), deadline).abort("it is through")
            return time.monotonic() - begin
        except ConnectRefused:
            assert time.monotonic() < deadline


@pytest.mark.parametrize("sources", [1, 64])
def test_a_distant_member_connects_to_another_beside_connections_that_never_authenticate(
    sources: int, record_property: Record
) -> None:
    with member(SERVER) as server, member(CLIENT) as client, ExitStack() as stack:
        place = parse_address(server.transport.listen("127.0.0.1:0", server))
        stack.enter_context(server.driving())
        path = stack.enter_context(slow_path(place, LATENCY))
        normal = dial(client, path.place)
        stack.enter_context(talkers("byte", place, sources))
        seconds = dial(client, path.place)
    measured(record_property, normal_s=round(normal, 2), connect_s=round(seconds, 2), refused=len(server.refused))
    assert seconds < normal + ALLOWED_DELAY
