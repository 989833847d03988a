"""Colour and key → sub-communicators.

Each rank brings a colour and a key, and all see all of them. Those of one colour become a communicator, ranked by key
and then by their old rank. Its id follows from what its members know alike: the parent, the occasion, who they are. So
it needs no further word, and is the same as another's only by a chance of one in 2**63.

The communicator: rank, size, and every verb as a method of a few lines. Immutable once made.
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
from nexar.collectives.context import PLAIN, CollectiveContext
from nexar.collectives.data_movement import all_gather
from nexar.collectives.fast_all_reduce import FastAllReduce
from nexar.collectives.fingerprint import OperationCode
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
from nexar.config import Config
from nexar.errors import NexarError, OperationTimeout, UsageError
from nexar.group import Group, checked_timeout, deadline_after
from nexar.links.messages import Receive
from nexar.links.operation import Operation
from nexar.rpc.remote_calls import RemoteCalls
from nexar.types import Rank, whole

_NOBODY: Final = -1  # the colour of who takes part in none
_LARGEST: Final = (1 << 63) - 1
_LEAST: Final = -1 << 63
_SPLIT, _GROUP = range(2)


class SubgroupSpec(NamedTuple):
    """One sub-communicator: its members by their old ranks, in the order of the new ones."""

    communicator: int
    ranks: tuple[Rank, ...]


def propose_split(context: CollectiveContext, color: Any, key: Any) -> PendingCollective:
    """Tell all ranks what this one wants; the result is its part, None if it takes part in none."""
    mine = np.array([_checked_color(color), _checked_key(key)], np.int64)
    out = np.empty((context.group.size, 2), np.int64)
    work = all_gather(context, mine, out.reshape(-1), PLAIN, OperationCode.SPLIT)
    assert work.call is not None
    occasion = work.call.entry.sequence
    return work.map_result(lambda _: subgroup_of(context.group, out.tolist(), occasion))


def _checked_color(color: Any) -> int:
    wanted = whole(color)
    if color is None:
        return _NOBODY
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
    """What becomes of this rank, given everybody's colour and key."""
    rank = group.rank
    color = proposals[rank][0]
    if color == _NOBODY:
        return None
    members = sorted((each[1], other) for other, each in enumerate(proposals) if each[0] == color)
    ranks = tuple(other for _, other in members)
    return SubgroupSpec(subgroup_id(group, _SPLIT, occasion, ranks), ranks)


def members_of(membership: Membership, ranks: Sequence[Rank]) -> Membership:
    """Those ranks alone, in that order."""
    return Membership(membership.cluster, membership.epoch, tuple(membership.members[rank] for rank in ranks))


def chosen_subgroup(group: Group, ranks: Iterable[Any], occasions: Counter[tuple[Rank, ...]]) -> SubgroupSpec | None:
    """The part that these ranks make among themselves, without a word to the others; None if this one is not among
    them. `occasions` counts how often each set of them has done so.
    """
    if not isinstance(ranks, Iterable):
        raise UsageError(f"group({ranks!r}): give the ranks as a list, e.g. group([0, 1])")
    listed = tuple(group.check(rank) for rank in ranks)
    if len(set(listed)) != len(listed) or not listed:
        raise UsageError(f"group({list(listed)}) is no list of different ranks; name each member once")
    if group.rank not in listed:
        return None
    occasions[listed] += 1
    return SubgroupSpec(subgroup_id(group, _GROUP, occasions[listed], listed), listed)


def subgroup_id(group: Group, way: int, occasion: int, ranks: Sequence[Rank]) -> int:
    """The same for all members, another for everybody else."""
    facts = (group.communicator, group.matching.generation, way, occasion, *ranks)
    digest = hashlib.sha256(np.array(facts, np.uint64).tobytes()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Communicator(MessageMethods, CollectiveMethods, RpcCallMethods, RpcServeMethods, RecoveryMethods, ElasticMethods):
    """Some nodes that talk to one another, each with a rank. May be used from several threads; those of one rank that
    call collectives must do so in the same order as on the other ranks.

    Close it, or leave its `with` block: what was sent still arrives, then the others are told that this node left. One
    that was split off is only closed here; the node goes on.
    """

    def __init__(self, generation: Generation, runtime: NodeRuntime, close: Callable[[], None]) -> None:
        """`close` ends what it stands on."""
        self._generation = generation
        self._runtime = runtime
        self._can_retract = False
        self._context = context = generation.context
        self._group = context.group
        self._close = close
        self._giver = 0
        self._agreements = itertools.count(1)  # numbers of agree(); next() is atomic
        self._closing = threading.Lock()  # taken by the first close, never given back
        self._quick = FastAllReduce(context)
        self._groups: Counter[tuple[Rank, ...]] = Counter()  # made by group(); list of ranks → how often
        self._remote_calls = RemoteCalls(context.group, VALUES, context.config, generation.registry)
        generation.when_closed.append(self._remote_calls.close)
        self.start: Final = Starter(context, self._seconds, self, self._remote_calls)
        """Every verb once more: it returns a Request at once."""

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """My place, 0 to size - 1."""
        return self._group.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._group.size

    @property
    def membership(self) -> Membership:
        """Who is here: nodes, hosts, addresses, by rank."""
        return self._group.membership

    @property
    def epoch(self) -> int:
        """Of the membership; it grows with each change."""
        return self.membership.epoch

    @property
    def host(self) -> str:
        """The id of this host; ranks that have the same one run on the same machine."""
        return self.membership.member(self.rank).host

    @property
    def local_rank(self) -> int:
        """My place among the ranks of this host."""
        return self.membership.local_rank(self.rank)

    @property
    def local_size(self) -> int:
        """How many ranks this host has."""
        return self.membership.local_size(self.rank)

    @property
    def id(self) -> int:
        """The same on all its members; 0 is the first communicator of a cluster."""
        return self._group.communicator

    @property
    def config(self) -> Config:
        """Its settings."""
        return self._context.config

    @property
    def topology(self) -> str:
        """Which ranks have links for data."""
        return str(self.config.topology)

    @property
    def neighbors(self) -> tuple[Rank, ...]:
        """The ranks that this one has a connection of its own to; the others are reached over them."""
        is_neighbour = self._group.mesh.relay_routes.is_neighbour
        nodes = enumerate(self._group.membership.members)
        return tuple(rank for rank, member in nodes if rank != self.rank and is_neighbour(member.node))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The ids of all hosts, by their first rank."""
        return self.membership.hosts

    @property
    def host_index(self) -> int:
        """Which of the hosts this one is."""
        return self.hosts.index(self.host)

    @property
    def ranks_on_host(self) -> tuple[Rank, ...]:
        """The ranks of this host, ascending."""
        return self.membership.ranks_on(self.host)

    @property
    def host_leader(self) -> Rank:
        """The first rank of this host."""
        return self.ranks_on_host[0]

    def __repr__(self) -> str:
        state = ", closed" if self._closing.locked() else ""
        return f"<nexar.Communicator rank {self.rank} of {self.size}, epoch {self.epoch}{state}>"

    # -- parts of it -----------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Communicator | None:
        """All ranks call it: those of one colour become a communicator, ranked by key, then by rank here.

        None for those whose colour is None. It is a communicator like any other, with messages and collectives of its
        own, and may be used at the same time as this one.
        """
        seconds = self._seconds(timeout)
        part = self._conduct(propose_split(self._context, color, key), seconds)
        return None if part is None else self._make(part, seconds)

    def group(self, ranks: Iterable[Rank], *, timeout: float | None = None) -> Communicator | None:
        """These ranks become a communicator, in the order given. They must call it with the same list; others may, and
        get None at once.
        """
        seconds = self._seconds(timeout)
        part = chosen_subgroup(self._group, ranks, self._groups)
        return None if part is None else self._make(part, seconds)

    def _make(self, part: SubgroupSpec, seconds: float) -> Communicator:
        membership = members_of(self.membership, part.ranks)
        try:
            generation = self._runtime.successors.begin(membership, part.communicator, deadline_after(seconds))
        except NexarError as error:
            raise self.judge(error) from None
        made: Communicator = self._runtime.successors.wrap(generation)
        return made

    # -- counted ---------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What it has done so far: calls, bytes, seconds, by operation; waiting, by rank; when ranks came, by operation
        and rank (`arrivals`; not of calls that ended at once); and each link's counters.

        `buffers` is the pool of this node's early messages, with the hit rate of each size; `staging` the host memory
        of devices, by adapter, of this process; `relay` what went over this node for others.
        """
        links = {rank: link.stats() for rank, link in self._group.links().items()}
        buffers = self._group.router.pool.stats().facts()
        staging = {name: stats._asdict() for name, stats in ADAPTERS.stats().items()}
        facts = {"links": links, "buffers": buffers, "staging": staging, "relay": self._group.mesh.relay_routes.stats()}
        return {**self._context.call_log.stats(), **facts}

    def stragglers(self) -> list[Straggler]:
        """Who keeps the others waiting in collectives, the worst first."""
        return self._context.call_log.stragglers()

    # -- the end ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave. Idempotent; every later call raises."""
        self._leave(None, None)

    def _leave(self, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self._closing.acquire(blocking=False):
            if self.id == WORLD:
                self._runtime.say_goodbye(error, traceback)
            self._close()

    def __enter__(self) -> Self:
        """UsageError if it is closed."""
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """By an exception: the others raise, with its traceback."""
        clean = isinstance(error, SystemExit) and not error.code
        self._leave(None if clean else error, traceback)

    def _call(self, work: PendingCollective, timeout: float) -> Any:
        return self._conduct(work, timeout)

    def judge(self, error: BaseException) -> BaseException:
        """See request.Judge."""
        return self._runtime.successors.judge(self._generation, error)

    def outcome_after(self, error: BaseException) -> Operation | None:
        """See request.Judge."""
        return self._runtime.successors.outcome_after(self._generation, error)

    def _carry_out(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Any:
        try:
            return run_to_end(self._group, run, deadline)
        except OperationTimeout as late:
            raise self._context.call_log.progress_inquiry.explain(late) from None
        except NexarError as error:
            raise self._judged(error) from None

    def _reduced_at_once(self, array: Any, op: Op) -> bool:
        return (
            array.__class__ is np.ndarray
            and op.__class__ is str
            and not self._closing.locked()
            and not self._giver
            and self._reduce_quickly(array, op)
        )

    def _reduce_quickly(self, array: np.ndarray[Any, Any], op: str) -> bool:
        try:
            return self._quick.all_reduce(array, op)
        except NexarError as error:
            raise self._judged(error) from None

    def _conduct(self, work: PendingCollective, timeout: float) -> Any:
        try:
            return self._context.runner.run_blocking(work, timeout)
        except NexarError as error:
            raise self._judged(error) from None

    def _judged(self, error: NexarError) -> BaseException:
        final = self.judge(error)
        if final is not error:
            for note in getattr(error, "__notes__", ()):
                final.add_note(note)
            self._context.flight_recorder.failed(final)
        return final

    def _check_serving(self) -> None:
        """Its functions are those of its successors, too: they have them in common."""
        newest: Communicator = self._generation.successor or self
        newest._check_open()
        if newest._generation.successor is None:
            newest._generation.outcome.check()

    def _deadline(self, timeout: Any) -> float:
        return deadline_after(self._allowed_seconds(timeout))

    def _seconds(self, timeout: Any) -> float:
        self._check_giver()
        return self._allowed_seconds(timeout)

    def _check_open(self) -> None:
        if self._closing.locked():
            again = "nexar.init()" if self.id == WORLD else "split() or group() of the one it came from"
            raise UsageError(f"this communicator is closed; make a new one with {again}")
        self._group.progress.check()  # in a forked child, say

    def _allowed_seconds(self, timeout: Any) -> float:
        self._check_open()
        self._generation.outcome.check()
        if timeout is None:
            return self.config.collective_timeout
        return checked_timeout(timeout)
