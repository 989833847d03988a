"""The one seam for devices: what nexar asks of whoever knows arrays that NumPy cannot see.

A device array is *staged*: copied to memory of the host, worked on there, and copied back. An adapter begins copies and
tells when they are done; it never waits. Who keeps the host memory, who waits and how, and what becomes of errors is
the same for all devices: `staging`.

Streams   A device may run work in order on *streams*. `stream_of` is asked once for each call, in the thread that made
          it, and what it gave is passed along with everything that the call does, from whichever thread. Work begun on
          a stream sees what was begun there before, and what is begun there afterwards sees it.
Pieces    `stage_out` and `stage_in` take several arrays at once, which lie one after the other in one flat host array:
          gather and scatter. Most calls are of one.
Errors    An adapter raises whatever its library does, also from `Pending.done`; the caller sees DeviceError with the
          device, the operation and that cause. UsageError passes as it is: it is for arrays that can never be staged.
Threads   Every method may be called from any thread, several at a time.

Another package registers its adapter with an entry point of the group `nexar.device_adapters`: see `registration`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Outline(NamedTuple):
    """What a device array is, without its values."""

    dtype: np.dtype[Any]
    """One that can travel; else the call is refused."""
    shape: tuple[int, ...]
    device: str
    """As errors call it: `cuda:0`."""


class Pending(Protocol):
    """Copies that were begun."""

    def done(self) -> bool:
        """Whether they are over; never waits. Raises if they failed."""


class CopyDone:
    """Copies that were over when they were begun: of devices that know no other."""

    def done(self) -> bool:
        """See Pending."""
        return True


class DeviceAdapter(ABC):
    """One kind of arrays. See the module's law."""

    name: str
    """What it is called in errors and statistics."""

    @abstractmethod
    def recognises(self, value: object) -> bool:
        """Whether this is an array of that kind. Must be quick, and must not import anything."""

    @abstractmethod
    def outline(self, value: Any) -> Outline:
        """What the array is. UsageError for one that cannot be staged (sparse, say), with what to do about it."""

    def stream_of(self, value: Any) -> Any:
        """Where the caller's work on this array runs at this moment. Default: the device has no streams."""
        return None

    @abstractmethod
    def stage_out(self, values: Sequence[Any], into: NDArray[Any], stream: Any) -> Pending:
        """Begin to copy the values, in C order, one array after the other, into a flat host array of their dtype."""

    @abstractmethod
    def stage_in(self, values: Sequence[Any], source: NDArray[Any], stream: Any) -> Pending:
        """Begin to fill the arrays, likewise, from a flat host array. It is left alone until the copies are done."""

    @abstractmethod
    def empty(self, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], stream: Any) -> Any:
        """A new array of this kind on the device of `like`; its values do not matter."""

    def overlap(self, one: Any, other: Any) -> bool:
        """Whether what is written to the one may change the other. Default: only if they are the same object; where an
        array can be a view of another, more has to be said.
        """
        return one is other

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Memory of the host from which, and to which, this device copies best; it is used again and again. Default:
        any memory. Pinned memory where the device has such a thing.
        """
        return np.empty(size_bytes, np.uint8)

    def reduce(self, op: str, into: Any, other: Any, stream: Any) -> bool:
        """into = into ⊕ other, both on one device, begun on the stream; `op` is the name of a reduction. False: this
        device does not do that, and nothing was done. Default: it does none.

        No verb asks for it yet: arrays are staged whole, and reduced on the host. It is for reductions between devices
        of one host.
        """
        return False
