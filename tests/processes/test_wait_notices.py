"""init(), `nexar run` and `nexar doctor` report what they wait for; the seed reports whom it has turned away."""

import re
import signal
import socket
from contextlib import ExitStack

import pytest

import nexar
from tests.cluster.joiners import wait_for_event
from tests.ports import free_port
from tests.processes.nexar_command import INTRODUCE, Nexar, Python, introductions

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"
OTHER_TOKEN = "6a2e8d1b04cf59f3b7e5d9018c4f0b26"
EVENT_TIMEOUT = 90.0


@pytest.fixture
def start(tmp_path):
    """Start a command that has ended when the test has."""
    with ExitStack() as running:
        yield lambda kind, *arguments, **more: running.enter_context(kind(*arguments, cwd=tmp_path, **more))


def rank_names(rank, size):
    """What torchrun gives to a rank."""
    local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **local}


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "arguments"),
    [(Python, [INTRODUCE]), (Nexar, ["run", "-n", 2, INTRODUCE]), (Nexar, ["doctor"])],
    ids=["init", "run", "doctor"],
)
def test_who_finds_no_seed_says_where_and_why_and_how_long_it_will_try(start, program, arguments):
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        settings = {"NEXAR_CLUSTER_TOKEN": TOKEN, "NEXAR_SEED": address, "NEXAR_FORMATION_TIMEOUT_SECS": "5"}
        ran = start(program, *arguments, NEXAR_TRANSPORTS="tls", **settings)
        assert ran.end(EVENT_TIMEOUT) != 0
    line = rf"nexar: no seed answers at {re.escape(address)}: .*[Rr]efused.*; trying for \d s more"
    assert re.search(line, ran.stderr), ran.stderr


def test_a_name_that_cannot_be_resolved_is_called_so(start):
    settings = {"NEXAR_CLUSTER_TOKEN": TOKEN, "NEXAR_SEED": "nosuch.invalid:1", "NEXAR_FORMATION_TIMEOUT_SECS": "1"}
    ran = start(Python, INTRODUCE, NEXAR_TRANSPORTS="tls", **settings)
    assert ran.end(EVENT_TIMEOUT) != 0
    assert "the host name 'nosuch.invalid' cannot be resolved" in ran.stderr


def test_the_seed_logs_the_address_of_who_has_another_token(start):
    address = f"127.0.0.1:{free_port()}"
    seed = start(Nexar, "seed", "--size", 2, "--listen", address, NEXAR_CLUSTER_TOKEN=TOKEN)
    wrong = start(Python, INTRODUCE, NEXAR_CLUSTER_TOKEN=OTHER_TOKEN, NEXAR_SEED=address)
    assert wrong.end(EVENT_TIMEOUT) != 0
    seed.process.send_signal(signal.SIGINT)
    seed.end(EVENT_TIMEOUT)
    line = r"refused: node [0-9a-f]{16} at 127\.0\.0\.1:\d+: .*another ticket or token"
    assert re.search(line, seed.stderr), seed.stderr


@pytest.mark.full
def test_rank_0_is_notified_who_was_turned_away_for_a_world_of_another_size(start):
    with nexar.Seed("127.0.0.1:0", size=2) as seed:
        first = start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(0, 2))
        wait_for_event(seed, "admitted")
        wrong = start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(1, 3))
        assert wrong.end(EVENT_TIMEOUT) != 0
        reason = "rank 1 was started as one of 3, and this cluster forms with 2"
        assert reason in wrong.stderr
        wait_for_event(seed, "refused", reason)
        reported = []
        while not reported or reason not in reported[-1]:
            reported.append(first.process.stderr.readline())
            assert reported[-1], reported
        assert "waiting for 1 of 2 ranks: rank 1" in reported[-1]
        found = introductions(first, start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(1, 2)))
    assert sorted(found) == [0, 1]


@pytest.mark.full
def test_a_rank_never_says_that_it_waits_longer_than_the_formation_timeout(start):
    with nexar.Seed("127.0.0.1:0", size=2) as seed:
        first = start(
            Python, INTRODUCE, NEXAR_TICKET=seed.ticket, NEXAR_FORMATION_TIMEOUT_SECS="60", **rank_names(0, 2)
        )
        line = first.process.stderr.readline()
        found = introductions(first, start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(1, 2)))
    reported = re.search(r"waiting for 1 of 2 ranks: rank 1; trying for (\d+) s more", line)
    assert reported, line
    assert int(reported[1]) < 60
    assert sorted(found) == [0, 1]


def test_a_rank_that_is_killed_before_the_commit_is_replaced(start):
    with nexar.Seed("127.0.0.1:0", size=3) as seed:
        first = start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(0, 3))
        doomed = start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(1, 3))
        wait_for_event(seed, "admitted", count=2)
        doomed.process.kill()
        wait_for_event(seed, "gone")
        others = [start(Python, INTRODUCE, NEXAR_TICKET=seed.ticket, **rank_names(rank, 3)) for rank in (1, 2)]
        found = introductions(first, *others, patience=EVENT_TIMEOUT)
    assert sorted(found) == [0, 1, 2]
    assert all((facts["size"], facts["epoch"]) == (3, 1) for facts in found.values())
