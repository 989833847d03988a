import asyncio
import logging
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from nexar.cluster.membership import MAX_MEMBERS, Membership
from nexar.cluster.seed import SeedService
from nexar.config import Config
from nexar.errors import ConfigError, FormationTimeout, UsageError
from nexar.security.authority import make_key
from nexar.security.certificates import fingerprint, make_request
from nexar.security.invitation import Invitation, invitation_from_token, parse_ticket
from nexar.testing.transports import why_unavailable
from nexar.wire.join import ChildDied, FormationFailed, JoinRefusedMessage, Leave, Renew, Renewed
from tests.cluster.joiners import Knocker, Line, knocking, wait_for_event

HERE = "127.0.0.1:0"


def form(seed: SeedService, *knockers: Knocker) -> tuple[list[Line], Membership]:
    """As many members as it takes, knocking in turns."""
    lines = [knockers[number % len(knockers)].knock(seed, 100 + number) for number in range(seed.size)]
    for line in lines:
        line.join()
    memberships = [line.hear_membership() for line in lines]
    assert all(each == memberships[0] for each in memberships)
    return lines, memberships[0]


def test_four_form_a_cluster(knocker: Knocker) -> None:
    with SeedService(HERE, 4) as seed:
        lines, membership = form(seed, knocker)
        assert seed.wait_formed(20) == membership == seed.membership
        assert (membership.size, membership.epoch) == (4, 1)
        for line in lines:
            assert membership.pin(line.node) == fingerprint(line.key.public_key())
        assert membership.seed is not None
        assert membership.seed.fingerprint == parse_ticket(seed.ticket).fingerprint


@pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
def test_some_come_over_quic_and_some_over_tls_through_one_port() -> None:
    with SeedService(HERE, 4) as seed, knocking("quic") as quick, knocking("tls") as old:
        _, membership = form(seed, quick, old)
        assert membership.size == 4


def test_a_member_gets_a_certificate_for_its_own_key_by_the_clusters_authority(knocker: Knocker) -> None:
    with SeedService(HERE, 1, certificate_lifetime=3600) as seed:
        line = knocker.knock(seed, 7)
        welcome = line.join()
        certificate = x509.load_pem_x509_certificate(welcome.certificate)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(welcome.authority))
        assert fingerprint(certificate.public_key()) == fingerprint(line.key.public_key())
        assert certificate.not_valid_after_utc - datetime.now(UTC) <= timedelta(hours=1)
        assert welcome.size == 1
        assert welcome.seen_address.startswith("127.0.0.1:")
        assert line.hear_membership().cluster == welcome.cluster


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


def test_who_knows_the_token_needs_no_ticket(knocker: Knocker) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with SeedService(HERE, 1, config=Config(cluster_token=token)) as seed:
        line = knocker.knock(seed, 7, invitation_from_token(token, [seed.address]))
        line.join()
        assert line.hear_membership().size == 1


def test_a_launcher_gets_a_block_of_ranks_and_its_children_take_them(knocker: Knocker) -> None:
    with SeedService(HERE, 2) as seed:
        launcher = knocker.knock(seed, 50)
        welcome = launcher.reserve(2)
        assert (welcome.first_rank, welcome.group_rank, welcome.size) == (0, 0, 2)
        for rank in (1, 0):
            knocker.knock(seed, 100 + rank).join(rank=rank, launcher=50)
        membership = launcher.hear_membership()
        assert [member.node for member in membership.members] == [100, 101]
        assert membership.pin(50) == fingerprint(launcher.key.public_key())
        launcher.send(ChildDied(1, "killed by signal 9"))
        wait_for_event(seed, "child died", "signal 9")


# ---------------------------------------------------------------- leaving, renewing


def test_the_seed_notices_when_every_member_has_left_or_is_gone(knocker: Knocker) -> None:
    with SeedService(HERE, 3) as seed:
        lines, _ = form(seed, knocker)
        seed.wait_formed(20)
        assert not seed.wait_empty(0)
        lines[0].send(Leave("done"))
        lines[0].hear_end()
        lines[1].carrier.finish()
        assert not seed.wait_empty(0)
        lines[2].carrier.abort("killed")
        assert seed.wait_empty(20)
        assert {note.kind for note in seed.events[-3:]} == {"left", "gone"}


def test_a_member_renews_its_certificate_for_the_same_key(knocker: Knocker) -> None:
    with SeedService(HERE, 1) as seed:
        (line,), _ = form(seed, knocker)
        line.send(Renew(make_request(line.node, line.key)))
        renewed = x509.load_pem_x509_certificate(line.hear(Renewed).certificate)
        assert fingerprint(renewed.public_key()) == fingerprint(line.key.public_key())


def test_a_member_that_renews_for_another_key_is_refused(knocker: Knocker) -> None:
    with SeedService(HERE, 1) as seed:
        (line,), _ = form(seed, knocker)
        line.send(Renew(make_request(line.node, make_key())))
        assert "another key" in line.hear(JoinRefusedMessage).reason


def test_closing_the_seed_early_tells_those_who_wait(knocker: Knocker) -> None:
    seed = SeedService(HERE, 2)
    line = knocker.knock(seed, 7)
    line.join()
    seed.close()
    assert "closed" in line.hear(JoinRefusedMessage).reason
    line.hear_end()
    with pytest.raises(UsageError, match="closed"):
        seed.wait_formed()


def test_closing_a_seed_right_after_the_commit_loses_no_membership(knocker: Knocker) -> None:
    with SeedService(HERE, 4) as seed:
        lines = [knocker.knock(seed, 100 + number) for number in range(4)]
        for line in lines:
            line.join()
        seed.wait_formed(20)
    for line in lines:
        assert line.hear_membership().size == 4
        line.hear_end()


def test_ten_seeds_leave_nothing_behind(knocker: Knocker) -> None:
    for _ in range(10):
        with SeedService(HERE, 1) as seed:
            form(seed, knocker)
            seed.wait_formed(20)


def test_a_seed_serves_a_task(knocker: Knocker) -> None:
    async def run() -> Membership:
        async with SeedService(HERE, 1) as seed:
            waiting = asyncio.create_task(seed.formed())
            await asyncio.to_thread(form, seed, knocker)
            return await waiting

    assert asyncio.run(run()).size == 1


# ---------------------------------------------------------------- formations that fail


def test_at_the_end_of_the_time_everybody_learns_who_is_missing(knocker: Knocker) -> None:
    with SeedService(HERE, 3, formation_timeout=2.0) as seed:
        lines = [knocker.knock(seed, node) for node in (7, 8)]
        for line in lines:
            line.join()
        stranger = knocker.knock(seed, 9, Invitation((seed.address,), bytes(32)))
        stranger.hello()
        with pytest.raises(FormationTimeout) as raised:
            seed.wait_formed()
        assert len(raised.value.joined) == 2
        assert raised.value.expected == 3
        for line in lines:
            told = line.hear(FormationFailed)
            assert (list(told.joined), told.expected) == (list(raised.value.joined), 3)
            line.hear_end()
        assert seed.wait_empty(0)


def test_who_knocks_when_it_is_over_is_told_so(knocker: Knocker) -> None:
    with SeedService(HERE, 2, formation_timeout=0.1) as seed:
        with pytest.raises(FormationTimeout):
            seed.wait_formed()
        assert "did not form" in knocker.knock(seed, 7).hear(JoinRefusedMessage).reason


def test_who_waits_less_long_learns_who_has_come_so_far(knocker: Knocker) -> None:
    with SeedService(HERE, 2) as seed:
        knocker.knock(seed, 7).join()
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


def test_the_log_says_what_happens_and_no_secret(knocker: Knocker, caplog: pytest.LogCaptureFixture) -> None:
    token = "0123456789abcdef0123456789abcdef"
    with caplog.at_level(logging.DEBUG), SeedService(HERE, 1, cluster_token=token) as seed:
        form(seed, knocker)
        seed.wait_formed(20)
        wait_for_event(seed, "committed")
    assert "admitted: rank 0" in caplog.text or "admitted: node" in caplog.text
    assert token not in caplog.text
    assert seed.ticket not in caplog.text


def test_events_are_told_as_they_happen(knocker: Knocker) -> None:
    told: list[str] = []
    with ExitStack() as stack:
        seed = stack.enter_context(SeedService(HERE, 1, on_event=lambda note: told.append(note.kind)))
        form(seed, knocker)
        wait_for_event(seed, "committed")
        assert told[:3] == ["knocked", "admitted", "committed"]
