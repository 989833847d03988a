"""Every verb between two ranks, as a method of a few lines."""

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

_A_LOOK: Final = 1e-4  # seconds: what one look at the network takes


class MessageMethods(ABC):
    """Messages of one rank. `tag` None is a conversation of its own: without a tag. `timeout` None is the setting
    `collective_timeout`; OperationTimeout says who did not do their part, PeerLost who is gone.

    With `return_source` a receive gives (what it gives otherwise, where it came from: `.rank`, `.tag`).
    """

    _group: Group
    _can_retract: bool
    """Whether a receive can be cancelled after it took its message: only where a call returns before its end."""

    @abstractmethod
    def _deadline(self, timeout: Any) -> float:
        """Of a call that begins now. UsageError for what is no timeout, or on a closed communicator."""

    @abstractmethod
    def _carry_out(self, run: Run[Any], deadline: float, taken: list[Receive] | None = None) -> Any:
        """Wait for it, or let it go on by itself. `taken`: where the run puts its receives; see point_to_point."""

    # -- arrays ----------------------------------------------------------------------------------------

    def send(self, array: object, dest: Rank, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """Send an array. A small one is on its way when this returns, a large one is with the receiver."""
        deadline = self._deadline(timeout)
        return self._carry_out(point_to_point.send(self._group, array, dest, tag, deadline), deadline)

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
        """Receive into an array of the message's size and dtype, and return it; without one, a new array.

        `tag` None takes messages that were sent without one. `return_source`: also where it came from. BufferMismatch
        for a message that does not fit: it stays, to be received otherwise. An array with gaps is filled when all is
        here, and untouched if not.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv(self._group, into, source, tag, return_source=return_source, taken=taken)
        return self._carry_out(run, deadline, taken)

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
        """Send and receive at once, so that ranks in a ring do not wait for one another. `into` may be `array`.

        `tag` is for both ways; `sendtag` and `recvtag` are for one of them.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.sendrecv(
            self._group, array, dest, into, source, sendtag=tag if sendtag is None else sendtag,
            recvtag=tag if recvtag is None else recvtag, deadline=deadline, return_source=return_source,
            taken=taken,
        )  # fmt: skip
        return self._carry_out(run, deadline, taken)

    def probe(
        self, source: Rank = ANY_SOURCE, tag: int | None = None, *, timeout: float | None = None
    ) -> MessageInfo | None:
        """Wait until a message is here that such a receive would take, and tell about it; it stays.

        `timeout=0` only looks: None if there is no such message yet.
        """
        looking = timeout == 0
        deadline = self._deadline(_A_LOOK if looking else timeout)
        try:
            found: MessageInfo = self._carry_out(point_to_point.probe(self._group, source, tag), deadline)
        except OperationTimeout:
            if looking:
                return None
            raise
        return found

    # -- bytes and buffers -----------------------------------------------------------------------------

    def send_bytes(self, data: object, dest: Rank, tag: int | None = None, *, timeout: float | None = None) -> Any:
        """Send what any contiguous buffer holds."""
        deadline = self._deadline(timeout)
        return self._carry_out(point_to_point.send_bytes(self._group, data, dest, tag, deadline), deadline)

    def recv_bytes(
        self,
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        into: Any = None,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Receive bytes, or into a writable buffer of their length. Takes the bytes of an array too."""
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_bytes(self._group, into, source, tag, return_source=return_source, taken=taken)
        return self._carry_out(run, deadline, taken)

    def send_iov(
        self, buffers: Sequence[object], dest: Rank, tag: int | None = None, *, timeout: float | None = None
    ) -> Any:
        """Send the bytes of several buffers as one message, for `recv_iov`. Large ones are not copied."""
        deadline = self._deadline(timeout)
        return self._carry_out(point_to_point.send_iov(self._group, buffers, dest, tag, deadline), deadline)

    def recv_iov(
        self,
        buffers: Sequence[object],
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Fill several buffers, one after the other, and return them. They may be cut differently from the sender's;
        where they are cut alike, nothing is copied.

        BufferMismatch if they are longer or shorter in all: the message stays. If anything else is raised, they may
        have been filled in part.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_iov(self._group, buffers, source, tag, return_source=return_source, taken=taken)
        return self._carry_out(run, deadline, taken)

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
        """Send a value, for `recv_object`: numbers, texts, bytes, dates, lists, tuples, dicts, sets, NumPy arrays.

        UsageError names what is none of these; `pickle=True`, here and there, sends nearly everything.
        """
        deadline = self._deadline(timeout)
        run = point_to_point.send_object(self._group, value, dest, tag, pickle=pickle, deadline=deadline)
        return self._carry_out(run, deadline)

    def recv_object(
        self,
        source: Rank = ANY_SOURCE,
        tag: int | None = None,
        *,
        pickle: bool = False,
        timeout: float | None = None,
        return_source: bool = False,
    ) -> Any:
        """Receive a value. Reading a pickled one runs code of its sender's choice: without `pickle=True` it is refused,
        and stays.
        """
        deadline = self._deadline(timeout)
        taken: list[Receive] | None = [] if self._can_retract else None
        run = point_to_point.recv_object(
            self._group, source, tag, pickle=pickle, return_source=return_source, taken=taken
        )
        return self._carry_out(run, deadline, taken)
