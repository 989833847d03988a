"""Collectives and messages with inputs that every rank can compute, and the checks of their results."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Callable, Sequence
from functools import cached_property, reduce
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nexar.arrays.compression.quantized import NoCompression
from nexar.arrays.compression.sparse import TopK
from nexar.communicator.communicator import Communicator
from nexar.communicator.request import wait_all
from nexar.errors import MembershipChanged
from nexar.types import NodeId, Rank
from nexar_tools.kill_schedules.reporter import Reporter
from nexar_tools.kill_schedules.schedule import Form

COUNTS: Final = (1, 7, 300, 4_000, 60_000)
_WEIGHTS: Final = (2, 2, 4, 3, 1)
_DTYPES: Final = ("float64", "float32", "int64", "int32")
_OPS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": np.minimum,
    "max": np.maximum,
}
Array = NDArray[Any]


class WrongResult(AssertionError):
    """A result was wrong."""


def check(what: str, given: Any, expected: Any) -> None:
    """Compares arrays, and nested lists of them, exactly. Raises WrongResult."""
    if not _equal(given, expected):
        raise WrongResult(f"{what}: {given!r} instead of {expected!r}")


def _equal(given: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    if isinstance(expected, np.ndarray):
        return isinstance(given, np.ndarray) and np.array_equal(given, expected)
    return bool(given == expected)


def perform(target: Any, form: Form, method: str, *arguments: Any, **options: Any) -> Any:
    """Calls a method of a communicator in one of three forms; returns its result."""
    if form == "blocking":
        return getattr(target, method)(*arguments, **options)
    request = getattr(target.start, method)(*arguments, **options)
    return request.wait() if form == "started" else asyncio.run(_awaited(request))


async def _awaited(request: Any) -> Any:
    return await request


class RemoteTarget:
    """The functions that a rank serves, for `perform`."""

    def __init__(self, comm: Communicator, rank: Rank) -> None:
        self.start = comm.start.on(rank)
        self._now = comm.on(rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)


class Inputs:
    """The inputs of one call, for every member: small whole numbers, so that each reduction is exact."""

    def __init__(self, nodes: Sequence[NodeId], chance: Random) -> None:
        self.nodes = nodes
        self.seed = chance.getrandbits(32)
        self.root = chance.randrange(len(nodes))
        self.op = chance.choice(list(_OPS))
        self._count = chance.choices(COUNTS, _WEIGHTS)[0]
        self._dtype = chance.choice(_DTYPES)

    def array(self, node: NodeId, count: int | None = None, *, receiver: int = 0) -> Array:
        """The input of one member."""
        numbers = np.random.default_rng([self.seed, node % (1 << 32), receiver % (1 << 32)])
        return numbers.integers(0, 8, self._count if count is None else count).astype(self._dtype)

    def ragged(self, node: NodeId, receiver: int = 0) -> Array:
        """An input whose length depends on the member."""
        return self.array(node, 1 + (node + receiver) % 50, receiver=receiver)

    @cached_property
    def arrays(self) -> list[Array]:
        return [self.array(node) for node in self.nodes]

    def reduced(self, arrays: Sequence[Array] | None = None) -> Array:
        folded: Array = reduce(_OPS[self.op], self.arrays if arrays is None else arrays)
        return folded


class Call:
    """One call on a communicator, with its inputs."""

    def __init__(self, comm: Communicator, form: Form, chance: Random) -> None:
        self.comm = comm
        self.form: Form = form
        self.rank, self.size = comm.rank, comm.size
        self.given = Inputs([member.node for member in comm.membership.members], chance)
        self.mine = self.given.arrays[self.rank].copy()

    def run(self, method: str, *arguments: Any, **options: Any) -> Any:
        return perform(self.comm, self.form, method, *arguments, **options)

    def at_root(self, value: Any) -> Any:
        return value if self.rank == self.given.root else None


def _all_reduce(call: Call) -> None:
    check("all_reduce", call.run("all_reduce", call.mine, call.given.op), call.given.reduced())


def _all_reduce_bucketed(call: Call) -> None:
    lengths = [1 + (call.given.seed >> shift) % 400 for shift in range(4)]
    parts = [[call.given.array(node, count) for node in call.given.nodes] for count in lengths]
    mine = [part[call.rank].copy() for part in parts]
    given = call.run("all_reduce_bucketed", mine, call.given.op, bucket_bytes=1024)
    check("all_reduce_bucketed", given, [call.given.reduced(part) for part in parts])


def _all_reduce_compressed(call: Call) -> None:
    compressor = (NoCompression(), TopK(1.0))[call.given.seed % 2]
    floats = [array.astype(np.float64) for array in call.given.arrays]
    given = call.run("all_reduce_compressed", floats[call.rank].copy(), compressor)
    check("all_reduce_compressed", given, reduce(operator.add, floats))


def _broadcast(call: Call) -> None:
    check("broadcast", call.run("broadcast", call.mine, call.given.root), call.given.arrays[call.given.root])


def _reduce(call: Call) -> None:
    given = call.run("reduce", call.mine, call.given.op, call.given.root)
    check("reduce", given, call.at_root(call.given.reduced()))


def _all_gather(call: Call) -> None:
    check("all_gather", call.run("all_gather", call.mine), np.stack(call.given.arrays))


def _reduce_scatter(call: Call) -> None:
    given = call.run("reduce_scatter", call.mine, call.given.op)
    check("reduce_scatter", given, np.array_split(call.given.reduced(), call.size)[call.rank])


def _all_to_all(call: Call) -> None:
    blocks = [[call.given.array(node, 40, receiver=to) for to in range(call.size)] for node in call.given.nodes]
    given = call.run("all_to_all", np.concatenate(blocks[call.rank]))
    check("all_to_all", given, np.concatenate([row[call.rank] for row in blocks]))


def _gather(call: Call) -> None:
    given = call.run("gather", call.mine, call.given.root)
    check("gather", given, call.at_root(np.stack(call.given.arrays)))


def _scatter(call: Call) -> None:
    blocks = np.stack(call.given.arrays)
    check("scatter", call.run("scatter", call.at_root(blocks), call.given.root), blocks[call.rank])


def _scan(call: Call) -> None:
    expected = call.given.reduced(call.given.arrays[: call.rank + 1])
    check("scan", call.run("scan", call.mine, call.given.op), expected)


def _exclusive_scan(call: Call) -> None:
    given = call.run("exclusive_scan", call.mine, "sum")
    check("exclusive_scan", given, sum(call.given.arrays[: call.rank], np.zeros_like(call.mine)))


def _all_gather_v(call: Call) -> None:
    arrays = [call.given.ragged(node) for node in call.given.nodes]
    check("all_gather_v", call.run("all_gather_v", arrays[call.rank]), arrays)


def _gather_v(call: Call) -> None:
    arrays = [call.given.ragged(node) for node in call.given.nodes]
    check("gather_v", call.run("gather_v", arrays[call.rank], call.given.root), call.at_root(arrays))


def _scatter_v(call: Call) -> None:
    arrays = [call.given.ragged(node) for node in call.given.nodes]
    check("scatter_v", call.run("scatter_v", call.at_root(arrays), call.given.root), arrays[call.rank])


def _reduce_scatter_v(call: Call) -> None:
    counts = [1 + (call.given.seed + rank) % 9 for rank in range(call.size)]
    arrays = [call.given.array(node, sum(counts)) for node in call.given.nodes]
    given = call.run("reduce_scatter_v", arrays[call.rank].copy(), counts, call.given.op)
    begin = sum(counts[: call.rank])
    check("reduce_scatter_v", given, call.given.reduced(arrays)[begin : begin + counts[call.rank]])


def _all_to_all_v(call: Call) -> None:
    arrays = [[call.given.ragged(node, receiver=to) for to in range(call.size)] for node in call.given.nodes]
    check("all_to_all_v", call.run("all_to_all_v", arrays[call.rank]), [row[call.rank] for row in arrays])


def _value(call: Call, rank: int) -> Any:
    return {"node": call.given.nodes[rank], "words": ["object", call.given.seed]}


def _values(call: Call) -> list[Any]:
    return [_value(call, rank) for rank in range(call.size)]


def _broadcast_object(call: Call) -> None:
    given = call.run("broadcast_object", call.at_root(_value(call, call.rank)), call.given.root)
    check("broadcast_object", given, _value(call, call.given.root))


def _gather_object(call: Call) -> None:
    given = call.run("gather_object", _value(call, call.rank), call.given.root)
    check("gather_object", given, call.at_root(_values(call)))


def _all_gather_object(call: Call) -> None:
    check("all_gather_object", call.run("all_gather_object", _value(call, call.rank)), _values(call))


def _scatter_object(call: Call) -> None:
    given = call.run("scatter_object", call.at_root(_values(call)), call.given.root)
    check("scatter_object", given, _value(call, call.rank))


def _barrier(call: Call) -> None:
    check("barrier", call.run("barrier"), None)


COLLECTIVES: Final[dict[str, Callable[[Call], None]]] = {
    "barrier": _barrier,
    "all_reduce": _all_reduce,
    "all_reduce_bucketed": _all_reduce_bucketed,
    "all_reduce_compressed": _all_reduce_compressed,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "gather": _gather,
    "scatter": _scatter,
    "scan": _scan,
    "exclusive_scan": _exclusive_scan,
    "all_gather_v": _all_gather_v,
    "gather_v": _gather_v,
    "scatter_v": _scatter_v,
    "reduce_scatter_v": _reduce_scatter_v,
    "all_to_all_v": _all_to_all_v,
    "broadcast_object": _broadcast_object,
    "gather_object": _gather_object,
    "all_gather_object": _all_gather_object,
    "scatter_object": _scatter_object,
}


def batch(comm: Communicator, chance: Random) -> None:
    """Several collectives in flight at once, and their results."""
    calls = [Call(comm, "started", chance) for _ in range(chance.randint(2, 6))]
    requests = []
    for call in calls:
        if call.given.seed % 2:
            requests.append(comm.start.all_reduce(call.mine, call.given.op))
        else:
            requests.append(comm.start.all_gather(call.mine))
    for call, given in zip(calls, wait_all(requests), strict=True):
        check("batch", given, call.given.reduced() if call.given.seed % 2 else np.stack(call.given.arrays))


# -- messages ------------------------------------------------------------------------------------------------


class Exchange(Call):
    """Every rank sends to the rank `shift` further."""

    def __init__(self, comm: Communicator, form: Form, chance: Random) -> None:
        super().__init__(comm, form, chance)
        shift = chance.randrange(1, self.size) if self.size > 1 else 0
        self.dest, self.source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
        self.tag = chance.choice((None, chance.randrange(1000)))
        self.expected = self.given.arrays[self.source]


def _send(call: Exchange) -> None:
    sent = call.comm.start.send(call.mine, call.dest, call.tag)
    given = call.run("recv", source=call.source, tag=call.tag)
    sent.wait()
    check("recv", given, call.expected)


def _send_first(call: Exchange) -> None:
    """Pairs of ranks, so that a blocking send meets its receive."""
    partner = call.rank ^ 1
    if partner >= call.size:
        return
    other = call.given.arrays[partner]
    if call.rank < partner:
        call.run("send", call.mine, partner)
        check("recv", call.run("recv", np.empty_like(other), source=partner), other)
    else:
        check("recv", call.run("recv", source=partner), other)
        call.run("send", call.mine, partner)


def _sendrecv(call: Exchange) -> None:
    given = call.run("sendrecv", call.mine, call.dest, source=call.source, tag=call.tag)
    check("sendrecv", given, call.expected)


def _send_bytes(call: Exchange) -> None:
    sent = call.comm.start.send_bytes(call.mine.tobytes(), call.dest, call.tag)
    given = call.run("recv_bytes", call.source, call.tag)
    sent.wait()
    check("recv_bytes", bytes(given), call.expected.tobytes())


def _send_iov(call: Exchange) -> None:
    half = len(call.mine) // 2
    sent = call.comm.start.send_iov([call.mine[:half].copy(), call.mine[half:].copy()], call.dest, call.tag)
    whole = np.empty_like(call.expected)
    call.run("recv_iov", [whole[:half], whole[half:]], call.source, call.tag)
    sent.wait()
    check("recv_iov", whole, call.expected)


def _send_object(call: Exchange) -> None:
    sent = call.comm.start.send_object(_value(call, call.rank), call.dest, call.tag)
    given = call.run("recv_object", call.source, call.tag)
    sent.wait()
    check("recv_object", given, _value(call, call.source))


def _probe(call: Exchange) -> None:
    sent = call.comm.start.send(call.mine, call.dest, call.tag)
    found = call.comm.probe(call.source, call.tag)
    given = call.run("recv", source=call.source, tag=call.tag)
    sent.wait()
    check("probe", found is not None and found.source, call.source)
    check("recv after probe", given, call.expected)


MESSAGES: Final[dict[str, Callable[[Exchange], None]]] = {
    "send": _send,
    "send, recv": _send_first,
    "sendrecv": _sendrecv,
    "send_bytes": _send_bytes,
    "send_iov": _send_iov,
    "send_object": _send_object,
    "probe": _probe,
}


def call_once(reporter: Reporter, comm: Communicator, kind: str, form: Form, chance: Random) -> None:
    """One collective, one exchange of messages, or a batch of requests, with its check."""
    match kind:
        case "batch":
            reporter.doing = "batch"
            batch(comm, chance)
        case "messages":
            reporter.doing = chance.choice(list(MESSAGES))
            if comm.size > 1:
                MESSAGES[reporter.doing](Exchange(comm, form, chance))
        case _:
            reporter.doing = chance.choice(list(COLLECTIVES))
            COLLECTIVES[reporter.doing](Call(comm, form, chance))
    reporter.done(f"{reporter.doing} ({form})")


# -- teams -----------------------------------------------------------------------------------------------------


class TeamCall:
    """One call of a team. What it must give follows from the contributors, which are known afterwards."""

    def __init__(self, team: Any, node: NodeId, chance: Random) -> None:
        self.team = team
        self.node = node
        self.inputs = Inputs([node], chance)
        self.mine = self.inputs.arrays[0].copy()

    @property
    def nodes(self) -> list[NodeId]:
        """Of the contributors."""
        return [member.node for member in self.team.contributors.members]

    @property
    def index(self) -> int:
        """Of this rank among the contributors."""
        return self.nodes.index(self.node)

    @property
    def arrays(self) -> list[Array]:
        return [self.inputs.array(node) for node in self.nodes]


def _team_barrier(call: TeamCall) -> Any:
    call.team.barrier()


def _team_all_reduce(call: TeamCall) -> Any:
    given = call.team.all_reduce(call.mine, call.inputs.op)
    check("team.all_reduce", given, call.inputs.reduced(call.arrays))
    return given


def _team_bucketed(call: TeamCall) -> Any:
    given = call.team.all_reduce_bucketed([call.mine], call.inputs.op)
    check("team.all_reduce_bucketed", given, [call.inputs.reduced(call.arrays)])
    return given[0]


def _team_compressed(call: TeamCall) -> Any:
    given = call.team.all_reduce_compressed(call.mine.astype(np.float64), NoCompression())
    check("team.all_reduce_compressed", given, reduce(operator.add, call.arrays).astype(np.float64))
    return given


def _team_all_gather(call: TeamCall) -> Any:
    given = call.team.all_gather(call.mine)
    check("team.all_gather", given, np.stack(call.arrays))
    return given


def _team_all_gather_v(call: TeamCall) -> Any:
    given = call.team.all_gather_v(call.inputs.ragged(call.node))
    check("team.all_gather_v", given, [call.inputs.ragged(node) for node in call.nodes])


def _team_all_gather_object(call: TeamCall) -> Any:
    given = call.team.all_gather_object([call.node, call.inputs.seed])
    check("team.all_gather_object", given, [[node, call.inputs.seed] for node in call.nodes])


def _team_reduce_scatter(call: TeamCall) -> Any:
    given = call.team.reduce_scatter(call.mine, call.inputs.op)
    parts = np.array_split(call.inputs.reduced(call.arrays), len(call.nodes))
    check("team.reduce_scatter", given, parts[call.index])


def _team_scan(call: TeamCall) -> Any:
    given = call.team.scan(call.mine, call.inputs.op)
    check("team.scan", given, call.inputs.reduced(call.arrays[: call.index + 1]))


def _team_exclusive_scan(call: TeamCall) -> Any:
    given = call.team.exclusive_scan(call.mine, "sum")
    check("team.exclusive_scan", given, sum(call.arrays[: call.index], np.zeros_like(call.mine)))


def _team_all_to_all(call: TeamCall) -> Any:
    members = call.team.communicator.membership.members
    blocks = [call.inputs.array(call.node, 20, receiver=member.node) for member in members]
    given = call.team.all_to_all(np.concatenate(blocks))
    expected = [call.inputs.array(node, 20, receiver=call.node) for node in call.nodes]
    check("team.all_to_all", given, np.concatenate(expected))


def _team_broadcast(call: TeamCall) -> Any:
    """All ranks raise if the root is lost before all have its array: that is a result too."""
    root = call.team.communicator.membership.members[0].node
    try:
        given = call.team.broadcast(call.mine, 0)
    except MembershipChanged:
        return "the root is lost"
    check("team.broadcast", given, call.inputs.array(root))
    return given


def _team_broadcast_object(call: TeamCall) -> Any:
    """As `_team_broadcast`."""
    root = call.team.communicator.membership.members[0].node
    try:
        given = call.team.broadcast_object([call.node, call.inputs.seed], 0)
    except MembershipChanged:
        return "the root is lost"
    check("team.broadcast_object", given, [root, call.inputs.seed])
    return given


TEAM_CALLS: Final[dict[str, Callable[[TeamCall], Any]]] = {
    "barrier": _team_barrier,
    "all_reduce": _team_all_reduce,
    "all_reduce_bucketed": _team_bucketed,
    "all_reduce_compressed": _team_compressed,
    "all_gather": _team_all_gather,
    "all_gather_v": _team_all_gather_v,
    "all_gather_object": _team_all_gather_object,
    "reduce_scatter": _team_reduce_scatter,
    "scan": _team_scan,
    "exclusive_scan": _team_exclusive_scan,
    "all_to_all": _team_all_to_all,
    "broadcast": _team_broadcast,
    "broadcast_object": _team_broadcast_object,
}
