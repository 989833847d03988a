"""Real processes become one cluster: by one command, by several launchers, by the launchers of others, by hand."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import nexar
from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar_tools.transports import why_unavailable
from tests.leaks import Stock, leaked_since
from tests.ports import free_port
from tests.processes.launcher import await_files
from tests.processes.nexar_command import INTRODUCE, LATE_LINK, Nexar, Python, await_ticket, introductions

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"
LOCAL = "127.0.0.1:0"
SCHEMES = {scheme for scheme in ("shm", "quic", "tls") if why_unavailable(scheme) is None}
BETWEEN_NEIGHBOURS = {"shm", "quic" if "quic" in SCHEMES else "tls"} & SCHEMES


@pytest.fixture
def start(tmp_path):
    """Start a command that has ended when the test has."""
    with ExitStack() as running:
        yield lambda kind, *arguments, **more: running.enter_context(kind(*arguments, cwd=tmp_path, **more))


@pytest.fixture
def open_seed(start, tmp_path):
    """`nexar seed`, and its ticket."""

    def opened(size, *arguments, **variables):
        path = tmp_path / "ticket"
        path.unlink(missing_ok=True)
        seed = start(Nexar, "seed", "--size", size, "--listen", LOCAL, "--ticket-file", path, *arguments, **variables)
        return seed, await_ticket(path, seed)

    return opened


# -- one command -----------------------------------------------------------------------------------------------------


def test_four_ranks_of_one_command_introduce_themselves_and_pass_arrays_round_the_ring(start):
    found = introductions(start(Nexar, "run", "-n", 4, INTRODUCE, "--barrier"))
    assert sorted(found) == [0, 1, 2, 3]
    host = found[0]["host"]
    for rank, facts in found.items():
        assert facts["RANK"] == str(rank)
        assert (facts["size"], facts["epoch"]) == (4, 1)
        assert (facts["local_rank"], facts["local_size"]) == (rank, 4)
        assert facts["hosts"] == [host] * 4
        assert {int(peer) for peer in facts["links"]} == {0, 1, 2, 3} - {rank}
        assert all(set(schemes) == BETWEEN_NEIGHBOURS for schemes in facts["links"].values())


def test_a_rank_may_be_alone(start):
    found = introductions(start(Nexar, "run", INTRODUCE, "--barrier"))
    assert (found[0]["size"], found[0]["links"]) == (1, {})


@pytest.mark.parametrize("schemes", ["shm,tls", "tls", "quic"])
def test_ranks_use_the_configured_transports(start, schemes):
    if reason := next((why for scheme in schemes.split(",") if (why := why_unavailable(scheme))), None):
        pytest.skip(reason)
    found = introductions(start(Nexar, "run", "-n", 2, INTRODUCE, "--barrier", NEXAR_TRANSPORTS=schemes))
    assert set(found[0]["links"]["1"]) == set(found[1]["links"]["0"]) == set(schemes.split(","))


def test_an_address_that_ranks_advertise_is_not_that_of_the_seed_of_one_host(start):
    """That seed listens on loopback only."""
    found = introductions(start(Nexar, "run", "-n", 2, INTRODUCE, "--barrier", NEXAR_ADVERTISE="203.0.113.1"))
    assert sorted(found) == [0, 1]


@pytest.mark.full
def test_sixteen_ranks_open_links_when_they_use_them(start):
    found = introductions(start(Nexar, "run", "-n", 16, INTRODUCE, "--barrier"), patience=120)
    assert sorted(found) == list(range(16))
    for (
        rank,
        facts,
    ) in found.items():  # to neighbours on the ring, to who watches it or is watched by it, for the barrier
        needed = {*watchers(16, rank), *watched(16, rank), *((rank + step) % 16 for step in (-4, 4))}
        assert {int(peer) for peer in facts["links"]} <= needed


# -- several launchers -----------------------------------------------------------------------------------------------


def test_each_launcher_of_a_ticket_has_a_block_of_ranks(start, open_seed):
    seed, ticket = open_seed(4)
    hosts = [
        start(Nexar, "run", "-n", 2, "--ticket", ticket, INTRODUCE, "--barrier", NEXAR_HOST_ID=name) for name in "ab"
    ]
    found = introductions(*hosts)
    assert sorted(found) == [0, 1, 2, 3]
    assert found[0]["host"] == found[1]["host"] != found[2]["host"] == found[3]["host"]
    for rank, facts in found.items():
        assert facts["RANK"] == str(rank)
        assert (facts["local_rank"], facts["local_size"]) == (rank % 2, 2)
        neighbour = rank ^ 1
        for peer, schemes in facts["links"].items():
            assert set(schemes) == (BETWEEN_NEIGHBOURS if int(peer) == neighbour else BETWEEN_NEIGHBOURS - {"shm"})
    assert seed.end() == 0, seed.stderr
    assert "every member has left" in seed.stderr


def test_a_launcher_may_ask_for_the_rank_of_its_first(start, open_seed):
    _, ticket = open_seed(3)
    late = start(Nexar, "run", "-n", 2, "--ticket", ticket, "--first-rank", 1, INTRODUCE, NEXAR_HOST_ID="late")
    found = introductions(late, start(Nexar, "run", "--ticket", ticket, INTRODUCE, NEXAR_HOST_ID="early"))
    assert [found[rank]["host"] for rank in range(3)] == ["early", "late", "late"]


def test_a_token_and_the_address_of_the_seed_let_launchers_and_processes_in(start):
    port = free_port(2)
    token, address = {"NEXAR_CLUSTER_TOKEN": TOKEN}, {"NEXAR_SEED": f"127.0.0.1:{port}"}
    seed = start(Nexar, "seed", "--size", 3, "--listen", address["NEXAR_SEED"], **token)
    launched = start(Nexar, "run", "-n", 2, INTRODUCE, **token, **address)
    found = introductions(launched, start(Python, INTRODUCE, **token, **address))
    assert sorted(found) == [0, 1, 2]
    assert seed.end() == 0, seed.stderr
    assert seed.stdout == ""  # whoever has the token needs no ticket
    assert TOKEN not in seed.stderr


# -- other launchers, and none ---------------------------------------------------------------------------------------


def torch_names(rank, local_rank, local_size):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "none",
    }


def test_ranks_of_torchrun_on_one_host_need_nothing_else(start, tmp_path):
    common = {"MASTER_PORT": str(free_port(2)), "TMPDIR": str(tmp_path)}
    ranks = [start(Python, INTRODUCE, "--barrier", **torch_names(rank, rank, 2), **common) for rank in (1, 0)]
    found = introductions(*ranks)
    assert {rank: facts["RANK"] for rank, facts in found.items()} == {0: "0", 1: "1"}
    assert list(tmp_path.glob("nexar-*/*")) == []  # the ticket is gone


def test_ranks_of_torchrun_on_two_hosts_meet_by_a_token(start):
    common = {"MASTER_PORT": str(free_port(2)), "NEXAR_CLUSTER_TOKEN": TOKEN}
    ranks = [
        start(Python, INTRODUCE, "--barrier", **torch_names(rank, 0, 1), **common, NEXAR_HOST_ID=f"host{rank}")
        for rank in (1, 0)
    ]
    found = introductions(*ranks)
    assert [found[rank]["host"] for rank in (0, 1)] == ["host0", "host1"]


def test_a_process_joins_by_the_ticket_in_its_environment(start, open_seed):
    _, ticket = open_seed(2)
    found = introductions(*(start(Python, INTRODUCE, NEXAR_TICKET=ticket) for _ in range(2)))
    assert sorted(found) == [0, 1]


def test_a_process_joins_by_a_ticket_it_is_given(open_seed):
    seed, ticket = open_seed(2)
    with ThreadPoolExecutor(2) as pool:
        comms = list(pool.map(lambda _: nexar.connect(ticket), range(2)))
        comms.sort(key=lambda comm: comm.rank)
        assert [comm.rank for comm in comms] == [0, 1]
        sent = pool.submit(comms[0].send, np.arange(5), dest=1)
        assert comms[1].recv(source=0).tolist() == [0, 1, 2, 3, 4]
        sent.result(10)
        for closed in [pool.submit(comm.close) for comm in comms]:
            closed.result(10)
    assert seed.end() == 0, seed.stderr


# -- the seed goes, and comes back -----------------------------------------------------------------------------------


def test_members_that_had_no_link_open_one_after_the_seed_was_killed(start, open_seed, tmp_path):
    seed, ticket = open_seed(9)
    ranks = start(Nexar, "run", "-n", 9, "--ticket", ticket, LATE_LINK)
    await_files(tmp_path, "formed*", 9)
    os.kill(seed.process.pid, signal.SIGKILL)
    seed.process.wait(10)
    (tmp_path / "go").touch()
    assert ranks.end() == 0, ranks.stderr
    assert ranks.stdout.count("has talked to rank") == 9


STAY = """
import time
from pathlib import Path
import nexar

with nexar.init() as comm:
    comm.barrier()
    Path(f"formed{comm.rank}").touch()
    deadline = time.monotonic() + 50
    while not Path("go").exists():
        assert time.monotonic() < deadline, "nobody told this rank to go on"
        time.sleep(0.01)
    comm.barrier()
"""
OPEN = """
import nexar

with nexar.Seed("127.0.0.1:0", 2, state_dir="state", on_event=lambda note: print(note.kind, flush=True)) as seed:
    print(seed.ticket, flush=True)
    seed.wait_formed()
    seed.wait_empty()
"""


@pytest.fixture
def open_lasting(start, tmp_path):
    """A seed of two that can be started again, and its ticket; it prints what happens."""
    (tmp_path / "open.py").write_text(OPEN)

    def opened():
        seed = start(Python, "open.py")
        return seed, seed.process.stdout.readline().strip()

    return opened


def await_event(seed, kind, count=1):
    for line in seed.process.stdout:
        count -= line.strip() == kind
        if count == 0:
            return
    raise AssertionError(f"the seed ended before it said {kind!r}: {seed.process.stderr.read()}")


def kill(seed):
    os.kill(seed.process.pid, signal.SIGKILL)
    seed.process.wait(10)


def test_a_seed_that_was_killed_before_the_cluster_had_formed_is_found_by_those_who_wait(start, open_lasting):
    seed, ticket = open_lasting()
    first = start(Python, INTRODUCE, "--barrier", NEXAR_TICKET=ticket)
    await_event(seed, "admitted")
    kill(seed)
    again, same = open_lasting()
    assert same == ticket
    await_event(again, "admitted")  # the first has come back by itself
    found = introductions(first, start(Python, INTRODUCE, "--barrier", NEXAR_TICKET=ticket))
    assert sorted(found) == [0, 1]
    assert again.end() == 0, again.stderr


def test_a_seed_that_was_killed_after_the_cluster_had_formed_knows_its_members_again(start, open_lasting, tmp_path):
    seed, ticket = open_lasting()
    (tmp_path / "stay.py").write_text(STAY)
    # By TLS the members learn of its end at once; by QUIC, which is silent, after a while.
    members = [start(Python, "stay.py", NEXAR_TICKET=ticket, NEXAR_TRANSPORTS="shm,tls") for _ in range(2)]
    await_files(tmp_path, "formed*", 2)
    kill(seed)
    again, same = open_lasting()
    assert same == ticket
    await_event(again, "returned", 2)
    (tmp_path / "go").touch()
    for member in members:
        assert member.end() == 0, member.stderr
    assert again.end() == 0, again.stderr


def test_a_seed_that_is_terminated_notifies_those_who_wait(start, open_seed):
    seed, ticket = open_seed(2)
    same_place = {"NEXAR_TICKET": ticket, "RANK": "0", "WORLD_SIZE": "2"}
    candidates = [start(Python, INTRODUCE, **same_place) for _ in range(2)]
    assert any("rank 0 is held" in line for line in seed.process.stderr)  # one of them is in, so the other is refused
    seed.process.terminate()
    assert seed.end() == 128 + signal.SIGTERM
    assert all(candidate.end() != 0 for candidate in candidates)
    said = sorted(candidate.stderr.splitlines()[-1].partition("refused this node: ")[2] for candidate in candidates)
    assert said[1] == "the seed was closed before the cluster had formed"


def test_an_elastic_seed_stays_until_it_is_stopped(start, open_seed):
    seed, ticket = open_seed(1, "--elastic")
    introductions(start(Python, INTRODUCE, NEXAR_TICKET=ticket))
    assert seed.process.poll() is None
    seed.process.terminate()
    assert seed.end() == 128 + signal.SIGTERM


# -- nothing is left -------------------------------------------------------------------------------------------------


def test_ten_formations_in_one_process_leave_nothing():
    def form_and_talk(_):
        with nexar.Seed(LOCAL, 3) as seed:
            with ThreadPoolExecutor(3) as pool:
                for done in [pool.submit(take_part, seed.ticket) for _ in range(3)]:
                    done.result(30)
            assert seed.wait_empty(10)

    def take_part(ticket):
        with nexar.connect(ticket) as comm:
            comm.send(np.full(100_000, comm.rank), dest=(comm.rank + 1) % 3)
            comm.recv(source=(comm.rank - 1) % 3)
            comm.barrier()

    form_and_talk(0)  # what is made once and stays
    before = Stock.take()
    for number in range(10):
        form_and_talk(number)
        assert not (leaked := leaked_since(before)), f"after {number + 1}: {leaked}"
