"""Somebody who looks at a cluster, over real sockets to a seed of this process."""

import time

import pytest

from nexar.cluster.onlooker import Onlooker
from nexar.cluster.seed import Seed
from nexar.config import Config
from nexar.errors import JoinRefused, SeedUnreachable
from nexar.security.invitation import Invitation
from nexar.security.join_ticket import parse_ticket
from nexar.wire.bulletin import Bulletin, encode_bulletin
from nexar.wire.joining import Leave, Look, News, Refused, Shown, Watch
from tests.cluster.guests import PATIENCE, Knocker, knocking, wait_for_event

HERE = "127.0.0.1:0"
CONFIG = Config(transports=("tls",))


def watch(seed: Seed) -> Onlooker:
    return Onlooker(parse_ticket(seed.ticket), CONFIG)


def test_it_sees_members_come_speak_and_go(knocker: Knocker) -> None:
    with Seed(HERE, 2, transports=(knocker.transport.scheme,)) as seed, knocking("tls") as others:
        config = Config(transports=(knocker.transport.scheme,))
        with Onlooker(parse_ticket(seed.ticket), config) as onlooker:
            assert (onlooker.look().epoch, onlooker.look().joined) == (0, 0)
            if knocker.transport.scheme != "tls":
                return  # the same seed code is behind both; one is followed to the end
            lines = [others.knock(seed, node) for node in (7, 8)]
            for line in lines:
                line.join()
            seed.wait_formed(PATIENCE)
            for line in lines:
                line.hear_membership()
            lines[0].send(News(encode_bulletin(Bulletin(0, 1, pid=77, operation="barrier #1"))))
            lines[1].carrier.abort("died")
            wait_for_event(seed, "gone")
            deadline = time.monotonic() + PATIENCE
            while (board := onlooker.look()).rows[0].bulletin is None:
                assert time.monotonic() < deadline
            one, other = board.rows
            assert one.bulletin is not None
            assert (one.state, one.bulletin.pid, other.state) == ("running", 77, "lost")
            assert "died" in other.cause or other.cause


def test_it_holds_no_place_and_ends_without_a_trace() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed, knocking("tls") as knocker:
        with watch(seed):
            wait_for_event(seed, "watching")
        wait_for_event(seed, "left", "seen enough")
        knocker.knock(seed, 7).join()
        assert seed.wait_formed(PATIENCE).size == 1


def test_who_does_not_know_the_secret_sees_nothing() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed, knocking("tls") as knocker:
        wrong = Invitation(parse_ticket(seed.ticket).addresses, bytes(32), parse_ticket(seed.ticket).fingerprint)
        with pytest.raises(SeedUnreachable, match="cannot prove that it knows the secret"):
            Onlooker(wrong, CONFIG, timeout=PATIENCE)
        line = knocker.knock(seed, 7)
        line.greet("onlooker")
        line.send(Watch(bytes(32)))
        assert "does not open this cluster" in line.hear(Refused).reason
        line = knocker.knock(seed, 8)
        line.greet("onlooker")
        line.send(Look())
        assert "has not proven that it may" in line.hear(Refused).reason


def test_a_proof_of_another_role_does_not_let_one_watch_nor_one_of_a_onlooker_let_one_in() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed, knocking("tls") as knocker:
        line = knocker.knock(seed, 7)
        line.send(Watch(line.prove(line.greet("onlooker"), "candidate")))
        assert "does not open this cluster" in line.hear(Refused).reason
        line = knocker.knock(seed, 8)
        line.send(line.application(line.prove(line.greet("candidate"), "onlooker")))
        assert "does not open this cluster" in line.hear(Refused).reason


def test_a_onlooker_that_speaks_like_a_member_is_refused_and_one_that_leaves_may() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed, knocking("tls") as knocker:
        line = knocker.knock(seed, 7)
        line.send(Watch(line.prove(line.greet("onlooker"), "onlooker")))
        line.hear(Shown)
        line.send(News(encode_bulletin(Bulletin(0, 1))))
        assert "before it was let in" in line.hear(Refused).reason
        line = knocker.knock(seed, 8)
        line.send(Watch(line.prove(line.greet("onlooker"), "onlooker")))
        line.hear(Shown)
        line.send(Look(1000))
        assert line.hear(Shown).board.rows == ()
        line.send(Leave())
        line.hear_end()


def test_a_bulletin_that_is_nonsense_costs_nobody_its_place() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed, knocking("tls") as knocker:
        line = knocker.knock(seed, 7)
        line.join()
        line.hear_membership()
        line.send(News(b"\xc1 what nobody can read"))
        line.send(News(encode_bulletin(Bulletin(0, 1, pid=5))))
        deadline = time.monotonic() + PATIENCE
        while (row := seed.board().rows[0]).bulletin is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert row.state == "running"


def test_a_seed_that_is_gone_is_named() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed:
        onlooker = watch(seed)
    with onlooker, pytest.raises((SeedUnreachable, JoinRefused)) as gone:
        onlooker.look()
    if isinstance(gone.value, SeedUnreachable):
        assert "the cluster has ended" in str(gone.value)
    with pytest.raises(SeedUnreachable):
        Onlooker(parse_ticket(seed.ticket), CONFIG, timeout=0.3)


def test_who_is_in_a_hurry_does_not_wait_where_nobody_listens() -> None:
    with Seed(HERE, 1, transports=("tls",)) as seed:
        ticket = parse_ticket(seed.ticket)
        Onlooker(ticket, CONFIG, timeout=PATIENCE, hurry=True).close()
    begin = time.monotonic()
    with pytest.raises(SeedUnreachable, match="Connection refused"):
        Onlooker(ticket, CONFIG, timeout=600.0, hurry=True)
    assert time.monotonic() - begin < 60
