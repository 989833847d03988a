"""The point-to-point methods of a communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Literal, overload

from numpy.typing import NDArray

from nexar.communicator import point_to_point
from nexar.communicator.multipart import Run
from nexar.communicator.point_to_point import MessageInfo, Source
from nexar.errors import OperationTimeout
from nexar.group import Group
from nexar.links.messages import Receive
from nexar.types import ANY_SOURCE, Rank

_POLL_SECONDS: Final = 1e-4  # one poll of the network


class MessageMethods(ABC):
    """Messages between two ranks. A message without a tag (`tag=None`) matches only receives without a tag. `timeout`
    defaults to the setting `collective_timeout`. OperationTimeout names the missing ranks, PeerLost the lost rank.
    With `return_source`, a receive returns (result, Source).
    """

    _group: Group
    # Whether a receive can be cancelled after it took its message: only for non-blocking calls.
    _can_retract: bool

    @abstractmethod
    def _deadline(self, timeout: Any) -> float:
        """UsageError if `timeout` is invalid or the communicator is closed."""

    @abstractmethod
    def _run_operation(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Any:
        """Wait for the operation, or let it run in the background."""

    # -- arrays ----------------------------------------------------------------------------------------

    def send(self, array: object, dest: Rank, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """Send an array. Blocks until you may change it: a small one may be in flight, a large one has arrived."""
        deadline = self._deadline(timeout)
        return self._run_operation(point_to_point.send(self._group, array, dest, tag, deadline), deadline)

    @overload
    def recv(
        self, into: None = ..., source: Rank = ..., tag: int | None = ..., *, timeout: float | None = ...,
        return_source: Literal[False] = ...,
    ) -> NDArray[Any]: ...  # fmt: skip
    @overload
    def recv(
        self, into: Any, source: Rank = ..., tag: int | None = ..., *, timeout: float | None = ...,
        return_source: Literal[False] = ...,
    ) -> Any: ...  # fmt: skip
    @overload
    def recv(
        self, into: Any = ..., source: Rank = ..., tag: int | None = ..., *, timeout: float | None = ...,
        return_source: Literal[True],
    ) -> tuple[Any, Source]: ...  # fmt: skip
    def recv(
        self,
        into: Any = None,
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Receive into `into` and return it; without `into`, return a new array.

        Raises BufferMismatch if the message has another size or dtype than `into`; it stays for another receive. A
        non-contiguous array is filled after the whole message has arrived.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv(self._group, into, source, tag, return_source=return_source, taken=taken)
        return self._run_operation(run, deadline, taken)

    def sendrecv(
        self,
        array: object,
        dest: Rank,
        into: Any = None,
        source: Rank = ANY_SOURCE,
        *,
        tag: int | None = None,
        sendtag: int | None = None,
        recvtag: int | None = None,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Send and receive at once, without deadlock. `into` may be `array`. `sendtag` and `recvtag` override `tag`."""
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.sendrecv(
            self._group, array, dest, into, source, sendtag=tag if sendtag is None else sendtag,
            recvtag=tag if recvtag is None else recvtag, deadline=deadline, return_source=return_source,
            taken=taken,
        )  # fmt: skip
        return self._run_operation(run, deadline, taken)

    def probe(
        self, source: Rank = ANY_SOURCE, tag: int | None = None, *, timeout: float | None = None
    ) -> MessageInfo | None:
        """Wait for a message that such a receive would take, and describe it. The message stays. `timeout=0` does not
        wait: None if there is no message yet.
        """
        looking = timeout == 0
        deadline = self._deadline(_POLL_SECONDS if looking else timeout)
        try:
            found: MessageInfo = self._run_operation(point_to_point.probe(self._group, source, tag), deadline)
        except OperationTimeout:
            if looking:
                return None
            raise
        return found

    # -- bytes and buffers -----------------------------------------------------------------------------

    def send_bytes(self, data: object, dest: Rank, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """Send the bytes of a contiguous buffer."""
        deadline = self._deadline(timeout)
        return self._run_operation(point_to_point.send_bytes(self._group, data, dest, tag, deadline), deadline)

    def recv_bytes(
        self,
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        into: Any = None,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Return the received bytes, or fill and return the writable buffer `into` of the same length. Receives arrays
        too, as bytes.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_bytes(self._group, into, source, tag, return_source=return_source, taken=taken)
        return self._run_operation(run, deadline, taken)

    def send_iov(
        self, buffers: Sequence[object], dest: Rank, tag: int | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send several buffers as one message, for `recv_iov`. Large buffers are not copied."""
        deadline = self._deadline(timeout)
        return self._run_operation(point_to_point.send_iov(self._group, buffers, dest, tag, deadline), deadline)

    def recv_iov(
        self,
        buffers: Sequence[object],
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Fill several buffers in order and return them. Sizes may differ from the sender's; equal sizes avoid copies.

        BufferMismatch if the total size differs; the message stays. Other errors may leave buffers partly filled.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_iov(self._group, buffers, source, tag, return_source=return_source, taken=taken)
        return self._run_operation(run, deadline, taken)

    # -- objects ---------------------------------------------------------------------------------------

    def send_object(
        self,
        value: object,
        dest: Rank,
        tag: int | None = None,
        *,
        pickle: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Send a value for `recv_object`: None, numbers, str, bytes, dates and times, lists, tuples, dicts, sets,
        NumPy arrays, torch tensors.

        UsageError names other types. `pickle=True` on both sides allows nearly every value.
        """
        deadline = self._deadline(timeout)
        run = point_to_point.send_object(self._group, value, dest, tag, pickle=pickle, deadline=deadline)
        return self._run_operation(run, deadline)

    def recv_object(
        self,
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        pickle: bool = False,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Receive a value. A pickled value raises UsageError without `pickle=True`, and the message stays: reading it
        runs code that its sender chose.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_object(
            self._group, source, tag, pickle=pickle, return_source=return_source, taken=taken
        )
        return self._run_operation(run, deadline, taken)
