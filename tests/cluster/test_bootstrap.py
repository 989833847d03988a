"""From an invitation to a communicator: a seed and its members in one process, over real sockets."""

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from nexar.cluster.decisions.failure_detector import watched, watchers
from nexar.cluster.mesh import EAGER_WORLD
from nexar.cluster.node import Node
from nexar.cluster.seed import SeedService
from nexar.communicator.bootstrap import bootstrap
from nexar.communicator.communicator import Communicator
from nexar.communicator.runtime import NodeRuntime
from nexar.config import Config
from nexar.errors import FormationTimeout, JoinRefused, NexarError, SeedUnreachable, UsageError
from nexar.security.certificates import Credentials, Trust
from nexar.security.invitation import Invitation, parse_ticket
from nexar_tools.transports import why_unavailable
from tests.cluster.joiners import EVENT_TIMEOUT, wait_for_event
from tests.ranks import on_every

HERE = "127.0.0.1:0"
QUIC = pytest.param(
    ("quic",), marks=pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))
)
ALL = pytest.param(("shm", "quic", "tls"), marks=QUIC.marks)  # one of them drives the others
NETWORKS = [pytest.param(("tls",)), QUIC, pytest.param(("shm", "tls"))]


def config(transports: tuple[str, ...] = ("tls",), **settings: object) -> Config:
    return Config(transports=transports, bind="127.0.0.1", **settings)  # type: ignore[arg-type]


class Cluster:
    """A seed and as many members as it wants, each made by a thread of its own. Close it."""

    def __init__(self, size: int, members: Config | None = None, **seed: object) -> None:
        self.config = members or config()
        self._undo = ExitStack()
        transports = tuple(scheme for scheme in self.config.transports if scheme != "shm")
        self.seed = SeedService(HERE, size, transports=transports, **seed)  # type: ignore[arg-type]
        self._undo.callback(lambda: self.seed.close())  # noqa: PLW0108 - a test may have made it anew
        self.invitation = parse_ticket(self.seed.ticket)
        try:
            made = on_every(range(size), lambda _: bootstrap(self.config, self.invitation))
        except BaseException:
            self._undo.close()
            raise
        for comm in made:
            self._undo.callback(comm.close)
        self.ranks = sorted(made, key=lambda comm: comm.rank)

    def close(self) -> None:
        self._undo.close()


@pytest.fixture
def form() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def forming(*args: object, **kwargs: object) -> Cluster:
        made.append(Cluster(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield forming
    for cluster in made:
        cluster.close()


def everybody_talks(ranks: list[Communicator]) -> None:
    def talk(comm: Communicator) -> list[int]:
        comm.barrier()
        for dest in range(comm.size):
            comm.send(np.full(20_000, comm.rank), dest=dest, tag=3)
        return [int(comm.recv(source=source, tag=3)[-1]) for source in range(comm.size)]

    assert on_every(ranks, talk) == [list(range(len(ranks)))] * len(ranks)


# ---------------------------------------------------------------- forming


@pytest.mark.parametrize("transports", NETWORKS, ids="+".join)
@pytest.mark.parametrize("size", [1, 3])
def test_a_world_forms_and_everybody_talks_to_everybody(
    form: Callable[..., Cluster], transports: tuple[str, ...], size: int
) -> None:
    cluster = form(size, config(transports))
    assert [comm.rank for comm in cluster.ranks] == list(range(size))
    assert all(comm.membership == cluster.seed.membership for comm in cluster.ranks)
    everybody_talks(cluster.ranks)
    if size > 1:
        (link, *_) = cluster.ranks[0]._group.mesh.links().values()
        assert set(link.schemes) == set(transports)


def test_a_large_world_opens_links_when_they_are_needed_though_both_ends_need_them_at_once(
    form: Callable[..., Cluster],
) -> None:
    size = EAGER_WORLD + 4
    cluster = form(size)
    for comm in cluster.ranks:  # nobody has computed yet: there are links for watching, and no others
        needed = {comm.membership.member(rank).node for rank in (*watchers(size, comm.rank), *watched(size, comm.rank))}
        assert comm._group.mesh.links().keys() <= needed
    on_every(cluster.ranks, Communicator.barrier)
    opened = sum(len(comm._group.mesh.links()) for comm in cluster.ranks) // 2
    assert opened < size * (size - 1) // 2
    for _ in range(3):
        everybody_talks(cluster.ranks)


def test_who_brings_a_rank_gets_it() -> None:
    with SeedService(HERE, 2, transports=("tls",)) as seed:
        invitation = parse_ticket(seed.ticket)
        made = on_every([1, 0], lambda rank: bootstrap(config(), invitation, rank=rank, size=2))
        assert [comm.rank for comm in made] == [1, 0]
        for comm in made:
            comm.close()
        assert seed.wait_empty(EVENT_TIMEOUT)


def test_ten_formations_and_closings_leave_nothing_behind() -> None:
    for _ in range(10):
        Cluster(2, config(("shm", "tls"))).close()


# ---------------------------------------------------------------- what goes wrong, and leaves nothing open


def test_a_world_of_another_size_than_was_said_is_refused_with_both() -> None:
    with (
        SeedService(HERE, 1, transports=("tls",)) as seed,
        pytest.raises(UsageError, match=r"one of 4, .* has 1 members"),
    ):
        bootstrap(config(), parse_ticket(seed.ticket), size=4)


def test_a_node_whose_companion_does_not_start_is_closed() -> None:
    started: list[NodeRuntime] = []

    def fail(runtime: NodeRuntime, _: Communicator) -> Callable[[], None]:
        started.append(runtime)
        raise OSError("on purpose")

    with SeedService(HERE, 1, transports=("tls",)) as seed:
        with pytest.raises(OSError, match="on purpose"):
            bootstrap(config(), parse_ticket(seed.ticket), beside=fail)
        with pytest.raises(UsageError, match="this node is closed"):
            started[0].node.progress.check()


def test_a_seed_that_is_not_there_is_named() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed:
        address = seed.address
    with pytest.raises(SeedUnreachable) as raised:
        bootstrap(config(formation_timeout=0.3), Invitation((address,), bytes(32), None))
    assert raised.value.addresses == (address,)


def test_a_wrong_secret_is_found_out_by_the_worker() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, pytest.raises(SeedUnreachable, match="cannot prove"):
        bootstrap(config(), Invitation((seed.address,), bytes(32), None))


def test_the_key_of_another_seed_is_final() -> None:
    with SeedService(HERE, 1, transports=("tls",)) as seed, SeedService(HERE, 1, transports=("tls",)) as other:
        genuine = parse_ticket(other.ticket)
        with pytest.raises(SeedUnreachable) as raised:
            bootstrap(config(), Invitation((seed.address,), genuine.secret, genuine.fingerprint))
        assert raised.value.attempts == 1


def test_a_rank_that_is_taken_is_refused() -> None:
    with SeedService(HERE, 2, transports=("tls",), formation_timeout=2) as seed:
        invitation = parse_ticket(seed.ticket)

        def come(_: int) -> NexarError:
            with pytest.raises(NexarError) as raised:
                bootstrap(config(), invitation, rank=0)
            return raised.value

        ends = on_every([1, 2], come)
        assert {type(error) for error in ends} == {JoinRefused, FormationTimeout}


def test_when_not_everybody_comes_those_that_came_are_notified() -> None:
    with (
        SeedService(HERE, 2, transports=("tls",), formation_timeout=5.0) as seed,
        pytest.raises(FormationTimeout) as raised,
    ):
        bootstrap(config(), parse_ticket(seed.ticket))
    assert (len(raised.value.joined), raised.value.expected) == (1, 2)


def test_ctrl_c_ends_the_wait_for_the_others() -> None:
    with SeedService(HERE, 2, transports=("tls",)) as seed:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            bootstrap(config(), parse_ticket(seed.ticket))


# ---------------------------------------------------------------- forking


@pytest.mark.parametrize("transports", [*NETWORKS, ALL], ids="+".join)
def test_a_forked_child_that_leaves_the_block_disturbs_nobody(
    form: Callable[..., Cluster], transports: tuple[str, ...]
) -> None:
    cluster = form(2, config(transports))
    everybody_talks(cluster.ranks)
    child = os.fork()
    if child == 0:
        os._exit(_use_and_close(cluster.ranks))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    everybody_talks(cluster.ranks)
    assert {"left", "gone"} & {note.kind for note in cluster.seed.events} == set()


def _use_and_close(ranks: list[Communicator]) -> int:
    """In the child: 0 if every verb said whose this is, and closing cost no time."""
    begin, wrong = time.monotonic(), 0
    for comm in ranks:
        try:
            comm.send(1, dest=1 - comm.rank)
        except UsageError as error:
            wrong += "forked child" not in str(error)
        else:
            wrong += 10
        comm.close()
    return wrong + 100 * (time.monotonic() - begin > 2.0)


# ---------------------------------------------------------------- without the seed


def test_members_without_a_link_open_one_when_the_seed_is_gone(form: Callable[..., Cluster]) -> None:
    cluster = form(EAGER_WORLD + 1)
    cluster.seed.close()
    everybody_talks(cluster.ranks)


def test_closing_while_the_seed_is_gone_is_prompt(form: Callable[..., Cluster]) -> None:
    cluster = form(2)
    cluster.seed.close()
    on_every(cluster.ranks, Communicator.barrier)
    begin = time.monotonic()
    on_every(cluster.ranks, Communicator.close)
    assert time.monotonic() - begin < 5.0


def test_a_seed_that_comes_back_with_its_state_finds_its_members_again(
    form: Callable[..., Cluster], tmp_path: Path
) -> None:
    cluster = form(2, state_dir=tmp_path)
    cluster.seed.close()
    cluster.seed = SeedService(HERE, 2, state_dir=tmp_path, transports=("tls",))
    wait_for_event(cluster.seed, "returned", count=2)
    everybody_talks(cluster.ranks)
    for comm in cluster.ranks:
        comm.close()
    assert cluster.seed.wait_empty(EVENT_TIMEOUT)


@pytest.mark.full
def test_links_are_opened_with_certificates_that_were_renewed_when_the_first_had_expired(
    form: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    lifetime, shown, certify = 6.0, Counter[int](), Node.certify  # a third of it is what a renewal may be late

    def counting(node: Node, credentials: Credentials, trust: Trust) -> None:
        certify(node, credentials, trust)
        shown[node.id] += 1

    monkeypatch.setattr(Node, "certify", counting)
    begin = time.monotonic()
    cluster = form(EAGER_WORLD + 1, certificate_lifetime=lifetime)
    while len(shown) <= EAGER_WORLD or min(shown.values()) < 2 or time.monotonic() - begin <= lifetime:
        assert time.monotonic() - begin < EVENT_TIMEOUT, shown
        time.sleep(0.01)
    everybody_talks(cluster.ranks)
