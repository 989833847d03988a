"""A rank of two that makes one of the mistakes users make, and says which error it got."""

import json
import os
import signal
import sys
import time

import ml_dtypes
import numpy as np

import nexar


def late(comm: nexar.Communicator) -> object:
    """Rank 1 comes after rank 0's time is over."""
    if comm.rank == 1:
        time.sleep(1.5)
        return comm.all_reduce(np.ones(4))
    return comm.all_reduce(np.ones(4), timeout=0.5)


def killed(comm: nexar.Communicator) -> object:
    """Rank 1 dies where rank 0 waits for it."""
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.all_reduce(np.ones(4))


def lengths(comm: nexar.Communicator) -> object:
    """4 and 8 elements."""
    return comm.all_reduce(np.ones(4 if comm.rank == 0 else 8, np.float32))


def large_lengths(comm: nexar.Communicator) -> object:
    """So many that one of them waits for a grant."""
    return comm.all_reduce(np.ones(4 if comm.rank == 0 else 1_000_000, np.float32))


def dtypes(comm: nexar.Communicator) -> object:
    """float32 and int32."""
    return comm.all_reduce(np.ones(4, np.float32 if comm.rank == 0 else np.int32))


def verbs(comm: nexar.Communicator) -> object:
    """all_reduce and broadcast."""
    return comm.all_reduce(np.ones(4)) if comm.rank == 0 else comm.broadcast(np.ones(4), root=1)


def other_way(comm: nexar.Communicator) -> object:
    """A call that goes through memory and one that goes through links."""
    return comm.all_reduce(np.ones(4)) if comm.rank == 0 else comm.all_to_all(np.ones(4))


def roots(comm: nexar.Communicator) -> object:
    """Each waits for the other."""
    return comm.broadcast(np.ones(4), root=1 - comm.rank)


def algorithms(comm: nexar.Communicator) -> object:
    """The same call, but one rank has asked for another way."""
    return comm.all_reduce(np.ones(4), algorithm="ring" if comm.rank == 1 else None)


def order(comm: nexar.Communicator) -> object:
    """One rank wants rank order, which is another way where memory is not shared."""
    return comm.all_reduce(np.ones(100_000), algorithm="direct" if comm.rank == 1 else "ring")


def strided(comm: nexar.Communicator) -> object:
    """A column, which is no mistake."""
    table = np.full((5, 3), comm.rank, np.int64)
    comm.broadcast(table[:, 1], root=1)
    return table.tolist()


def odd_dtypes(comm: nexar.Communicator) -> object:
    """No mistake either."""
    kinds = (np.int16, np.uint16, np.uint32, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16)
    return [comm.all_reduce(np.full(3, comm.rank + 1, kind)).astype(float).tolist() for kind in kinds]


def main() -> None:
    """One line of JSON for each mistake: what came of it, after how long, and whether its communicator can be used."""
    with nexar.init() as world:
        for mistake in sys.argv[1:]:
            comm = world.group(range(world.size))
            assert comm is not None
            comm.barrier()
            sys.stdout.write(json.dumps({"mistake": mistake, "rank": comm.rank, **reported(mistake, comm)}) + "\n")
            if mistake != "killed":
                world.barrier()  # so that nobody closes what another still tries to use
                comm.close()


def reported(mistake: str, comm: nexar.Communicator) -> dict[str, object]:
    """The error that this rank gets when it makes that mistake."""
    begin = time.monotonic()
    facts: dict[str, object] = {}
    try:
        result = globals()[mistake](comm)
        facts["result"] = result if isinstance(result, list) else np.asarray(result).tolist()
    except nexar.NexarError as error:
        facts["error"], facts["text"] = type(error).__name__, str(error)
        facts["ranks"] = [getattr(each, "rank", each) for each in _named(error)]
        if isinstance(error, nexar.MembershipChanged):
            facts["next"] = error.communicator.all_reduce(1)
    facts["seconds"] = time.monotonic() - begin
    try:
        facts["after"] = comm.all_reduce(1, timeout=5)
    except nexar.NexarError as error:
        facts["after"] = type(error).__name__
    return facts


def _named(error: nexar.NexarError) -> list[object]:
    if isinstance(error, nexar.MembershipChanged):
        return list(error.lost)
    found: object = (
        getattr(error, "ranks", None) or getattr(error, "waiting_for", None) or [getattr(error, "rank", None)]
    )
    return list(found) if isinstance(found, (list, tuple)) else [found]


if __name__ == "__main__":
    main()
