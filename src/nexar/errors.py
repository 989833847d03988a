"""Every error that nexar raises. The word in brackets says where the cause is.

    NexarError
    ├── UsageError                          [caller]
    │   └── BufferMismatch
    ├── ConfigError                         [caller]
    ├── VersionMismatch                     [caller]
    ├── CollectiveMismatch                  [caller]
    ├── LinkClosed        ConnectionError   [caller]
    ├── Cancelled                           [caller]
    ├── DeviceError                         [caller]
    ├── JoinRefused       ConnectionError   [seed]
    ├── SeedUnreachable   ConnectionError   [seed]
    ├── FormationTimeout  TimeoutError      [peers]
    ├── PeerError         ConnectionError   [peers]
    │   ├── PeerLost
    │   └── PeerMisbehaved
    ├── OperationTimeout  TimeoutError      [peers]
    │   └── CollectiveTimeout
    ├── MembershipChanged                   [peers]
    ├── Expelled                            [peers]
    ├── Revoked                             [peers]
    ├── NoQuorum                            [peers]
    ├── RecoveryTimeout   TimeoutError      [peers]
    ├── RpcError                            [peers]
    │   ├── UnknownFunction
    │   ├── RemoteError
    │   ├── RpcTimeout    TimeoutError
    │   ├── RpcOverloaded
    │   └── RpcCancelled
    └── InternalError                       [nexar]

Facts are attributes, and keyword arguments of the constructor. The message is built from the facts alone. Facts are
plain values, and every class survives pickling, because errors are sent between processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar, dataclass_transform

from nexar.types import AwaitedPeer, NodeId, Rank, describe_peer, format_seconds

_Error = TypeVar("_Error", bound="NexarError")


@dataclass_transform(kw_only_default=True, eq_default=False)
def error_with_facts(cls: type[_Error]) -> type[_Error]:
    """Make the annotations keyword-only constructor arguments; identity, hash and repr stay those of an exception."""
    return dataclass(eq=False, repr=False, kw_only=True)(cls)


class NexarError(Exception):
    """Base class: `except nexar.NexarError` catches every error that nexar raises."""

    def __post_init__(self) -> None:
        """Facts may quote other processes, so control sequences are removed."""
        self.args = (printable(self._message()),)

    def _message(self) -> str:
        raise NotImplementedError(f"{type(self).__name__} has facts but no message")

    def _pickled_facts(self) -> dict[str, Any]:
        return self.__dict__

    def __copy__(self) -> Self:
        """Keeps all facts, also those that are not pickled; without a traceback."""
        return _rebuild(type(self), self.args, self.__dict__)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles text and facts."""
        return _rebuild, (type(self), self.args, self._pickled_facts())


def _rebuild(cls: type[_Error], args: tuple[Any, ...], facts: dict[str, Any]) -> _Error:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(facts)
    return error


LONGEST_LINE = 120
"""Characters of the first line of a message."""


def one_line_or(line: str, *lines: str) -> str:
    """`line` if it is one line of at most 120 characters, else the non-empty `lines`, the first of which must
    be short.
    """
    if len(line) <= LONGEST_LINE and "\n" not in line:
        return line
    return "\n".join(each for each in lines if each)


def with_heading(head: str, text: str) -> str:
    """`head: text`; the text starts on a new line if its first line does not fit behind `head`."""
    first, _, rest = text.partition("\n")
    return "\n".join(part for part in (one_line_or(f"{head}: {first}", head, first), rest) if part)


def list_ranks(ranks: Sequence[Rank]) -> str:
    """`rank 3`, `ranks 1, 2`, `ranks none`."""
    return ("rank " if len(ranks) == 1 else "ranks ") + (", ".join(str(rank) for rank in ranks) or "none")


def printable(text: str) -> str:
    """Replaces unprintable characters except line ends, so that no foreign escape sequence reaches a terminal."""
    if text.isprintable():
        return text
    return "\n".join("".join(each if each.isprintable() else " " for each in line) for line in text.split("\n"))


def error_text(error: BaseException) -> str:
    """The text of an error, as it can be sent. A user's `__str__` may raise."""
    try:
        return sendable(str(error))
    except Exception as failure:  # noqa: BLE001 - it must not hide the error that is reported
        return f"(no text: its __str__ raised {type(failure).__name__})"


def sendable(text: str) -> str:
    """The text with escapes for what is not Unicode, such as file names in another encoding."""
    return text.encode(errors="backslashreplace").decode()


def quote(text: str) -> str:
    """Quotes a foreign text. Further lines are marked, so that neither users nor launchers take another rank's
    traceback for this one's.
    """
    return "\n    | ".join(text.rstrip().splitlines())


def _during_clause(operation: str | None) -> str:
    """The clause that names the interrupted operation."""
    return f" during {operation}" if operation else ""


class UsageError(NexarError, ValueError):
    """The call is wrong or not possible now: a wrong argument, a closed object, a forked child. Also a ValueError."""


@error_with_facts
class BufferMismatch(UsageError):
    """A receive buffer differs from the message in size or dtype. The message can still be received."""

    expected: str
    """What the buffer holds, e.g. `float32[4]`."""
    found: str
    """What arrived."""
    source: Rank | None = None
    node: NodeId | None = None
    tag: int | None = None

    def _message(self) -> str:
        tag = "" if self.tag is None else f" with tag {self.tag}"
        return (
            f"the receive buffer is {self.expected}, but the message from {describe_peer(self.source, self.node)}{tag} "
            f"is {self.found}; it is kept: receive it into a buffer of that size and dtype, or without one"
        )


@error_with_facts
class ConfigError(NexarError):
    """A setting has a value that is not allowed, or does not exist."""

    variable: str
    value: object
    """Empty: it is required and not set."""
    allowed: str
    hint: str = ""
    because: str = ""
    """Why it is required."""
    unknown: bool = False
    """There is no such setting."""

    def _message(self) -> str:
        if self.unknown:
            return f"unknown setting {self.variable}; {self.hint}"
        hint = f" ({self.hint})" if self.hint else ""
        if self.value == "":
            missing = f"{self.variable} is not set"
            because = one_line_or(f"{missing}; {self.because}", missing, self.because) if self.because else missing
            return self._in_lines(because, f"set it to {self.allowed}", hint)
        return self._in_lines(f"{self.variable} = {self.value!r} is refused", f"allowed: {self.allowed}", hint)

    def _in_lines(self, first: str, remedy: str, hint: str) -> str:
        long_value = (f"{self.variable} has a value that is refused", repr(self.value))
        short = first if len(first.splitlines()[0]) <= LONGEST_LINE else "\n".join(long_value)
        return one_line_or(f"{first}; {remedy}{hint}", short, remedy, self.hint)


@error_with_facts
class VersionMismatch(NexarError):
    """Two nodes have different protocol versions."""

    ours: int
    theirs: int
    peer: str = "the peer"

    def _message(self) -> str:
        older = self.peer if self.theirs < self.ours else "this node"
        return f"{self.peer} speaks protocol {self.theirs}, this node {self.ours}; upgrade nexar on {older}"


@error_with_facts
class DeviceError(NexarError):
    """Staging an array to or from a device failed."""

    device: str
    operation: str
    cause: str

    def _message(self) -> str:
        return f"{self.operation} on device {self.device} failed: {self.cause}; pass a host array instead"


class InternalError(NexarError):
    """A bug in nexar."""

    def __init__(self, what: str) -> None:
        """`what`: the invariant that did not hold."""
        super().__init__(f"{what}; this is a bug in nexar, please report it with this traceback")


@error_with_facts
class JoinRefused(NexarError, ConnectionError):
    """The seed rejected this node."""

    reason: str
    address: str | None = None
    expelled: int = 0
    """The epoch in which the others expelled this node; 0: that is not the reason."""
    code: str = ""
    """For programs: `full`, `incompatible`, `nobody_left`, `not_elastic`, `wrong_secret`; empty for other reasons."""

    @property
    def nobody_left(self) -> bool:
        """Every member has left or died, so none can admit this node."""
        return self.code == "nobody_left"

    def _message(self) -> str:
        since = f"expelled in epoch {self.expelled}: " if self.expelled else ""
        heading = f"the seed{f' at {self.address}' if self.address else ''} refused this node"
        return with_heading(heading, f"{since}{self.reason}")


@error_with_facts
class SeedUnreachable(NexarError, ConnectionError):
    """No seed answered at its addresses, or the process that answered is not the seed."""

    addresses: Sequence[str]
    attempts: int
    cause: str
    timeout: float | None = None
    """It has passed; None: waiting longer would not help."""
    remedy: str = (
        "check that the seed runs, advertises this address (NEXAR_ADVERTISE) and has its port open for UDP and TCP"
    )
    answered: str = ""
    """The address of a seed that does not know the credential; empty: none answered."""
    credential: str = "ticket"
    """`ticket` or `token`."""

    def _message(self) -> str:
        if self.answered:
            first = f"a seed answered at {self.answered}, but it does not know this {self.credential}"
            return f"{first}\n{self.cause}\n{self.remedy}"
        span = "" if self.timeout is None else f" in {format_seconds(self.timeout)}"
        tried = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        addresses = ", ".join(self.addresses) or "any address"
        return one_line_or(
            f"no seed at {addresses} after {tried}{span} (last: {self.cause}); {self.remedy}",
            one_line_or(
                f"no seed at {addresses} after {tried}{span}", f"no seed after {tried}{span}", f"at {addresses}"
            ),
            f"last: {self.cause}",
            self.remedy,
        )


@error_with_facts
class FormationTimeout(NexarError, TimeoutError):
    """The cluster did not form in time, or cannot form; then `reason` says why. Raised on every rank."""

    joined: Sequence[str]
    """The nodes that joined, as text."""
    expected: int
    refused: Mapping[str, str]
    """Rejected nodes, with the reasons."""
    timeout: float
    reason: str = ""
    """Empty: the time was up."""

    def _message(self) -> str:
        refused = "; ".join(f"{who}: {why}" for who, why in self.refused.items()) or "nobody"
        facts = (
            f"{len(self.joined)} of {self.expected} nodes joined in {format_seconds(self.timeout)}\n"
            f"joined: {', '.join(self.joined) or 'nobody'}; refused: {refused}"
        )
        if self.reason:
            return f"{with_heading('the cluster did not form', self.reason)}\n{facts}"
        return f"{facts}\nstart the missing ones or raise NEXAR_FORMATION_TIMEOUT_SECS"


@error_with_facts
class PeerError(NexarError, ConnectionError):
    """One peer failed. `rank`, `node` and `address` may be unknown (None)."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None

    @property
    def peer(self) -> str:
        """For messages."""
        return describe_peer(self.rank, self.node, self.address)

    def _message(self) -> str:
        return f"{self.peer} failed; see its own log"


@error_with_facts
class PeerLost(PeerError):
    """The peer is gone: its connection ended, its process died, or it was silent too long."""

    cause: str
    """How it was noticed; with the traceback if the peer raised."""
    operation: str | None = None
    remedy: str = "continue without it, or restart it"

    def _message(self) -> str:
        return f"lost {self.peer}{_during_clause(self.operation)}: {quote(self.cause)}; {self.remedy}"


@error_with_facts
class PeerMisbehaved(PeerError):
    """The peer broke the protocol; its connection was closed."""

    what: str

    def _message(self) -> str:
        return f"{self.peer} broke the protocol: {self.what}; check that it runs the same version of nexar"


@error_with_facts
class LinkClosed(NexarError, ConnectionError):
    """The link, or its owner, was closed on this side."""

    rank: Rank | None = None
    node: NodeId | None = None
    address: str | None = None
    operation: str | None = None
    owner: str | None = None
    """What all the links belonged to, in words that a peer understands too."""

    def _message(self) -> str:
        link = f"the link to {describe_peer(self.rank, self.node, self.address)} was closed on this side"
        closed = link if self.owner is None else f"{self.owner} was closed"
        return f"{closed}{_during_clause(self.operation)}; use it before closing it"


_TIMEOUT_SETTINGS: Final = {"barrier": "BARRIER", "checkpoint": "ELASTIC_CHECKPOINT", "grow": "ELASTIC_CHECKPOINT"}
"""Operations with a timeout setting of their own: the part of its name before `_TIMEOUT_SECS`."""
_LIMITED_BY_SETTING: Final = {
    "nexar.init()": "NEXAR_FORMATION_TIMEOUT_SECS",
    "joining the cluster": "NEXAR_JOIN_TIMEOUT_SECS",
    "making the first communicator": "NEXAR_FORMATION_TIMEOUT_SECS",
    "making the next communicator": "NEXAR_RECOVERY_TIMEOUT_SECS",
}
"""Operations without an argument `timeout`, each with the setting that limits it."""


@error_with_facts
class Cancelled(NexarError):
    """The operation was cancelled by its owner, or a collective by one of its ranks. The link stays usable."""

    operation: str = "the operation"
    reason: str = ""
    rank: Rank | None = None
    """The rank that cancelled it, if it was another one."""

    def _message(self) -> str:
        by = "" if self.rank is None else f" by rank {self.rank}"
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.operation} was cancelled{by}{reason}; its buffers are free again"


@error_with_facts
class OperationTimeout(NexarError, TimeoutError):
    """An operation did not finish by its deadline. Its buffers are detached; the link stays usable."""

    operation: str
    waiting_for: Sequence[AwaitedPeer] | str
    """The peers that had not answered; a text if no peer is to blame."""
    timeout: float

    def _message(self) -> str:
        waiting = self.waiting_for
        missing = waiting if isinstance(waiting, str) else "; ".join(str(peer) for peer in waiting)
        return (
            f"{self._call_name()} did not finish in {format_seconds(self.timeout)}, waiting for {missing}; "
            f"{self._first_check()}raise the limit ({self._limit_name()})"
        )

    def _first_check(self) -> str:
        peers = () if isinstance(self.waiting_for, str) else self.waiting_for
        ranks = sorted({peer.rank for peer in peers if peer.rank is not None})
        return f"check {list_ranks(ranks)} first, or " if ranks else ""

    def _call_name(self) -> str:
        return self.operation

    def _limit_name(self) -> str:
        return _LIMITED_BY_SETTING.get(self.operation, "timeout=")


@error_with_facts
class CollectiveTimeout(OperationTimeout):
    """A collective made no progress until its deadline."""

    sequence: int

    def _call_name(self) -> str:
        return f"{self.operation} #{self.sequence}"

    def _limit_name(self) -> str:
        setting = _TIMEOUT_SETTINGS.get(self.operation, "COLLECTIVE")
        return f"timeout=, or NEXAR_{setting}_TIMEOUT_SECS"


@error_with_facts
class CollectiveMismatch(NexarError):
    """Ranks of one communicator called different collectives at the same position. The communicator is revoked."""

    expected: str
    """The call on this rank, e.g. `all_reduce of float32[4], sum`."""
    found: str
    ranks: Sequence[Rank]
    """The ranks that made the other call."""
    sequence: int | None = None
    calls: Mapping[Rank, str] | None = None
    """The calls of ranks, as far as known here."""

    def _message(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        return (
            f"collective{number} differs: {self.expected} here, {self._others()}; "
            "every rank must make the same calls in the same order, with the same dtype, count, op, root and algorithm"
        )

    def _others(self) -> str:
        by_call: dict[str, list[Rank]] = {self.found: list(self.ranks)}
        for rank, call in sorted((self.calls or {}).items()):
            if call != self.expected and rank not in by_call.setdefault(call, []):
                by_call[call].append(rank)
        return ", ".join(f"{call} on {list_ranks(ranks)}" for call, ranks in by_call.items())


@error_with_facts
class MembershipChanged(NexarError):
    """The members changed. `communicator` is the successor: new rank, new size, next epoch."""

    communicator: Any
    """None in a pickled copy."""
    lost: Mapping[Rank, str]
    """Old rank to cause."""
    joined: Sequence[Rank]
    """New ranks."""
    completed_by_all: int | None
    """Sequence number of the last operation that finished on all ranks."""

    def _message(self) -> str:
        lost = "; ".join(f"rank {rank}: {quote(cause)}" for rank, cause in self.lost.items()) or "nobody"
        joined = list_ranks(self.joined) if self.joined else "nobody"
        done = "no operation" if self.completed_by_all is None else f"operation #{self.completed_by_all}"
        return (
            f"the membership changed (lost: {lost}; joined: {joined}; finished by all: {done}); "
            "continue with the .communicator of this error"
        )

    def _pickled_facts(self) -> dict[str, Any]:
        return {**self.__dict__, "communicator": None}


@error_with_facts
class Expelled(NexarError):
    """The others agreed to continue without this node."""

    epoch: int
    reason: str
    rank: Rank | None = None
    elastic: bool = False
    """The cluster is known to admit nodes."""

    def _message(self) -> str:
        who = "this node" if self.rank is None else f"this node (rank {self.rank})"
        remedy = "start a new process to join again"
        if not self.elastic:
            remedy = "the others continue without it; a new process can join only an elastic cluster (--elastic)"
        return f"{who} was expelled in epoch {self.epoch}: {quote(self.reason)}; {remedy}"


@error_with_facts
class Revoked(NexarError):
    """The communicator is over, for every member."""

    communicator: str
    reason: str
    rank: Rank | None = None
    """The rank that revoked or closed it."""
    closed: bool = False
    """That rank closed it, and takes no part in this call, or in a successor after a loss."""

    def _message(self) -> str:
        if self.closed:
            again = "make a new one with split() or group() of the one it came from"
            return f"communicator {self.communicator} is over: {self.reason}; {again}"
        by = "" if self.rank is None else f" by rank {self.rank}"
        return (
            f"communicator {self.communicator} was revoked{by}: {self.reason}; make a new one with shrink() or split()"
        )


@error_with_facts
class NoQuorum(NexarError):
    """No majority of the membership can be reached, so this side may not continue."""

    alive: Sequence[Rank]
    needed: int
    left: Sequence[Rank] = ()
    """The unreachable ranks that ended or closed their communicator."""

    def _message(self) -> str:
        if self.left:
            return (
                f"{list_ranks(self.left)} left, and {list_ranks(self.alive)} alone cannot continue: a majority needs "
                f"{self.needed}\nno rank may end while another needs it: call comm.barrier() on all ranks at the end"
            )
        return (
            f"only {list_ranks(self.alive)} can be reached, a majority needs {self.needed}; "
            "the other side may be running: restart this side, or repair the network"
        )


@error_with_facts
class RecoveryTimeout(NexarError, TimeoutError):
    """A majority is reachable, but did not agree in time."""

    missing_votes: Sequence[Rank]
    timeout: float

    def _message(self) -> str:
        return (
            f"no agreement on the next membership in {format_seconds(self.timeout)}; no vote from "
            f"{list_ranks(self.missing_votes)}; check there first, or raise NEXAR_RECOVERY_TIMEOUT_SECS"
        )


@error_with_facts
class RpcError(NexarError):
    """A remote call did not return a value."""

    rank: Rank
    function: str

    def _message(self) -> str:
        return f"{self._call} failed; see the log of rank {self.rank}"

    @property
    def _call(self) -> str:
        return f"remote call {self.function} on rank {self.rank}"


@error_with_facts
class UnknownFunction(RpcError):
    """The peer serves no function of that name."""

    registered: Sequence[str] = ()
    """The functions it serves; ids follow the names."""

    def _message(self) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - needed only for a mistyped name

        close = get_close_matches(self.function, [each.partition(" (id ")[0] for each in self.registered], n=3)
        meant = f" (did you mean {' or '.join(close)}?)" if close else ""
        there = f"rank {self.rank} serves {', '.join(self.registered) or 'nothing'}"
        return f"{self._call}: no such function there{meant}; {there}; register it with @comm.serve before calling"


@error_with_facts
class RemoteError(RpcError):
    """The function ran and raised."""

    traceback: str

    def _message(self) -> str:
        return quote(f"{self._call} raised; its traceback:\n{self.traceback}")


@error_with_facts
class RpcTimeout(RpcError, TimeoutError):
    """No answer by the call's deadline; the function may have run."""

    timeout: float

    def _message(self) -> str:
        return (
            f"{self._call} gave no answer in {format_seconds(self.timeout)}; it may have run; allow more with timeout="
        )


@error_with_facts
class RpcOverloaded(RpcError):
    """The peer already runs as many calls as it allows; the function did not run."""

    limit: int

    def _message(self) -> str:
        return f"{self._call} was rejected: {self.limit} calls run there; try later, or raise NEXAR_RPC_CONCURRENCY"


@error_with_facts
class RpcCancelled(RpcError):
    """The call was cancelled before it answered."""

    reason: str = ""

    def _message(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"{self._call} was cancelled{reason}; it may have run"


__all__ = [
    "BufferMismatch",
    "Cancelled",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "DeviceError",
    "Expelled",
    "FormationTimeout",
    "InternalError",
    "JoinRefused",
    "LinkClosed",
    "MembershipChanged",
    "NexarError",
    "NoQuorum",
    "OperationTimeout",
    "PeerError",
    "PeerLost",
    "PeerMisbehaved",
    "RecoveryTimeout",
    "RemoteError",
    "Revoked",
    "RpcCancelled",
    "RpcError",
    "RpcOverloaded",
    "RpcTimeout",
    "SeedUnreachable",
    "UnknownFunction",
    "UsageError",
    "VersionMismatch",
]
