"""Peer processes for tests: the other end of a link in a second process, or both ends in two.

    with PeerProcess("package.module:function", [1000], schemes=["tls"]) as peer:
        peer.node.wait(peer.link.post_send(0, data))
        assert peer.result(timeout=10) == ...

The child calls `function(node, link, *arguments)`; its exception is raised here with the traceback. The function must
be importable; arguments and result are JSON. With `raw=True` both sides get (RawNode, Carrier).

Every wait has a deadline. Failures show the child's standard error. The child has ended when the `with` block is left.
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

from nexar.transport.base import Carrier
from nexar.types import NodeId
from nexar_tools import environment
from nexar_tools.peer_protocol import (
    HERE,
    LINKED,
    RAW,
    ClusterAuthority,
    ConnectionTerms,
    ConnectTo,
    Function,
    HostSpec,
    PeerNode,
    PeerOrder,
    PeerReady,
    PeerReport,
    PeerResult,
    PeerStop,
)

if TYPE_CHECKING:
    from nexar.links.link import Link


_SHOWN_BYTES = 8000  # of standard error
_GRACE = 2.0  # seconds between SIGTERM and SIGKILL


class ChildEnded(Exception):
    """The process ended without the expected message."""


class ChildProcess:
    """Starts `python -m module` behind `prefix` (for example `ip netns exec NAME`)."""

    def __init__(self, module: str, prefix: Sequence[str] = ()) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # forget() closes it
        command = [*prefix, sys.executable, "-m", module]
        try:
            self._process = subprocess.Popen(
                command,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
            )
        except OSError:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin = self._process.stdin
        self._stdout = self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        self._received = b""

    @property
    def pid(self) -> int:
        """The process id, if `prefix` execs rather than forks."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def stderr(self) -> str:
        """The last part of its standard error."""
        if self._errors.closed:
            return ""
        end = os.fstat(self._errors.fileno()).st_size
        shown = os.pread(self._errors.fileno(), _SHOWN_BYTES, max(0, end - _SHOWN_BYTES))
        return shown.decode(errors="replace").strip()

    def send(self, message: msgspec.Struct, deadline: float) -> None:
        """Raises ChildEnded, or TimeoutError if the process does not read."""
        line = memoryview(msgspec.json.encode(message) + b"\n")
        while line:
            _poll(self._stdin.fileno(), select.POLLOUT, deadline, "the process does not read its orders")
            try:
                line = line[self._stdin.write(line) or 0 :]
            except BrokenPipeError:
                raise ChildEnded from None

    def receive(self, deadline: float) -> bytes:
        """Raises ChildEnded or TimeoutError."""
        while b"\n" not in self._received:
            _poll(self._stdout.fileno(), select.POLLIN, deadline, "the process sent nothing")
            news = self._stdout.read(1 << 16)
            if not news:
                raise ChildEnded
            self._received += news
        line, _, self._received = self._received.partition(b"\n")
        return line

    def fileno(self) -> int:
        """Readable when the process has sent something or ended."""
        return self._stdout.fileno()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float) -> int | None:
        """Returns the exit code; None after the timeout."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self, timeout: float) -> bool:
        """Waits, then ends the process. Returns False if it did not end by itself. Idempotent."""
        self._stdin.close()
        by_itself = self.wait(timeout) is not None
        if not by_itself:
            self._process.terminate()
            if self.wait(_GRACE) is None:
                self._process.kill()
                self._process.wait()
        self._stdout.close()
        return by_itself

    def close_stderr(self) -> None:
        """Call after `end`."""
        self._errors.close()

    def describe_end(self) -> str:
        code = self.wait(_GRACE)  # its pipe closes shortly before it ends
        if code is None:
            return "closed its output but still runs"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _poll(descriptor: int, event: int, deadline: float, reason: str) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError(reason)


_END_TIMEOUT = 10.0  # seconds to close its node and end
_SHORT_END_TIMEOUT = 1.0  # the same after a failure


class PeerFailed(RuntimeError):
    """The peer raised, died, missed a deadline or did not end. The text holds its traceback and standard error."""

    def __init__(self, what: str, traceback: str = "", stderr: str = "", exit_code: int | None = None) -> None:
        parts = [what, traceback.strip(), f"its standard error:\n{stderr}" if stderr else ""]
        super().__init__("\n".join(part for part in parts if part))
        self.traceback = traceback
        self.stderr = stderr
        self.exit_code = exit_code


class PeerHandle:
    """A peer process as its parent sees it."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.process = ChildProcess("nexar_tools.peer_main", prefix)
        self.expendable = False  # it was killed or stopped on purpose
        self._outcome: PeerResult | None = None

    def order(self, order: PeerOrder, deadline: float) -> None:
        """Sends an order. Raises PeerFailed."""
        try:
            self.process.send(order, deadline)
        except ChildEnded:
            self.result(deadline)  # raises the failure it reported, or reports its end

    def ready(self, deadline: float) -> PeerReady:
        """Raises PeerFailed for any other report."""
        report = self._receive(deadline)
        if isinstance(report, PeerResult):
            self._outcome = report
            self.result(deadline)
        assert isinstance(report, PeerReady)
        return report

    def result(self, deadline: float) -> Any:
        """What the function returned. Raises PeerFailed."""
        outcome = self._outcome
        if outcome is None:
            report = self._receive(deadline)
            assert isinstance(report, PeerResult)
            self._outcome = outcome = report
        if outcome.failure is not None:
            raise PeerFailed("the peer process raised:", outcome.failure, self.process.stderr())
        return outcome.result

    def _receive(self, deadline: float) -> PeerReport:
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

    def check(self) -> None:
        """Raises PeerFailed if it has failed already."""
        if self._outcome is None and select.select([self.process], [], [], 0)[0]:
            self.result(time.monotonic() + 1)

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ends the child, with the arguments of `__exit__`. The child's failure becomes a note on the exception."""
        if error is not None and not isinstance(error, PeerFailed) and (known := self.known_failure()):
            error.add_note(f"meanwhile in the other process: {known}")
        self._end(_END_TIMEOUT if error is None else _SHORT_END_TIMEOUT, strict=error is None)

    def known_failure(self) -> str:
        try:
            self.check()
        except PeerFailed as failure:
            return str(failure)
        return ""

    def _end(self, timeout: float, *, strict: bool) -> None:
        """Ends the child. `strict`: raises PeerFailed unless it ended by itself with exit code 0.

        Without PeerStop the child takes the end of its input for the parent's death.
        """
        if self.expendable:
            self.process.signal(signal.SIGKILL)
        elif strict:
            self._send_stop(timeout)
        try:
            by_itself = self.process.end(timeout)
            if strict and not self.expendable and (not by_itself or self.process.exit_code):
                how = self.process.describe_end() if by_itself else f"did not end within {timeout} s and was ended"
                raise self._failed(f"reported a result, but {how}")
        finally:
            self.process.close_stderr()

    def _send_stop(self, timeout: float) -> None:
        try:
            self.process.send(PeerStop(), time.monotonic() + timeout)
        except (ChildEnded, TimeoutError):
            return  # it has ended or does not read: `end` finds out


__all__ = ["HERE", "LINKED", "RAW", "ConnectionTerms", "HostSpec", "PeerFailed", "PeerPair", "PeerProcess"]

_CHECK_SECONDS = 0.25  # seconds between two checks of the child while waiting for the link
_LEFT: Final[NodeId] = 0x11
_RIGHT: Final[NodeId] = 0x22


class PeerProcess:
    """A `with` block with a second process, connected to this one.

    `place` is the child's; this process listens on `host`, by default the child's.
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
        """`common`: fields of ConnectionTerms."""
        self._terms = terms or ConnectionTerms(**common)
        self._function, self._arguments = function, arguments
        self._place, self._host, self._peer_dials = place, host or place.host, peer_dials
        self._collected = False
        self._stack = ExitStack()
        self.node: Any = None
        """The node of this process: a LinkedNode, or an instance of `node_class`."""
        self.line: Any = None

    def __enter__(self) -> Self:
        with self._stack:
            self._open(time.monotonic() + self._terms.timeout)
            self._stack = self._stack.pop_all()
        return self

    def _open(self, deadline: float) -> None:
        cluster = ClusterAuthority(self._terms)
        self._peer = peer = PeerHandle(self._place.prefix)
        self._stack.push(peer.leave)
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

    def _accept(self, node: PeerNode, deadline: float) -> Any:
        while True:
            try:
                return node.accept(min(_CHECK_SECONDS, max(0.0, deadline - time.monotonic())))
            except TimeoutError:
                self._peer.check()
                if time.monotonic() >= deadline:
                    raise

    @property
    def link(self) -> Link:
        return cast("Link", self.line)

    @property
    def carrier(self) -> Carrier:
        return cast("Carrier", self.line)

    @property
    def pid(self) -> int:
        return self._peer.process.pid

    @property
    def peer_node(self) -> NodeId:
        return _RIGHT

    def result(self, timeout: float = 30.0) -> Any:
        """What the function returned. Raises PeerFailed."""
        self._collected = True
        return self._peer.result(time.monotonic() + timeout)

    def stderr(self) -> str:
        """The last part of what the child printed."""
        return self._peer.process.stderr()

    def kill(self) -> None:
        """Kills the child; its end is then not a failure."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGKILL)

    def stop(self) -> None:
        """Stops the child. If it is not resumed it is killed at the end, which is not a failure."""
        self._peer.expendable = True
        self._peer.process.signal(signal.SIGSTOP)

    def resume(self) -> None:
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
    """A `with` block with two processes connected to each other. `left` dials."""

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
        """`common`: fields of ConnectionTerms."""
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
        self._stack.push(peer.leave)
        return peer

    def results(self, timeout: float = 30.0) -> tuple[Any, Any]:
        """What both functions returned. Raises the first PeerFailed at once, with a note about the other process."""
        self._collected = True
        deadline = time.monotonic() + timeout
        waiting = list(self.peers)
        while waiting:
            ready, _, _ = select.select([p.process for p in waiting], [], [], max(0.0, deadline - time.monotonic()))
            for peer in [p for p in waiting if not ready or p.process in ready]:
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
