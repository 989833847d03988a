"""What torch's holder of a work written in Python forgets to pass on.

From torch 2.14 on, what users get for a call of a backend written in Python is a holder in C++ that passes on `wait`
and `get_future`, and answers everything else itself: that it is never completed, and has no source. Both are known to
the future, so they are asked there. Works of other backends answer as ever.

From torch 2.15 on it also writes down every call of a backend it does not know, with the caller's stack, but never
hears whether such a call ended. A communicator writes down the same and knows, so torch is told to leave it to us: that
is 9 of the 20 µs that it takes for an all_reduce. Who wants its record all the same attaches torch's hook to a group.
"""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d


class Received(list[Any]):
    """The result of a receive: the tensors, and who sent them. Made before that is known, so written once."""

    source = -1


def amend(name: str) -> None:
    """Do it, once for the process. `name`: of the backend."""
    if not hasattr(Work, _MARK):
        _amend(Work.is_completed, Work._source_rank)
        setattr(Work, _MARK, True)
    recorded_elsewhere: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded_elsewhere.add(name)


_MARK = "_amended_by_nexar"


def _amend(completed: Any, source: Any) -> None:
    def is_completed(work: Work) -> bool:
        return bool(completed(work)) or (_is_holder(work) and bool(work.get_future().done()))

    def source_rank(work: Work) -> int:
        if not _is_holder(work):
            return int(source(work))
        received = work.get_future().wait()
        return received.source if isinstance(received, Received) else int(source(work))

    Work.is_completed = is_completed
    Work._source_rank = source_rank


def _is_holder(work: Work) -> bool:
    """Works in C++ say what they do; a holder does not know it."""
    return type(work) is Work and work._get_op_type() == _UNKNOWN


_UNKNOWN = Work()._get_op_type()
