import asyncio
import logging
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from nexar.cluster.membership import MAX_MEMBERS, Membership, pin_of
from nexar.cluster.seed import SeedService
from nexar.config import Config
from nexar.errors import ConfigError, FormationTimeout, UsageError
from nexar.security.authority import make_key
from nexar.security.certificates import fingerprint, make_request
from nexar.security.invitation import Invitation, invitation_from_token, parse_ticket
from nexar.wire.join import ChildDied, FormationFailed, JoinRefusedMessage, Leave, Renew, Renewed
from nexar_tools.transports import why_unavailable
from tests.cluster.joiners import JoinDialer, Line, join_dialer, wait_for_event

HERE = "127.0.0.1:0"


def form(seed: SeedService, *dialers: JoinDialer) -> tuple[list[Line], Membership]:
    """As many members as it takes, dialing in turns."""
    lines = [dialers[number % len(dialers)].dial(seed, 100 + number) for number in range(seed.size)]
    for line in lines:
        line.join()
    memberships = [line.receive_membership() for line in lines]
    assert all(each == memberships[0] for each in memberships)
    return lines, memberships[0]


def test_four_form_a_cluster(dialer: JoinDialer) -> None:
    with SeedService(HERE, 4) as seed:
        lines, membership = form(seed, dialer)
        assert seed.wait_formed(20) == membership == seed.membership
        assert (membership.size, membership.epoch) == (4, 1)
        for line in lines:
            assert pin_of(membership, line.node) == fingerprint(line.key.public_key())
        assert membership.seed is not None
        assert membership.seed.fingerprint == parse_ticket(seed.ticket).fingerprint


@pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
def test_some_come_over_quic_and_some_over_tls_through_one_port() -> None:
    with SeedService(HERE, 4) as seed, join_dialer("quic") as quick, join_dialer("tls") as old:
        _, membership = form(seed, quick, old)
        assert membership.size == 4


def test_a_member_gets_a_certificate_for_its_own_key_by_the_clusters_authority(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1, certificate_lifetime=3600) as seed:
        line = dialer.dial(seed, 7)
        welcome = line.join()
        certificate = x509.load_pem_x509_certificate(welcome.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(welcome.authority))
        assert fingerprint(certificate.public_key()) == fingerprint(line.key.public_key())
        assert certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=1)
        assert welcome.size == 1
        assert welcome.seen_address.startswith("127.0.0.1:")
        assert line.receive_membership().cluster == welcome.cluster


def test_the_ticket_names_the_real_port_and_pins_the_seeds_key() -> None:
    with SeedService(HERE, 1) as seed:
        invitation = parse_ticket(seed.ticket)
        assert invitation.addresses == (seed.address,)
        assert not seed.address.endswith(":0")
        assert seed.ticket not in repr(seed)


def test_the_ticket_of_a_seed_on_every_interface_names_addresses_and_no_wildcard() -> None:
    with SeedService(size=1) as seed:
        port = seed.address.rpartition(":")[2]
        addresses = parse_ticket(seed.ticket).addresses
        assert addresses
        assert all(address.endswith(f":{port}") and not address.startswith("[::]") for address in addresses)


def test_two_seeds_never_make_the_same_ticket_or_cluster() -> None:
    with SeedService(HERE, 1) as one, SeedService(HERE, 1) as other:
        assert parse_ticket(one.ticket).secret != parse_ticket(other.ticket).secret
        assert parse_ticket(one.ticket).fingerprint != parse_ticket(other.ticket).fingerprint


def test_who_knows_the_token_needs_no_ticket(dialer: JoinDialer) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with SeedService(HERE, 1, config=Config(cluster_token=token)) as seed:
        line = dialer.dial(seed, 7, invitation_from_token(token, [seed.address]))
        line.join()
        assert line.receive_membership().size == 1


def test_a_launcher_gets_a_block_of_ranks_and_its_children_take_them(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        launcher = dialer.dial(seed, 50)
        welcome = launcher.reserve(2)
        assert (welcome.first_rank, welcome.group_rank, welcome.size) == (0, 0, 2)
        for rank in (1, 0):
            dialer.dial(seed, 100 + rank).join(rank=rank, launcher=50)
        membership = launcher.receive_membership()
        assert [member.node for member in membership.members] == [100, 101]
        assert pin_of(membership, 50) == fingerprint(launcher.key.public_key())
        launcher.send(ChildDied(1, "killed by signal 9"))
        wait_for_event(seed, "child died", "signal 9")


# ---------------------------------------------------------------- leaving, renewing


def test_the_seed_notices_when_every_member_has_left_or_is_gone(dialer: JoinDialer) -> None:
    with SeedService(HERE, 3) as seed:
        lines, _ = form(seed, dialer)
        seed.wait_formed(20)
        assert not seed.wait_empty(0)
        lines[0].send(Leave("done"))
        lines[0].receive_end()
        lines[1].carrier.finish()
        assert not seed.wait_empty(0)
        lines[2].carrier.abort("killed")
        assert seed.wait_empty(20)
        assert {note.kind for note in seed.events[-3:]} == {"left", "gone"}


def test_a_member_renews_its_certificate_for_the_same_key(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1) as seed:
        (line,), _ = form(seed, dialer)
        line.send(Renew(make_request(line.node, line.key)))
        renewed = x509.load_pem_x509_certificate(line.receive(Renewed).certificate)
        assert fingerprint(renewed.public_key()) == fingerprint(line.key.public_key())


def test_a_member_that_renews_for_another_key_is_refused(dialer: JoinDialer) -> None:
    with SeedService(HERE, 1) as seed:
        (line,), _ = form(seed, dialer)
        line.send(Renew(make_request(line.node, make_key())))
        assert "another key" in line.receive(JoinRefusedMessage).reason


def test_closing_the_seed_early_notifies_those_who_wait(dialer: JoinDialer) -> None:
    seed = SeedService(HERE, 2)
    line = dialer.dial(seed, 7)
    line.join()
    seed.close()
    assert "closed" in line.receive(JoinRefusedMessage).reason
    line.receive_end()
    with pytest.raises(UsageError, match="closed"):
        seed.wait_formed()


def test_closing_a_seed_right_after_the_commit_loses_no_membership(dialer: JoinDialer) -> None:
    with SeedService(HERE, 4) as seed:
        lines = [dialer.dial(seed, 100 + number) for number in range(4)]
        for line in lines:
            line.join()
        seed.wait_formed(20)
    for line in lines:
        assert line.receive_membership().size == 4
        line.receive_end()


def test_ten_seeds_leave_nothing_behind(dialer: JoinDialer) -> None:
    for _ in range(10):
        with SeedService(HERE, 1) as seed:
            form(seed, dialer)
            seed.wait_formed(20)


def test_a_seed_serves_a_task(dialer: JoinDialer) -> None:
    async def run() -> Membership:
        async with SeedService(HERE, 1) as seed:
            waiting = asyncio.create_task(seed.formed())
            await asyncio.to_thread(form, seed, dialer)
            return await waiting

    assert asyncio.run(run()).size == 1


# ---------------------------------------------------------------- formations that fail


def test_at_the_end_of_the_time_everybody_learns_who_is_missing(dialer: JoinDialer) -> None:
    with SeedService(HERE, 3, formation_timeout=2.0) as seed:
        lines = [dialer.dial(seed, node) for node in (7, 8)]
        for line in lines:
            line.join()
        unauthenticated = dialer.dial(seed, 9, Invitation((seed.address,), bytes(32)))
        unauthenticated.hello()
        with pytest.raises(FormationTimeout) as raised:
            seed.wait_formed()
        assert len(raised.value.joined) == 2
        assert raised.value.expected == 3
        for line in lines:
            reported = line.receive(FormationFailed)
            assert (list(reported.joined), reported.expected) == (list(raised.value.joined), 3)
            line.receive_end()
        assert seed.wait_empty(0)


def test_who_dials_when_it_is_over_is_notified(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2, formation_timeout=0.1) as seed:
        with pytest.raises(FormationTimeout):
            seed.wait_formed()
        assert "did not form" in dialer.dial(seed, 7).receive(JoinRefusedMessage).reason


def test_who_waits_less_long_learns_who_has_come_so_far(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2) as seed:
        dialer.dial(seed, 7).join()
        with pytest.raises(FormationTimeout, match="0000000000000007") as raised:
            seed.wait_formed(0.01)
        assert raised.value.expected == 2


# ---------------------------------------------------------------- use and misuse


@pytest.mark.parametrize("size", [None, 0, -1, MAX_MEMBERS + 1, "2", 2.0])
def test_a_seed_needs_a_size(size: int | None) -> None:
    with pytest.raises(UsageError, match=f"needs the size of its cluster, 1 to {MAX_MEMBERS} members"):
        SeedService(HERE, size)


def test_a_taken_port_is_named() -> None:
    with SeedService(HERE, 1) as seed, pytest.raises(UsageError, match=seed.address):
        SeedService(seed.address, 1)


def test_settings_are_those_of_the_config() -> None:
    with pytest.raises(ConfigError, match="NEXAR_JOIN_MAX_PENDING"):
        SeedService(HERE, 1, join_max_pending=0)


def test_the_log_says_what_happens_and_no_secret(dialer: JoinDialer, caplog: pytest.LogCaptureFixture) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with caplog.at_level(logging.DEBUG), SeedService(HERE, 1, cluster_token=token) as seed:
        form(seed, dialer)
        seed.wait_formed(20)
        wait_for_event(seed, "committed")
    assert "admitted: rank 0" in caplog.text or "admitted: node" in caplog.text
    assert token not in caplog.text
    assert seed.ticket not in caplog.text


def test_events_are_reported_as_they_happen(dialer: JoinDialer) -> None:
    reported: list[str] = []
    with ExitStack() as stack:
        seed = stack.enter_context(SeedService(HERE, 1, on_event=lambda note: reported.append(note.kind)))
        form(seed, dialer)
        wait_for_event(seed, "committed")
        assert reported[:3] == ["knocked", "admitted", "committed"]
