"""A member with a valid certificate says what it likes to the seed: it loses its line, and the others go on."""

import logging
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from msgspec import msgpack
from msgspec.structs import replace

from nexar.cluster.membership import MAX_MEMBERS, Change, Departure, Member, Membership, encode_member
from nexar.cluster.seed import SeedService
from nexar.cluster.seed_status import StatusBoardService
from nexar.transport.base import CarrierLost
from nexar.wire.control import KNOWN, BallotNumber, CallMismatch, Chosen, Promise
from nexar.wire.frame import FrameKind, Lane
from nexar.wire.hello import add_prefix
from nexar.wire.join import (
    KNOWN_JOIN,
    MAX_JOIN_BYTES,
    MAX_PAXOS_BYTES,
    JoinMessage,
    LivenessQuery,
    LivenessReply,
    SeedPaxosMessage,
    StatusUpdate,
)
from tests.cluster.joiners import END, JoinDialer, Line, join_dialer, wait_for_event
from tests.hostile.colliding_keys import colliding_keys
from tests.processes.scale import measured

HERE = "127.0.0.1:0"
SIZE = 3
Record = Callable[[str, object], None]
ODD = [None, True, -1, 0, 2**64 - 1, -(2**63), float("nan"), float("inf"), 1e300, "", "\x00", "x" * 5000, b"", [], {}]


@pytest.fixture
def dialer() -> Iterator[JoinDialer]:
    with join_dialer("tls") as made:
        yield made


class World:
    """A seed with three members, the first of which is hostile."""

    def __init__(self, seed: SeedService, dialer: JoinDialer) -> None:
        self.seed = seed
        self.lines = [dialer.dial(seed, 100 + number) for number in range(SIZE)]
        for line in self.lines:
            line.join()
        memberships = [line.receive_membership() for line in self.lines]
        self.membership = memberships[0]
        self._knocker = dialer

    @property
    def hostile(self) -> Line:
        return self.lines[0]

    def come_back(self) -> None:
        """The hostile member, whom the seed has sent away, or not: on a new line."""
        again = self._knocker.dial(self.seed, self.hostile.node)
        again.key = self.hostile.key
        again.join()
        again.receive_membership()
        self.lines[0] = again

    def wait_until_read(self) -> bool:
        """Until the seed has read what the hostile member has said so far; whether its line goes on."""
        try:
            self.hostile.send(LivenessQuery(0))
        except CarrierLost:
            return False
        while (body := self.hostile.received.get(timeout=20)) != END:
            if isinstance(body, bytes) and body.endswith(_encoded(LivenessReply(0))):
                return True
        return False

    def check_others(self, number: int) -> None:
        """The seed still answers every other member."""
        for line in self.lines[1:]:
            line.send(LivenessQuery(number))
            while (body := line.received.get(timeout=20)) != END:
                if isinstance(body, bytes) and body.endswith(bytes(_encoded(LivenessReply(number)))):
                    break
            assert body != END


def _encoded(message: JoinMessage) -> bytes:
    return msgpack.encode(message)


def _joiners(count: int, text: int) -> tuple[Member, ...]:
    """Members with long addresses, each as large as a member may be."""
    address = ".".join(["h" * min(text, 43)] * (text // 44 + 1))
    return tuple(
        Member(10**9 + n, "there", bytes(32), {"tls": (f"{address}.example:{10_000 + n}",)}) for n in range(count)
    )


def oversize(membership: Membership) -> list[Change]:
    """Changes that a message has room for, and that make a membership too large for one, or of too many members."""
    joiners = _joiners(4000, 220)
    per_member = len(encode_member(joiners[0]))
    fitting = joiners[: (MAX_PAXOS_BYTES - 100) // per_member]
    room = MAX_PAXOS_BYTES - 100 - len(fitting) * per_member
    fitting = (*fitting[:-1], replace(fitting[-1], host="h" * min(room, 250)))
    return [
        Change(membership.epoch + 1, joined=fitting),
        Change(membership.epoch + 1, joined=_joiners(MAX_MEMBERS + 1, 1)),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_a_chosen_membership_beyond_the_limits_costs_nobody_but_its_sender(dialer: JoinDialer, which: int) -> None:
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        body = msgpack.encode(Chosen((0, 1, 0), oversize(world.membership)[which].encode()))
        assert len(body) <= MAX_PAXOS_BYTES
        world.hostile.say(add_prefix(msgpack.encode(SeedPaxosMessage(body)), 2 * MAX_JOIN_BYTES))
        world.wait_until_read()
        world.check_others(1)
        assert seed.membership == world.membership


def test_a_message_with_keys_that_collide_takes_the_seed_no_time(dialer: JoinDialer, record_property: Record) -> None:
    """A mebibyte of it took 6 s, in which the seed answered nobody."""
    calls = dict.fromkeys(colliding_keys(16), (0, 0, 0, 0, 0, 0))
    body = msgpack.encode(SeedPaxosMessage(msgpack.encode(CallMismatch(0, 1, 1, calls))))
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        begin = time.monotonic()
        world.hostile.say(add_prefix(body, MAX_JOIN_BYTES))
        assert not world.wait_until_read()
        world.check_others(1)
        measured(record_property, bytes=len(body), answer_s=round(time.monotonic() - begin, 3))


def test_a_change_that_is_none_costs_nobody_but_its_sender(dialer: JoinDialer) -> None:
    values = [
        b"",
        b"nonsense",
        msgpack.encode({"epoch": 2}),
        Change(2, left=(Departure(12345, "nobody"),)).encode(),
        Change(2, left=tuple(Departure(100 + n, "all") for n in range(SIZE))).encode(),
        Change(2**63, severed=((1, 2),)).encode(),
    ]
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        for number, value in enumerate(values, 1):
            for word in (Chosen((0, 1, 0), value), Promise((0, 1, 0), BallotNumber(1, 1), BallotNumber(1, 1), value)):
                world.hostile.send(SeedPaxosMessage(msgpack.encode(word)))
            world.check_others(number)


def variants(kind: type[msgspec.Struct]) -> list[bytes]:
    """One field after the other with every odd value, the rest plausible. Those that are messages come first: behind
    one that is none nothing is read any more.
    """
    tag = kind.__struct_config__.tag
    plain = {"instance": [0, 1, 0], "ballot": [1, 100], "value": b"", "body": b"x", "cause": "x", "reason": "x"}
    fields = {name: plain.get(name, 1) for name in kind.__struct_fields__}
    odd = [{name: value} for name in fields for value in ODD]
    bodies = [msgpack.encode({"type": tag, **fields, **change}) for change in ({}, *odd)]
    return sorted(bodies, key=lambda body: not _is_message(kind, body))


def _is_message(kind: type[msgspec.Struct], body: bytes) -> bool:
    try:
        msgpack.decode(body, type=kind)
    except (ValueError, UnicodeDecodeError):
        return False
    return True


def test_odd_join_messages_of_every_kind_cost_nobody_but_their_sender(dialer: JoinDialer) -> None:
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        for number, kind in enumerate(KNOWN_JOIN, 1):
            for body in variants(kind):
                _say(world, add_prefix(body, 2 * MAX_JOIN_BYTES))
            world.check_others(number)


def test_odd_messages_of_every_kind_cost_nobody_but_their_sender(dialer: JoinDialer) -> None:
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        for number, kind in enumerate(KNOWN, 1):
            for body in variants(kind):
                _say(world, add_prefix(msgpack.encode(SeedPaxosMessage(body)), 2 * MAX_JOIN_BYTES))
            world.check_others(number)


def test_oversize_messages_cost_nobody_but_their_sender(dialer: JoinDialer) -> None:
    with SeedService(HERE, SIZE, transports=("tls",)) as seed:
        world = World(seed, dialer)
        for number, kind in enumerate(KNOWN_JOIN, 1):
            _say(world, add_prefix(msgpack.encode({"type": kind.__struct_config__.tag, "x": bytes(1 << 20)}), 1 << 22))
            world.check_others(number)
        for number, kind in enumerate((*FrameKind, 250), 100):
            world.come_back()
            world.hostile.say(b"x" * 100, kind=int(kind), lane=Lane.CONTROL)
            world.check_others(number)


def _say(world: World, body: bytes) -> None:
    """On a new line if the last message has cost the old one."""
    while not world.hostile.received.empty():
        if world.hostile.received.get() == END:
            world.come_back()
    try:
        world.hostile.say(body)
    except Exception:  # noqa: BLE001 - it was ended meanwhile
        world.come_back()


def test_a_message_whose_handler_raises_costs_its_sender_the_line(
    dialer: JoinDialer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong in the seed itself: decided on, and in doing what was decided."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with SeedService(HERE, SIZE, transports=("tls",)) as seed, caplog.at_level(logging.CRITICAL):
        world = World(seed, dialer)
        with monkeypatch.context() as patch:
            patch.setattr(StatusBoardService, "update_report", broken)
            bulletin = msgpack.encode([0, 0])
            world.hostile.send(StatusUpdate(bulletin))
            patch.setattr("nexar.cluster.decisions.seed_voter.SeedVoteService.message_received", broken)
            world.hostile.send(SeedPaxosMessage(msgpack.encode(Chosen((0, 1, 0), b"x"))))
            wait_for_event(seed, "gone", "ZeroDivisionError")
        world.check_others(1)
        world.come_back()
        world.check_others(2)
