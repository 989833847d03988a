"""The communicator, and its sub-communicators.

A sub-communicator's id is a hash of facts that its members know (parent, generation, call number, members), so they
agree on it without messages. Two ids collide with a probability of 2**-63.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import numpy as np

from nexar.arrays.devices import ADAPTERS
from nexar.cluster.membership import WORLD, Membership
from nexar.collectives.context import CollectiveContext
from nexar.collectives.fast_all_reduce import FastAllReduce
from nexar.collectives.operations import COLLECTIVES, OperationCode
from nexar.collectives.prepared_call import CallArrays, begin_call
from nexar.collectives.requests import PendingCollective
from nexar.collectives.statistics import Straggler
from nexar.communicator.collective_calls import Op
from nexar.communicator.collective_methods import CollectiveMethods
from nexar.communicator.elastic_methods import ElasticMethods
from nexar.communicator.generation import Generation
from nexar.communicator.message_methods import MessageMethods
from nexar.communicator.multipart import Run
from nexar.communicator.point_to_point import run_to_end
from nexar.communicator.recovery_methods import RecoveryMethods
from nexar.communicator.rpc_methods import VALUES, RpcCallMethods, RpcServeMethods
from nexar.communicator.runtime import NodeRuntime
from nexar.communicator.starter import Starter
from nexar.communicator.successors import ErrorResolver
from nexar.config import Config
from nexar.errors import NexarError, OperationTimeout, UsageError
from nexar.group import Group, checked_timeout, deadline_after
from nexar.links.messages import Receive
from nexar.rpc.remote_calls import RemoteCalls
from nexar.types import Rank, whole

_NO_COLOR: Final = -1  # colour of a rank that joins no sub-communicator
_LARGEST: Final = (1 << 63) - 1
_LEAST: Final = -1 << 63
_SPLIT, _GROUP = range(2)


class SubgroupSpec(NamedTuple):
    """Id of a sub-communicator, and its members' parent ranks in the new order."""

    communicator: int
    ranks: tuple[Rank, ...]


def propose_split(context: CollectiveContext, color: Any, key: Any) -> PendingCollective:
    """Start a split. Its result is this rank's SubgroupSpec or None."""
    mine = np.array([_checked_color(color), _checked_key(key)], np.int64)
    out = np.empty((context.group.size, 2), np.int64)
    work = begin_call(context, COLLECTIVES[OperationCode.SPLIT], CallArrays(mine, out.reshape(-1)))
    assert work.call is not None
    occasion = work.call.entry.sequence
    return work.map_result(lambda _: subgroup_of(context.group, out.tolist(), occasion))


def _checked_color(color: Any) -> int:
    wanted = whole(color)
    if color is None:
        return _NO_COLOR
    if wanted is None or not 0 <= wanted <= _LARGEST:
        raise UsageError(
            f"split(color={color!r}): a colour is a whole number from 0 to {_LARGEST} (2**63 - 1), or None for no part"
        )
    return wanted


def _checked_key(key: Any) -> int:
    order = whole(key)
    if order is None or not _LEAST <= order <= _LARGEST:
        raise UsageError(f"split(key={key!r}): a key is a whole number of 64 bits, {_LEAST} to {_LARGEST}")
    return order


def subgroup_of(group: Group, proposals: Sequence[Sequence[int]], occasion: int) -> SubgroupSpec | None:
    """Return this rank's sub-communicator; None without a colour."""
    rank = group.rank
    color = proposals[rank][0]
    if color == _NO_COLOR:
        return None
    members = sorted((each[1], other) for other, each in enumerate(proposals) if each[0] == color)
    ranks = tuple(other for _, other in members)
    return SubgroupSpec(subgroup_id(group, _SPLIT, occasion, ranks), ranks)


def members_of(membership: Membership, ranks: Sequence[Rank]) -> Membership:
    """Return the membership of these ranks, in this order."""
    return Membership(membership.cluster, membership.epoch, tuple(membership.members[rank] for rank in ranks))


def chosen_subgroup(group: Group, ranks: Iterable[Any], occasions: Counter[tuple[Rank, ...]]) -> SubgroupSpec | None:
    """None if this rank is not listed. `occasions`: calls so far for each list of ranks."""
    if not isinstance(ranks, Iterable):
        raise UsageError(f"group({ranks!r}): give the ranks as a list, e.g. group([0, 1])")
    listed = tuple(group.check(rank) for rank in ranks)
    if len(set(listed)) != len(listed) or not listed:
        raise UsageError(f"group({list(listed)}): the list is empty or repeats a rank; name each member once")
    if group.rank not in listed:
        return None
    occasions[listed] += 1
    return SubgroupSpec(subgroup_id(group, _GROUP, occasions[listed], listed), listed)


def subgroup_id(group: Group, kind: int, occasion: int, ranks: Sequence[Rank]) -> int:
    """Return the sub-communicator's id, the same on all its members."""
    facts = (group.communicator, group.matching.generation, kind, occasion, *ranks)
    digest = hashlib.sha256(np.array(facts, np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Communicator(MessageMethods, CollectiveMethods, RpcCallMethods, RpcServeMethods, RecoveryMethods, ElasticMethods):
    """A group of nodes, each with a rank. Immutable. Any thread may use it, but all ranks must call collectives in the
    same order, also across threads.

    Use it as a context manager, or close it. Closing delivers sent messages, then tells the others that this node left.
    Closing a communicator made by `split` or `group` is local.
    """

    def __init__(self, generation: Generation, runtime: NodeRuntime, close: Callable[[], None]) -> None:
        self._generation = generation
        self._runtime = runtime
        self._resolver = ErrorResolver(runtime.successors, generation, self)
        self._can_retract = False
        self._context = context = generation.context
        self._group = context.group
        self._close = close
        self._state_thread = 0
        self._agreements = itertools.count(1)  # numbers of agree(); next() is atomic
        self._closing = threading.Lock()  # taken by the first close, never released
        self._fast_path = FastAllReduce(context)
        self._groups: Counter[tuple[Rank, ...]] = Counter()  # calls of group() for each list of ranks
        self._remote_calls = RemoteCalls(context.group, VALUES, context.config, generation.registry)
        generation.call_when_closed(self._remote_calls.close)
        self.start: Final = Starter(context, self._seconds, self._resolver, self._remote_calls)
        """All operations, non-blocking: each returns a Request at once."""

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """This process's rank, 0 to size - 1."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size

    @property
    def membership(self) -> Membership:
        """The members by rank: node, host, addresses."""
        return self._group.membership

    @property
    def epoch(self) -> int:
        """Version of the membership. It grows with each change."""
        return self.membership.epoch

    @property
    def host(self) -> str:
        """Id of this host. Ranks on the same machine have the same id."""
        return self.membership.member(self.rank).host

    @property
    def local_rank(self) -> int:
        """Index of this rank among this host's ranks."""
        return self.membership.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this host."""
        return self.membership.local_size(self.rank)

    @property
    def id(self) -> int:
        """Id of the communicator, the same on all members. 0: the cluster's first communicator."""
        return self._group.communicator

    @property
    def config(self) -> Config:
        """The settings."""
        return self._context.config

    @property
    def topology(self) -> str:
        """Name of the topology: which ranks have direct links."""
        return str(self.config.topology)

    @property
    def neighbors(self) -> tuple[Rank, ...]:
        """Ranks with a direct connection to this rank. The others are reached through relays."""
        is_neighbour = self._group.mesh.relay_routes.is_neighbour
        nodes = enumerate(self._group.membership.members)
        return tuple(rank for rank, member in nodes if rank != self.rank and is_neighbour(member.node))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Ids of all hosts, ordered by their lowest rank."""
        return self.membership.hosts

    @property
    def host_index(self) -> int:
        """Index of this host in `hosts`."""
        return self.hosts.index(self.host)

    @property
    def ranks_on_host(self) -> tuple[Rank, ...]:
        """Ranks of this host, ascending."""
        return self.membership.ranks_on(self.host)

    @property
    def host_leader(self) -> Rank:
        """Lowest rank of this host."""
        return self.ranks_on_host[0]

    def __repr__(self) -> str:
        state = ", closed" if self._closing.locked() else ""
        return f"<nexar.Communicator rank {self.rank} of {self.size}, epoch {self.epoch}{state}>"

    # -- sub-communicators -----------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Communicator | None:
        """Make one communicator per colour, with ranks ordered by key, then by rank here. All ranks must call it.
        A rank without a colour gets None.

        The new communicator has its own messages and collectives. Both can be used at the same time.
        """
        seconds = self._seconds(timeout)
        part = self._run_collective(propose_split(self._context, color, key), seconds)
        return None if part is None else self._make(part, seconds)

    def group(self, ranks: Iterable[Rank], *, timeout: float | None = None) -> Communicator | None:
        """Make a communicator of these ranks, in this order. All of them must call it with the same list; others get
        None at once.
        """
        seconds = self._seconds(timeout)
        part = chosen_subgroup(self._group, ranks, self._groups)
        return None if part is None else self._make(part, seconds)

    def _make(self, part: SubgroupSpec, seconds: float) -> Communicator:
        membership = members_of(self.membership, part.ranks)
        try:
            generation = self._runtime.successors.begin(
                membership, part.communicator, deadline_after(seconds), parent=self._generation
            )
        except NexarError as error:
            raise self._resolver.resolve_error(error) from None
        made: Communicator = self._runtime.successors.wrap(generation)
        return made

    # -- statistics ------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters: calls, bytes and seconds by operation; waiting time by rank; arrival times by operation and
        rank (`arrivals`, without calls that ended at once); link counters.

        `buffers`: this node's pool for unexpected messages, with hit rates by size. `staging`: host memory for
        devices, by adapter. `relay`: forwarded traffic.
        """
        links = {rank: link.stats() for rank, link in self._group.links().items()}
        buffers = self._group.router.pool.stats().facts()
        staging = {name: stats._asdict() for name, stats in ADAPTERS.stats().items()}
        facts = {"links": links, "buffers": buffers, "staging": staging, "relay": self._group.mesh.relay_routes.stats()}
        return {**self._context.call_log.stats(), **facts}

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that are late in collectives, worst first."""
        return self._context.call_log.stragglers()

    # -- closing ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the communicator. Idempotent. Later calls raise UsageError."""
        self._leave(None, None)

    def _leave(self, error: BaseException | None, traceback: TracebackType | None) -> None:
        # In a forked child nothing is left to close, and a thread of the parent may have held any lock at the fork.
        if self._closing.acquire(blocking=False) and not self._group.progress.is_abandoned:
            if self.id == WORLD:
                self._runtime.send_goodbye(error, traceback)
            self._close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. After an exception, the other ranks raise with its traceback."""
        clean = isinstance(error, SystemExit) and not error.code
        self._leave(None if clean else error, traceback)

    def _call(self, work: PendingCollective, timeout: float) -> Any:
        return self._run_collective(work, timeout)

    def _run_operation(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Any:
        try:
            return run_to_end(self._group, run, deadline)
        except OperationTimeout as late:
            raise self._context.call_log.progress_inquiry.explain(late) from None
        except NexarError as error:
            raise self._resolved(error) from None

    def _try_fast_all_reduce(self, array: Any, op: Op) -> bool:
        return (
            array.__class__ is np.ndarray
            and op.__class__ is str
            and not self._closing.locked()
            and not self._state_thread
            and self._fast_all_reduce(array, op)
        )

    def _fast_all_reduce(self, array: np.ndarray[Any, Any], op: str) -> bool:
        try:
            return self._fast_path.all_reduce(array, op)
        except NexarError as error:
            raise self._resolved(error) from None

    def _run_collective(self, work: PendingCollective, timeout: float) -> Any:
        try:
            return self._context.runner.run_blocking(work, timeout)
        except NexarError as error:
            raise self._resolved(error) from None

    def _resolved(self, error: NexarError) -> BaseException:
        final = self._resolver.resolve_error(error)
        if final is not error:
            for note in getattr(error, "__notes__", ()):
                final.add_note(note)
            self._context.flight_recorder.failed(final)
        return final

    def _check_serving(self) -> None:
        """Checks the newest successor: all share the served functions."""
        newest: Communicator = self._generation.successor or self
        newest._check_open()
        if newest._generation.successor is None:
            newest._generation.outcome.check()

    def _deadline(self, timeout: Any) -> float:
        return deadline_after(self._open_seconds(timeout))

    def _seconds(self, timeout: Any) -> float:
        self._check_not_in_state()
        return self._open_seconds(timeout)

    def _check_open(self) -> None:
        if self._closing.locked():
            remedy = "make a new one with split() or group() of the one it came from"
            if self.id == WORLD:
                remedy = "make all calls before the end of its `with` block, or before close()"
            raise UsageError(f"this communicator is closed; {remedy}")
        self._group.progress.check()  # raises in a forked child

    def _open_seconds(self, timeout: Any) -> float:
        self._check_open()
        self._generation.outcome.check()
        if timeout is None:
            return self.config.collective_timeout
        return checked_timeout(timeout)
