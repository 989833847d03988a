"""Connections that say a little and never authenticate, 400 a second: a node with 50 ms of latency, each way, joins
beside them. The figures are in the test's record.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from nexar.security.authority import Authority
from nexar.security.credentials import Trust
from nexar.security.invitation import Invitation
from nexar.security.join_ticket import format_ticket, parse_ticket
from nexar.transport.address import format_address, parse_address
from nexar.transport.base import ConnectRefused, Expected
from nexar.transport.sleep import PollSleeper
from nexar.transport.tls import TlsTransport
from tests.cluster.guests import PATIENCE
from tests.conformance.harness import Node
from tests.hostile.siege import process
from tests.hostile.slow_path import slow_path
from tests.processes.scale import MIB, measured

ROOT = Path(__file__).parents[2]
RATE = 400
LATENCY = 0.05
ALLOWED_DELAY = 5.0
ALLOWED_GROWTH = 32 * MIB
WARM_UP = {"byte": 3 * 256, "hello": 256}
"""Connections after which the attack is in full swing. Handshakes cost the attacker as much as the seed: on a busy
machine there are fewer of them than wanted."""

JOIN = """
import sys, time, nexar
begin = time.monotonic()
with nexar.connect(sys.argv[1], transports=("tls",), bind="127.0.0.1") as comm:
    print(time.monotonic() - begin)
"""

Record = Callable[[str, object], None]


@contextmanager
def talkers(kind: str, place: tuple[str, int], sources: int) -> Iterator[Callable[[], int]]:
    """An attack that is under way; gives how many connections it has opened."""
    arguments = (kind, place[0], str(place[1]), str(sources), str(RATE))
    command = [sys.executable, "-m", "tests.hostile.talkers_main", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attack:

        def opened() -> int:
            assert attack.stdin is not None
            assert attack.stdout is not None
            attack.stdin.write(b"\n")
            attack.stdin.flush()
            return int(attack.stdout.readline())

        try:
            deadline = time.monotonic() + 3 * PATIENCE
            while opened() < WARM_UP[kind]:
                assert time.monotonic() < deadline, "the attack did not begin"
                time.sleep(0.05)
            yield opened
        finally:
            attack.kill()


def join(invitation: Invitation, place: tuple[str, int]) -> float:
    """Seconds that a node of its own process takes to join over `place`."""
    ticket = format_ticket(Invitation((format_address(*place),), invitation.secret, invitation.fingerprint))
    command = [sys.executable, "-c", JOIN, ticket]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3 * PATIENCE)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def resident(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def join_a_seed(attack: str | None, sources: int, record: Record = lambda _name, _value: None) -> float:
    """Seconds that a distant node takes to join a seed of its own, beside an attack or without one."""
    with process("seed", "1", "{}") as seed, ExitStack() as stack:
        opened = seed.hear()
        invitation, place = parse_ticket(opened["ticket"]), parse_address(opened["address"])
        path = stack.enter_context(slow_path(place, LATENCY))
        before = resident(seed.pid, "VmRSS")
        if attack is None:
            return join(invitation, path.place)
        count = stack.enter_context(talkers(attack, place, sources))
        begin, known = time.monotonic(), count()
        seconds = join(invitation, path.place)
        rate = (count() - known) / (time.monotonic() - begin)
        grown = resident(seed.pid, "VmHWM") - before
        measured(record, join_s=round(seconds, 2), rate=round(rate), grown_mb=round(grown / MIB, 1))
        assert attack != "byte" or grown < ALLOWED_GROWTH
        return seconds


@pytest.fixture(scope="module")
def normal() -> float:
    """Seconds that it takes when nobody disturbs."""
    return join_a_seed(None, 0)


@pytest.mark.parametrize("sources", [1, 64])
@pytest.mark.parametrize("attack", ["byte", "hello"])
def test_a_distant_node_joins_beside_connections_that_never_authenticate(
    attack: str, sources: int, normal: float, record_property: Record
) -> None:
    """`byte`: TCP connections that send one byte. `hello`: they complete TLS, say hello and prove nothing."""
    seconds = join_a_seed(attack, sources, record_property)
    measured(record_property, normal_s=round(normal, 2))
    assert seconds < 2 * normal + ALLOWED_DELAY  # twice: the attack takes half of the machine


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
            deadline = begin + 3 * PATIENCE
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
