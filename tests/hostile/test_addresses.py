"""A member with an address that nobody can parse is refused, whoever brings it: it would end whoever dials it."""

import pytest
from msgspec import msgpack
from msgspec.structs import replace

from nexar.cluster.membership import (
    Change,
    Member,
    Membership,
    MembershipError,
    decode_member,
    decode_membership,
    encode_member,
    encode_membership,
)
from nexar.cluster.seed import SeedService
from nexar.errors import UsageError
from nexar.transport.address import parse_address
from nexar.wire.control import Chosen
from nexar.wire.join import JoinRefusedMessage, JoinRequest, SeedPaxosMessage, Welcome
from tests.cluster.joiners import join_dialer
from tests.hostile.test_members_among_members import World as MemberWorld
from tests.hostile.test_members_at_the_seed import HERE, SIZE, World

BAD = [
    "no address",
    "host",
    "host:0",
    ":80",
    "host:99999",
    "a..b:1",
    f"{'h' * 64}:1",
    "[::1:5",
    "[fe80::1%\u2603]:5",
    "::1:5",
]


def _joiner(address: str) -> Member:
    return Member(4711, "there", bytes(32), {"tls": (address,)})


def _telling(asked: JoinRequest, addresses: dict[str, tuple[str, ...]]) -> JoinRequest:
    return replace(asked, addresses=addresses)


@pytest.mark.parametrize("name", ["a..b", ".a", "h" * 64, f"x.{'h' * 64}.example"])
def test_a_name_that_the_resolver_cannot_encode_is_no_address(name: str) -> None:
    with pytest.raises(UsageError, match="not a host name or an IP address"):
        parse_address(f"{name}:1")
    assert parse_address(f"{'h' * 63}.example.:1")[1] == 1


@pytest.mark.parametrize("address", BAD)
def test_a_member_or_membership_with_such_an_address_is_none(address: str) -> None:
    member = _joiner(address)
    with pytest.raises(MembershipError, match="cannot be dialed"):
        decode_member(encode_member(member))
    with pytest.raises(MembershipError, match="cannot be dialed"):
        decode_membership(encode_membership(Membership("ours", 1, (member,))))


@pytest.mark.parametrize("scheme", ["tls", "quic"])
@pytest.mark.parametrize("address", BAD)
def test_a_candidate_with_such_an_address_is_refused_by_name(scheme: str, address: str) -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        line = dialer.dial(seed, 7)
        line.send(_telling(line.application(line.prove(line.greet())), {scheme: (address,)}))
        reason = line.receive(JoinRefusedMessage).reason
        assert scheme in reason
        assert "NEXAR_ADVERTISE" in reason
        honest = dialer.dial(seed, 8)
        honest.join()
        assert honest.receive_membership().size == 1


def test_a_transport_of_its_own_form_may_have_any_address() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        line = dialer.dial(seed, 7)
        reported = {"paper": ("pigeon 7",), "tls": ("10.0.0.1:1",)}
        line.send(_telling(line.application(line.prove(line.greet())), reported))
        line.receive(Welcome)


def test_a_change_with_such_a_joiner_is_followed_by_no_seed() -> None:
    with SeedService(HERE, SIZE, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        world = World(seed, dialer)
        for number, address in enumerate(BAD, 1):
            world.hostile.send(
                SeedPaxosMessage(msgpack.encode(Chosen((0, 1, 0), Change(2, joined=(_joiner(address),)).encode())))
            )
            world.check_others(number)
        assert seed.membership == world.membership


def test_a_change_with_such_a_joiner_is_followed_by_no_member() -> None:
    world = MemberWorld("tls")
    try:
        for address in BAD:
            world.say(msgpack.encode(Chosen((0, 1, 0), Change(2, joined=(_joiner(address),)).encode())))
        world.check_others()
        assert {part._runtime.membership_service.membership.epoch for part in world.parts} == {1}
    finally:
        world.close()
