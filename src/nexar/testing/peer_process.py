"""A process of ours with a line of messages to it and from it, in which every wait has a deadline.

Its standard output belongs to the messages, its standard error goes to a file and is shown when something went wrong.
It is ended by its process id, never by its name, and it has ended when `end` returns.

A peer process as its parent knows it: what it was told, what it reported, and how it ended.

The other end of a link, in a real second process; or both ends, in two.

    with PeerProcess("package.module:function", [1000], schemes=["tls"]) as peer:
        peer.node.wait(peer.link.post_send(0, data))
        assert peer.result(timeout=10) == ...

The child calls `function(node, link, *arguments)`; what it returns (anything JSON can say) is the result. What it
raises is raised here, with its traceback. The function must be importable by name; arguments must be JSON-able.
Every wait has a deadline, and when the `with` block is left, the child has ended.

With `raw=True` the function gets (RawNode, Carrier), and so does the parent: the transport alone.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

import msgspec

from nexar.testing.peer_protocol import (
    HERE,
    LINKED,
    RAW,
    ClusterAuthority,
    ConnectionTerms,
    ConnectTo,
    Function,
    HostSpec,
    PeerOrder,
    PeerReady,
    PeerReport,
    PeerResult,
    PeerSetup,
    PeerStop,
)
from nexar.transport.base import Carrier
from nexar.types import NodeId

if TYPE_CHECKING:
    from nexar.links.link import Link


_SHOWN_BYTES = 8000  # of standard error
_GRACE = 2.0  # between the polite and the impolite signal


class ChildEnded(Exception):
    """The process ended without saying what was awaited."""


class ChildProcess:
    """`python -m module`, started behind `prefix` (for example `ip netns exec NAME`)."""

    def __init__(self, module: str, prefix: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()
        command = [*prefix, sys.executable, "-m", module]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._heard = b""

    @property
    def pid(self) -> int:
        """The process id; that of the Python process, as long as `prefix` execs rather than forks."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def stderr(self) -> str:
        """The last part of what it wrote there, whatever the process does at the moment."""
        if self._errors.closed:
            return ""
        end = os.fstat(self._errors.fileno()).st_size
        shown = os.pread(self._errors.fileno(), _SHOWN_BYTES, max(0, end - _SHOWN_BYTES))
        return shown.decode(errors="replace").strip()

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        """Raises ChildEnded, or TimeoutError when it does not listen."""
        line = memoryview(msgspec.json.encode(message) + b"\n")
        while line:
            _await(self._stdin.fileno(), select.POLLOUT, deadline, "the process does not read its orders")
            try:
                line = line[self._stdin.write(line) or 0 :]
            except BrokenPipeError:
                raise ChildEnded from None

    def receive(self, deadline: float) -> bytes:
        """The next message. Raises ChildEnded, or TimeoutError."""
        while b"\n" not in self._heard:
            _await(self._stdout.fileno(), select.POLLIN, deadline, "the process said nothing")
            news = self._stdout.read(1 << 16)
            if not news:
                raise ChildEnded
            self._heard += news
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def fileno(self) -> int:
        """For waiting on several children at once; readable when it said something or ended."""
        return self._stdout.fileno()

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, None if it still runs at the end of the timeout."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout: float) -> bool:
        """Give it `timeout` to end by itself, then make it. False: it had to be made. Idempotent."""
        self._stdin.close()
        by_itself = self.wait(timeout) is not None
        if not by_itself:
            self._process.terminate()
            if self.wait(_GRACE) is None:
                self._process.kill()
                self._process.wait()
        self._stdout.close()
        return by_itself

    def forget(self) -> None:
        """Drop what it wrote to standard error; after `end`."""
        self._errors.close()

    def describe_end(self) -> str:
        """How it ended, in words."""
        code = self.wait(_GRACE)  # its pipe closes a moment before it has ended
        if code is None:
            return "closed its output but still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _await(descriptor: int, event: int, deadline: float, complaint: str) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(complaint)


_END_TIMEOUT = 10.0  # seconds it gets to close its node and end
_SHORT_END_TIMEOUT = 1.0  # the same after a failure


class PeerFailed(RuntimeError):
    """The peer process raised, died, said nothing in time, or did not end.

    The text holds its traceback and its standard error.
    """

    def __init__(self, what: str, traceback: str = "", stderr: str = "", exit_code: int | None = None) -> None:
        """`what` happened, and all that is known about it."""
        parts = [what, traceback.strip(), f"its standard error:\n{stderr}" if stderr else ""]
        super().__init__("\n".join(part for part in parts if part))
        self.traceback = traceback
        self.stderr = stderr
        self.exit_code = exit_code


class PeerHandle:
    """A peer process and the conversation with it."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.process = ChildProcess("nexar.testing.peer_main", prefix)
        self.expendable = False  # it was killed or stopped on purpose
        self._outcome: PeerResult | None = None

    def order(self, order: PeerOrder, deadline: float) -> None:
        """Tell it something. Raises PeerFailed if it is gone."""
        try:
            self.process.send(order, deadline)
        except ChildEnded:
            self.result(deadline)  # it said why, or this says that it is gone

    def ready(self, deadline: float) -> PeerReady:
        """What it says once its node is made; PeerFailed if it says something else."""
        report = self._hear(deadline)
        if isinstance(report, PeerResult):
            self._outcome = report
            self.result(deadline)
        assert isinstance(report, PeerReady)
        return report

    def result(self, deadline: float) -> Any:
        """What its function returned. PeerFailed if it raised, died or says nothing."""
        outcome = self._outcome
        if outcome is None:
            report = self._hear(deadline)
            assert isinstance(report, PeerResult)
            self._outcome = outcome = report
        if outcome.failure is not None:
            raise PeerFailed("the peer process raised:", outcome.failure, self.process.stderr())
        return outcome.result

    def _hear(self, deadline: float) -> PeerReport:
        begin = time.monotonic()
        try:
            line = self.process.receive(deadline)
        except ChildEnded:
            raise self._failed(self.process.describe_end()) from None
        except TimeoutError:
            raise self._failed(f"did not report within {max(0.0, deadline - begin):.1f} s") from None
        report: PeerReport = msgspec.json.decode(line, type=PeerReport)
        return report

    def _failed(self, how: str) -> PeerFailed:
        code = self.process.exit_code
        return PeerFailed(f"the peer process {self.process.pid} {how}", "", self.process.stderr(), code)

    def glance(self) -> None:
        """Raise if it has failed already."""
        if self._outcome is None and select.select([self.process], [], [], 0)[0]:
            self.result(time.monotonic() + 1)

    def part(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave it, as `__exit__` does. What went wrong there is noted on what went wrong here."""
        if error is not None and not isinstance(error, PeerFailed) and (known := self.known_failure()):
            error.add_note(f"meanwhile in the other process: {known}")
        self._end(_END_TIMEOUT if error is None else _SHORT_END_TIMEOUT, strict=error is None)

    def known_failure(self) -> str:
        """What is to be said about it when something else went wrong; empty if it is well."""
        try:
            self.glance()
        except PeerFailed as failure:
            return str(failure)
        return ""

    def _end(self, timeout: float, *, strict: bool) -> None:
        """It has ended when this returns; strict: complain if it did not do so by itself and well.

        Without being told to leave it takes the end of its orders for our death, and ends at once.
        """
        if self.expendable:
            self.process.signal(signal.SIGKILL)
        elif strict:
            self._tell_to_leave(timeout)
        try:
            by_itself = self.process.end(timeout)
            if strict and not self.expendable and (not by_itself or self.process.exit_code):
                how = self.process.describe_end() if by_itself else f"did not end within {timeout} s and was ended"
                raise self._failed(f"reported a result, but {how}")
        finally:
            self.process.forget()

    def _tell_to_leave(self, timeout: float) -> None:
        try:
            self.process.send(PeerStop(), time.monotonic() + timeout)
        except (ChildEnded, TimeoutError):
            return  # it has ended, or does not listen: `end` finds out which


__all__ = ["HERE", "LINKED", "RAW", "ConnectionTerms", "HostSpec", "PeerFailed", "PeerPair", "PeerProcess"]

_GLANCE = 0.25  # seconds that a wait for the link may go on without a look at the child
_LEFT: Final[NodeId] = 0x11
_RIGHT: Final[NodeId] = 0x22


class PeerProcess:
    """A `with` block in which a second process is connected to this one.

    `peer_dials`: the child opens the connection rather than this side. `place` is the child's; this process listens on
    `host`, by default the child's.
    """

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Any] = (),
        *,
        terms: ConnectionTerms | None = None,
        peer_dials: bool = False,
        place: HostSpec = HERE,
        host: str | None = None,
        **common: Any,
    ) -> None:
        """`common` are the fields of Terms, which can also be given as one value."""
        self._terms = terms or ConnectionTerms(**common)
        self._function, self._arguments = function, arguments
        self._place, self._host, self._peer_dials = place, host or place.host, peer_dials
        self._collected = False
        self._stack = ExitStack()
        self.node: Any = None
        """This side's node: a LinkedNode, or what `assembly` named."""
        self.line: Any = None
        """This side's end of the connection, of whatever kind."""

    def __enter__(self) -> Self:
        with self._stack:
            self._open(time.monotonic() + self._terms.timeout)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, deadline: float) -> None:
        cluster = ClusterAuthority(self._terms)
        self._peer = peer = PeerHandle(self._place.prefix)
        self._stack.push(peer.part)
        peer.order(cluster.start(_RIGHT, _LEFT, self._place, self._function, self._arguments), deadline)
        self.node = node = cluster.make_node(_LEFT, HostSpec(self._host))
        self._stack.callback(node.close)
        addresses = peer.ready(deadline).addresses
        if self._peer_dials:
            peer.order(ConnectTo(node.addresses_for(_RIGHT)), deadline)
            self.line = self._accept(node, deadline)
        else:
            peer.order(ConnectTo(), deadline)
            self.line = node.connect(_RIGHT, addresses, max(0.0, deadline - time.monotonic()))

    def _accept(self, node: PeerSetup, deadline: float) -> Any:
        while True:
            try:
                return node.accept(min(_GLANCE, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                self._peer.glance()
                if time.monotonic() >= deadline:
                    raise

    @property
    def link(self) -> Link:
        """This side's end, where it is a link."""
        return cast("Link", self.line)

    @property
    def carrier(self) -> Carrier:
        """This side's end, where it is a bare carrier."""
        return cast("Carrier", self.line)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._peer.process.pid

    @property
    def peer_node(self) -> NodeId:
        """The child's node id: the source of what it sends."""
        return _RIGHT

    def result(self, timeout: float = 30.0) -> Any:
        """What the child's function returned. Raises PeerFailed, also when it says nothing in time."""
        self._collected = True
        return self._peer.result(time.monotonic() + timeout)

    def stderr(self) -> str:
        """What the child printed so far (its standard output goes there too)."""
        return self._peer.process.stderr()

    def kill(self) -> None:
        """SIGKILL. Its death is then no failure of the test."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP: it lives, and does nothing. If it is still stopped at the end it is killed, which is no failure."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._peer.expendable = False
        self._peer.process.signal(signal.SIGCONT)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if not self._collected and not self._peer.expendable:
                self.result(self._terms.timeout)


class PeerPair:
    """A `with` block in which two processes are connected to each other; this one only collects.

    `left` dials. Both are called with the same arguments, `left(node, line, *arguments)` as well as `right`.
    """

    def __init__(
        self,
        left: Function,
        right: Function,
        arguments: Sequence[Any] = (),
        *,
        terms: ConnectionTerms | None = None,
        places: tuple[HostSpec, HostSpec] = (HERE, HERE),
        **common: Any,
    ) -> None:
        """`common` are the fields of Terms, which can also be given as one value."""
        self._terms = terms or ConnectionTerms(**common)
        self._functions, self._arguments, self._places = (left, right), arguments, places
        self._stack = ExitStack()
        self._collected = False

    def __enter__(self) -> Self:
        with self._stack:
            self._open(time.monotonic() + self._terms.timeout)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, deadline: float) -> None:
        cluster = ClusterAuthority(self._terms)
        self.peers = [self._start(place) for place in self._places]
        left, right = self.peers
        left.order(cluster.start(_LEFT, _RIGHT, self._places[0], self._functions[0], self._arguments), deadline)
        right.order(cluster.start(_RIGHT, _LEFT, self._places[1], self._functions[1], self._arguments), deadline)
        left.ready(deadline)
        addresses = right.ready(deadline).addresses
        right.order(ConnectTo(), deadline)
        left.order(ConnectTo(addresses), deadline)

    def _start(self, place: HostSpec) -> PeerHandle:
        peer = PeerHandle(place.prefix)
        self._stack.push(peer.part)
        return peer

    def results(self, timeout: float = 30.0) -> tuple[Any, Any]:
        """What both functions returned. The first failure is raised at once, with what the other process has to say."""
        self._collected = True
        deadline = time.monotonic() + timeout
        waiting = list(self.peers)
        while waiting:
            said, _, _ = select.select([p.process for p in waiting], [], [], max(0.0, deadline - time.monotonic()))
            for peer in [p for p in waiting if not said or p.process in said]:
                self._collect(peer, deadline)
                waiting.remove(peer)
        left, right = (peer.result(deadline) for peer in self.peers)
        return left, right

    def _collect(self, peer: PeerHandle, deadline: float) -> None:
        try:
            peer.result(deadline)
        except PeerFailed as failure:
            (other,) = (p for p in self.peers if p is not peer)
            if known := other.known_failure():
                failure.add_note(f"meanwhile in the other process: {known}")
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if not self._collected:
                self.results(self._terms.timeout)
