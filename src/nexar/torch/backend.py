"""The backend for torch 2.14 and later. torch's own process group calls it.

torch wraps Python work objects in a C++ holder that forwards only `wait` and `get_future`, so completion and source are
read from the future.

From torch 2.15 on, torch's flight recorder logs every call of an unknown backend (9 of 20 µs of an all_reduce), but not
its end. It is switched off: the communicator records calls itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroup, Work
from torch.distributed import distributed_c10d

from nexar.communicator.communicator import Communicator
from nexar.errors import UsageError
from nexar.torch.calls import NODES, GroupCalls, SharedNode, remaining_of, subgroup_of
from nexar.torch.tensors import ReceivedTensors


def patch_torch_work(name: str) -> None:
    """Patches torch's Work, once per process, and excludes `name` from torch's flight recorder."""
    if not hasattr(Work, _MARK):
        _patch(Work.is_completed, Work._source_rank)
        setattr(Work, _MARK, True)
    recorded_elsewhere: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded_elsewhere.add(name)


_MARK = "_amended_by_nexar"


def _patch(completed: Any, source: Any) -> None:
    def is_completed(work: Work) -> bool:
        return bool(completed(work)) or (_is_holder(work) and bool(work.get_future().done()))

    def source_rank(work: Work) -> int:
        if not _is_holder(work):
            return int(source(work))
        received = work.get_future().wait()
        return received.source if isinstance(received, ReceivedTensors) else int(source(work))

    Work.is_completed = is_completed
    Work._source_rank = source_rank


def _is_holder(work: Work) -> bool:
    """C++ works know their operation; a holder does not."""
    return type(work) is Work and work._get_op_type() == _UNKNOWN


_UNKNOWN = Work()._get_op_type()

NAME: Final = "nexar"
_CUSTOM: Final = ProcessGroup.BackendType.CUSTOM
_FOR_TESTS: Final = ("fake", "threaded")
"""Test backends that never run beside real ones."""


_wrapped: set[NexarBackend] = set()
"""Backends that torch wraps in DETAIL debug mode. Keeps them alive until `shutdown`: torch's wrapper does not."""


def opened(communicator: Communicator, timeout: float, shared_node: SharedNode, options: Any) -> Any:
    """Return a backend, or a process group named nexar if no other backend serves the group."""
    patch_torch_work(NAME)
    backend = NexarBackend(communicator, timeout, shared_node)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        _wrapped.add(backend)
    return NexarGroup(backend, options) if _is_alone(options) else backend


def _is_alone(options: Any) -> bool:
    """Whether only nexar serves this group and torch asks for its first device, the CPU. False in DETAIL mode, in which
    torch inserts checks.
    """
    if options.process_group is None:  # created by other code than torch
        return False
    unknown = {name for name, kind in dist.Backend.backend_type_map.items() if kind == _CUSTOM}
    return (
        unknown <= {NAME, *_FOR_TESTS}
        and options.process_group.name() == "custom"
        and dist.get_debug_level() != dist.DebugLevel.DETAIL
        and _is_for_cpu(options)
    )


def _is_for_cpu(options: Any) -> bool:
    """torch gives each device its own prefix of the group's store."""
    options.store.set("asked", "")
    return bool(dist.PrefixStore("cpu/", options.process_group.get_group_store()).check(["asked"]))


class NexarGroup(ProcessGroup):
    """torch's process group, named "nexar" instead of "custom"."""

    def __init__(self, backend: NexarBackend, options: Any) -> None:
        super().__init__(options.process_group.get_group_store(), options.group_rank, options.group_size)
        self._set_default_backend(_CUSTOM)
        for device in dist.Backend.backend_capability[NAME]:
            self._register_backend(torch.device(device), _CUSTOM, backend)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME


class NexarBackend(GroupCalls, Backend):
    """One group of ranks. Overrides every property: the base class would call back into Python."""

    def __init__(self, communicator: Communicator, timeout: float, shared_node: SharedNode) -> None:
        Backend.__init__(self, communicator.rank, communicator.size)
        self._options = Backend.Options(NAME, timedelta(seconds=timeout))
        self.begin(communicator, timeout, shared_node)

    # -- facts -------------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Each call starts when it is made."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        return True

    @property
    def supports_reconfigure(self) -> bool:
        """Use nexar.torch.adopt()."""
        return False

    @property
    def supports_window(self) -> bool:
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    @property
    def options(self) -> Any:
        return self._options

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers start at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number()

    def shutdown(self) -> None:
        super().shutdown()
        _wrapped.discard(self)

    # -- other groups ------------------------------------------------------------------------------------

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Links are open already."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> NexarBackend:
        """All these ranks must call it."""
        part = subgroup_of(self.communicator, ranks)
        if part is None:
            raise UsageError(f"rank {self.communicator.rank} asked for a group of {list(ranks)}, which it is not in")
        return NexarBackend(part, self._timeout, self._shared_node)

    def shrink(self, ranks: Sequence[int], flags: int = 0, opts: Any = None) -> NexarBackend:
        """All other ranks must call it."""
        smaller = remaining_of(self.communicator, ranks)
        if NODES.world is self.communicator:
            NODES.world = smaller
        return NexarBackend(smaller, self._timeout, self._shared_node)
