"""A member with a valid certificate says what it likes to another one: it loses its link, and the others go on."""

import logging
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from msgspec import msgpack

from nexar.communicator.communicator import Communicator
from nexar.errors import NexarError
from nexar.links.link import Link
from nexar.transport.base import CarrierLost
from nexar.wire.control import KNOWN, MAX_MESSAGE_BYTES, Chosen, Goodbye
from nexar.wire.frame import Frame, FrameKind, Lane, Space, encode
from nexar_tools.transports import why_unavailable
from tests.cluster.test_bootstrap import Cluster, config
from tests.hostile.test_members_at_the_seed import oversize, variants
from tests.ranks import on_every

EVENT_TIMEOUT = 60.0
SCHEMES = [
    pytest.param("tls"),
    pytest.param(
        "quic", marks=pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
    ),
]


class World:
    """Four members; the last is hostile, the first is whom it talks to. The others have a communicator of their own."""

    def __init__(self, scheme: str) -> None:
        self.cluster = Cluster(4, config((scheme,)))
        *others, self.hostile = self.cluster.ranks
        self.parts = on_every(others, _without_the_last)
        self.victim = others[0]._runtime.node.id

    def link(self) -> Link | None:
        """To the victim; another one if what was said has cost the last. None: the victim wants none."""
        mesh = self.hostile._runtime.mesh
        link = mesh.links().get(self.victim)
        if link is not None and link.failure is None:
            return link
        try:
            return mesh.relink(self.victim, time.monotonic() + 5)
        except NexarError:
            return None

    def say(self, body: bytes, kind: int = FrameKind.CONTROL, lane: Lane = Lane.CONTROL, **facts: int) -> None:
        """Whatever it is. What comes of it, the others show."""
        link = self.link()
        carrier = None if link is None else link._state.carrier
        if carrier is None:
            return
        me = self.hostile._runtime.node.id
        frame = Frame(
            kind=kind, lane=lane, source=me, destination=self.victim, length=len(body), body=len(body), **facts
        )
        try:
            carrier.send_frame(lane, 0, encode(frame), body)
        except CarrierLost:
            return

    def wait_for_loss(self) -> None:
        """Until what was said has cost the hostile member its link."""
        deadline, mesh = time.monotonic() + EVENT_TIMEOUT, self.hostile._runtime.mesh
        while (link := mesh.links().get(self.victim)) is not None and link.failure is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def check_others(self) -> None:
        """What they have in common goes on, without a successor: the hostile member has no part in it."""
        assert on_every(self.parts, lambda part: part.all_reduce(np.ones(1), timeout=EVENT_TIMEOUT)[0]) == [3.0] * 3

    def close(self) -> None:
        self.cluster.close()


def _without_the_last(comm: Communicator) -> Communicator:
    part = comm.group(range(comm.size - 1))
    assert part is not None
    return part


@pytest.fixture(params=SCHEMES)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("which", [0, 1])
def test_a_chosen_membership_beyond_the_limits_changes_nothing(world: World, which: int) -> None:
    membership = world.hostile.membership
    world.say(msgpack.encode(Chosen((0, membership.epoch, 0), oversize(membership)[which].encode())))
    world.check_others()
    assert all(part._runtime.membership_service.membership.size == membership.size for part in world.parts)


def test_odd_messages_of_every_kind_disturb_nobody_else(world: World) -> None:
    for kind in sorted(KNOWN, key=lambda kind: kind is Goodbye):  # who has said goodbye gets no other link
        for body in variants(kind):
            world.say(body)
        world.check_others()


def test_oversize_messages_and_frames_of_every_kind_disturb_nobody_else(world: World) -> None:
    for kind in KNOWN:
        world.say(msgpack.encode({"type": kind.__struct_config__.tag, "more": bytes(MAX_MESSAGE_BYTES)}))
    world.check_others()
    for kind in (*FrameKind, 250):
        for lane in (Lane.CONTROL, Lane.DATA):
            world.say(b"\xff" * 300, kind=int(kind), lane=lane, transfer=1)
        world.check_others()


def test_odd_remote_calls_disturb_nobody_else(world: World) -> None:
    for space in Space:
        for body in (b"", b"\xff" * 17, bytes(64), b"\x00\x00\x00\x00\xff\xff\xff\xff" * 9):
            world.say(body, kind=FrameKind.EAGER, lane=Lane.DATA, communicator=1 << 63, space=int(space), tag=7)
    world.check_others()


def test_a_message_whose_handler_raises_costs_its_sender_the_link_and_nobody_else_anything(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    raised = threading.Event()

    def broken(*_: object) -> None:
        raised.set()
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch, caplog.at_level(logging.CRITICAL):
        patch.setattr("nexar.cluster.agreements.Agreements.receive", broken)
        world.say(msgpack.encode(Chosen((5, 1, 5), b"")))
        assert raised.wait(EVENT_TIMEOUT)
        world.wait_for_loss()
    world.check_others()
