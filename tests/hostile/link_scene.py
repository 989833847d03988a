"""A node with a friend, and an authenticated peer that sends whatever a test likes: its links are made by hand."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Self

from nexar.links.matching import Matching
from nexar.links.messages import Receive
from nexar.security.authority import Authority
from nexar.security.certificates import Trust
from nexar.transport.base import Carrier, CarrierLost
from nexar.wire.control import Ping
from nexar.wire.control import encode as encode_message
from nexar.wire.frame import Frame, FrameKind, Lane, Space, encode
from nexar_tools.bare_nodes import RawNode
from tests.processes.talk import TalkingNode, await_that, post, receive, say

VICTIM, FRIEND, HOSTILE = 1, 2, 66
COMMUNICATOR = 5
TAG = 7


class Ears:
    """What the hostile side receives."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.ended = False

    def frame_arrived(self, carrier: Carrier, frame: Frame, body: memoryview) -> None:
        self.frames.append(frame)

    def payload_arrived(self, carrier: Carrier, transfer: int) -> None:
        """Nobody sends it any."""

    def carrier_finished(self, carrier: Carrier) -> None:
        self.ended = True

    def carrier_lost(self, carrier: Carrier, error: CarrierLost) -> None:
        self.ended = True


class Scene:
    """A `with` block. Each hostile link comes with a new generation of a communicator, so that none is over already."""

    def __init__(self, scheme: str) -> None:
        authority = Authority.create("hostile")
        trust = Trust(authority.certificate_pem)
        self.victim, self.friend = (TalkingNode(authority.admit(node), trust, [scheme]) for node in (VICTIM, FRIEND))
        self.hostile = RawNode(authority.admit(HOSTILE), trust, [scheme])
        self.to_victim = self.friend.connect(VICTIM, self.victim.addresses_for(FRIEND))
        self.generation = -1
        self.matching: Matching = self.victim.matching

    @contextmanager
    def attack(self) -> Iterator[tuple[Carrier, Ears]]:
        """A hostile connection; at the end it is gone, and the victim has been notified."""
        self.generation += 1
        self.matching = self.victim.router.open(COMMUNICATOR, self.generation)
        ears, losses = Ears(), len(self.victim.losses)
        carrier = self.hostile.connect(VICTIM, self.victim.addresses_for(HOSTILE))
        carrier.attach(ears)
        yield carrier, ears
        self._let_it_be_read(carrier, ears)
        carrier.abort("enough")
        await_that(lambda: len(self.victim.losses) > losses, "the loss of a hostile link", 10)

    def _let_it_be_read(self, carrier: Carrier, ears: Ears) -> None:
        """Until the victim has answered a ping or thrown us out; who waits for the rest of a frame does neither."""
        ping = encode_message(Ping(1))
        send(carrier, self.frame(FrameKind.CONTROL, length=len(ping), body=len(ping)), ping)  # behind the data
        received = sum(frame.kind == FrameKind.CONTROL for frame in ears.frames)
        with suppress(TimeoutError):
            answered = partial(_more_than, received, ears)
            self.hostile.drive(answered, 0.05)

    def frame(self, kind: FrameKind, **fields: int) -> Frame:
        """A frame that is in order but for what the test wants."""
        facts = {"space": Space.TAGGED, "tag": TAG, "lane": Lane.DATA, "carrier": self.carrier_number, **fields}
        return Frame(
            kind=kind,
            communicator=COMMUNICATOR,
            generation=self.generation,
            source=HOSTILE,
            destination=VICTIM,
            **facts,
        )

    @property
    def carrier_number(self) -> int:
        from nexar.links.carrier_selection import number_of

        return number_of(self.hostile.transport.scheme)

    def listen_for(self, into: memoryview | None = None) -> Receive:
        """The victim waits for a message of the hostile peer."""
        return self.matching.post(into, source=HOSTILE, space=Space.TAGGED, tag=TAG)

    def check_friend(self) -> float:
        """The victim and its friend still understand each other; seconds it took."""
        begin = time.monotonic()
        message = post(self.victim, FRIEND, 1)
        self.friend.wait(say(self.to_victim, 1, b"well?"))
        self.victim.wait(message, timeout=10)
        say(self.victim._links[FRIEND], 2, b"well.")
        assert receive(self.friend, VICTIM, 2, timeout=10) == b"well."
        return time.monotonic() - begin

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hostile.close()
        self.friend.close()
        self.victim.close()


def _more_than(received: int, ears: Ears) -> bool:
    return ears.ended or sum(frame.kind == FrameKind.CONTROL for frame in ears.frames) > received


def send(carrier: Carrier, frame: Frame, body: bytes = b"") -> bool:
    """False: the carrier is gone."""
    return send_bytes(carrier, Lane(min(frame.lane, Lane.RELAY)), encode(frame), body)


def send_bytes(carrier: Carrier, lane: Lane, header: bytes, body: bytes = b"") -> bool:
    try:
        carrier.send_frame(lane, COMMUNICATOR, header, body)
    except CarrierLost:
        return False
    return True


def resident_bytes() -> int:
    """Memory of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
