"""What torch's holder of a work written in Python forgets to pass on.

From torch 2.14 on, what users get for a call of a backend written in Python is a holder in C++ that passes on `wait`
and `get_future`, and answers everything else itself: that it is never completed, and has no source. Both are known to
the future, so they are asked there. Works of other backends answer as ever.

From torch 2.15 on it also writes down every call of a backend it does not know, with the caller's stack, but never
hears whether such a call ended. A communicator writes down the same and knows, so torch is told to leave it to us: that
is 9 of the 20 µs that it takes for an all_reduce. Who wants its record all the same attaches torch's hook to a group.

The door of torch 2.14 and later: a backend that torch's own process group calls.
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


def patch_holder(name: str) -> None:
    """Do it, once for the process. `name`: of the backend."""
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
    """Works in C++ say what they do; a holder does not know it."""
    return type(work) is Work and work._get_op_type() == _UNKNOWN


_UNKNOWN = Work()._get_op_type()

NAME: Final = "nexar"
_CUSTOM: Final = ProcessGroup.BackendType.CUSTOM
_FOR_TESTS: Final = ("fake", "threaded")
"""Backends of torch's own that stand in for real ones, and so never beside one."""


_wrapped: set[NexarBackend] = set()
"""Backends that torch wraps, in its detailed debug mode: its wrapper does not keep their Python half alive, so they end
with `shutdown` alone. Written by whoever makes and ends them."""


def opened(communicator: Communicator, timeout: float, shared_node: SharedNode, options: Any) -> Any:
    """A backend for torch's process group; where nexar serves all its devices, in a process group that has its name."""
    patch_holder(NAME)
    backend = NexarBackend(communicator, timeout, shared_node)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        _wrapped.add(backend)
    return NexarGroup(backend, options) if _is_alone(options) else backend


def _is_alone(options: Any) -> bool:
    """Whether no other backend serves another device of this group: then ours is asked first, for the CPU, and torch
    takes the group for one of a backend it does not know. In the detailed debug mode torch puts its own checks between.
    """
    if options.process_group is None:  # made by somebody else than torch, who has a group for it
        return False
    unknown = {name for name, kind in dist.Backend.backend_type_map.items() if kind == _CUSTOM}
    return (
        unknown <= {NAME, *_FOR_TESTS}
        and options.process_group.name() == "custom"
        and dist.get_debug_level() != dist.DebugLevel.DETAIL
        and _is_for_cpu(options)
    )


def _is_for_cpu(options: Any) -> bool:
    """torch does not say for which device it asks, but gives each one its own corner of the group's store."""
    options.store.set("asked", "")
    return bool(dist.PrefixStore("cpu/", options.process_group.get_group_store()).check(["asked"]))


class NexarGroup(ProcessGroup):
    """torch's process group, but for its name: torch calls all that others have written "custom"."""

    def __init__(self, backend: NexarBackend, options: Any) -> None:
        super().__init__(options.process_group.get_group_store(), options.group_rank, options.group_size)
        self._set_default_backend(_CUSTOM)
        for device in dist.Backend.backend_capability[NAME]:
            self._register_backend(torch.device(device), _CUSTOM, backend)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        """As users write it."""
        return NAME


class NexarBackend(GroupCalls, Backend):
    """One group of ranks. What torch asks a backend about itself is answered here: the base class would ask back."""

    def __init__(self, communicator: Communicator, timeout: float, shared_node: SharedNode) -> None:
        Backend.__init__(self, communicator.rank, communicator.size)
        self._options = Backend.Options(NAME, timedelta(seconds=timeout))
        self.begin(communicator, timeout, shared_node)

    # -- facts -------------------------------------------------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """Groups are made of groups without asking anybody."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Calls are not collected: each begins when it is made, and all are in flight together."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """Ranks can be left out, also lost ones."""
        return True

    @property
    def supports_reconfigure(self) -> bool:
        """Use nexar.torch.adopt() instead."""
        return False

    @property
    def supports_window(self) -> bool:
        """There is no one-sided access to memory of others."""
        return False

    @property
    def _supports_time_estimate(self) -> bool:
        return False

    @property
    def options(self) -> Any:
        """As torch keeps them."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802  # torch's name for it
        """As users write it."""
        return NAME

    def _set_sequence_number_for_group(self) -> None:
        """Numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number()

    def shutdown(self) -> None:
        """Leave. Idempotent."""
        super().shutdown()
        _wrapped.discard(self)

    # -- other groups ------------------------------------------------------------------------------------

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Links are open already."""

    def split(self, store: Any, ranks: Sequence[int], opts: Any = None) -> NexarBackend:
        """The group of these ranks of this one; they all call it."""
        part = subgroup_of(self.communicator, ranks)
        if part is None:
            raise UsageError(f"rank {self.communicator.rank} asked for a group of {list(ranks)}, which it is not in")
        return NexarBackend(part, self._timeout, self._shared_node)

    def shrink(self, ranks: Sequence[int], flags: int = 0, opts: Any = None) -> NexarBackend:
        """The group without these ranks, lost ones too; the others call it."""
        smaller = remaining_of(self.communicator, ranks)
        if NODES.world is self.communicator:
            NODES.world = smaller
        return NexarBackend(smaller, self._timeout, self._shared_node)
