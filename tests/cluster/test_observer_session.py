"""Somebody who looks at a cluster, over real sockets to a seed of this process."""

import time

import pytest

from nexar.cluster.seed import SeedService
from nexar.cluster.seed_session import ObserverSession
from nexar.config import Config
from nexar.errors import JoinRefused, SeedUnreachable
from nexar.security.invitation import Invitation, parse_ticket
from nexar.wire.join import JoinRefusedMessage, Leave, StatusPageReply, StatusPageRequest, StatusUpdate, WatchStatus
from nexar.wire.status import StatusReport, encode_status_report
from tests.cluster.joiners import EVENT_TIMEOUT, JoinDialer, join_dialer, wait_for_event

HERE = "127.0.0.1:0"
CONFIG = Config(transports=("tls",))


def watch(seed: SeedService) -> ObserverSession:
    return ObserverSession(parse_ticket(seed.ticket), CONFIG)


def test_it_sees_members_come_speak_and_go(dialer: JoinDialer) -> None:
    with SeedService(HERE, 2, transports=(dialer.transport.scheme,)) as seed, join_dialer("tls") as others:
        config = Config(transports=(dialer.transport.scheme,))
        with ObserverSession(parse_ticket(seed.ticket), config) as onlooker:
            assert (onlooker.read_board().epoch, onlooker.read_board().joined) == (0, 0)
            if dialer.transport.scheme != "tls":
                return  # the same seed code is behind both; one is followed to the end
            lines = [others.dial(seed, node) for node in (7, 8)]
            for line in lines:
                line.join()
            seed.wait_formed(EVENT_TIMEOUT)
            for line in lines:
                line.receive_membership()
            lines[0].send(StatusUpdate(encode_status_report(StatusReport(0, 1, pid=77, operation="barrier #1"))))
            lines[1].carrier.abort("died")
            wait_for_event(seed, "gone")
            deadline = time.monotonic() + EVENT_TIMEOUT
            while (board := onlooker.read_board()).rows[0].bulletin is None:
                assert time.monotonic() < deadline
            one, other = board.rows
            assert one.bulletin is not None
            assert (one.state, one.bulletin.pid, other.state) == ("running", 77, "lost")
            assert "died" in other.cause or other.cause


def test_it_holds_no_place_and_ends_without_a_trace() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        with watch(seed):
            wait_for_event(seed, "watching")
        wait_for_event(seed, "left", "the observer closed")
        dialer.dial(seed, 7).join()
        assert seed.wait_formed(EVENT_TIMEOUT).size == 1


def test_who_does_not_know_the_secret_sees_nothing() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        wrong = Invitation(parse_ticket(seed.ticket).addresses, bytes(32), parse_ticket(seed.ticket).fingerprint)
        with pytest.raises(SeedUnreachable, match="cannot prove that it knows the secret"):
            ObserverSession(wrong, CONFIG, timeout=EVENT_TIMEOUT)
        line = dialer.dial(seed, 7)
        line.greet("onlooker")
        line.send(WatchStatus(bytes(32)))
        assert "does not match this cluster" in line.receive(JoinRefusedMessage).reason
        line = dialer.dial(seed, 8)
        line.greet("onlooker")
        line.send(StatusPageRequest())
        assert "without a proof of the secret" in line.receive(JoinRefusedMessage).reason


def test_a_proof_of_another_role_does_not_let_one_watch_nor_one_of_an_observer_let_one_in() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        line = dialer.dial(seed, 7)
        line.send(WatchStatus(line.prove(line.greet("onlooker"), "candidate")))
        assert "does not match this cluster" in line.receive(JoinRefusedMessage).reason
        line = dialer.dial(seed, 8)
        line.send(line.application(line.prove(line.greet("candidate"), "onlooker")))
        assert "does not match this cluster" in line.receive(JoinRefusedMessage).reason


def test_an_observer_that_speaks_like_a_member_is_refused_and_one_that_leaves_may() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        line = dialer.dial(seed, 7)
        line.send(WatchStatus(line.prove(line.greet("onlooker"), "onlooker")))
        line.receive(StatusPageReply)
        line.send(StatusUpdate(encode_status_report(StatusReport(0, 1))))
        assert "before it was admitted" in line.receive(JoinRefusedMessage).reason
        line = dialer.dial(seed, 8)
        line.send(WatchStatus(line.prove(line.greet("onlooker"), "onlooker")))
        line.receive(StatusPageReply)
        line.send(StatusPageRequest(1000))
        assert line.receive(StatusPageReply).board.rows == ()
        line.send(Leave())
        line.receive_end()


def test_a_bulletin_that_is_nonsense_costs_nobody_its_place() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, join_dialer("tls") as dialer:
        line = dialer.dial(seed, 7)
        line.join()
        line.receive_membership()
        line.send(StatusUpdate(b"\xc1 what nobody can read"))
        line.send(StatusUpdate(encode_status_report(StatusReport(0, 1, pid=5))))
        deadline = time.monotonic() + EVENT_TIMEOUT
        while (row := seed.board().rows[0]).bulletin is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert row.state == "running"


def test_a_seed_that_is_gone_is_named() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed:
        onlooker = watch(seed)
    with onlooker, pytest.raises((SeedUnreachable, JoinRefused)) as gone:
        onlooker.read_board()
    if isinstance(gone.value, SeedUnreachable):
        assert "the cluster has ended" in str(gone.value)
    with pytest.raises(SeedUnreachable):
        ObserverSession(parse_ticket(seed.ticket), CONFIG, timeout=0.3)


def test_who_is_in_a_hurry_does_not_wait_where_nobody_listens() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed:
        ticket = parse_ticket(seed.ticket)
        ObserverSession(ticket, CONFIG, timeout=EVENT_TIMEOUT, hurry=True).close()
    begin = time.monotonic()
    with pytest.raises(SeedUnreachable, match="Connection refused"):
        ObserverSession(ticket, CONFIG, timeout=600.0, hurry=True)
    assert time.monotonic() - begin < 60
