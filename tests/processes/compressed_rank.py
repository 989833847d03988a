"""One rank that reduces compressed arrays: `nexar run -n N compressed_rank.py COMPRESSOR`. The last rank kills itself.

A call that raises must have written nothing; the others look, and go on with the successor from the round that the
furthest of them is in. Each prints what it saw and a digest of its last result.
"""

import hashlib
import json
import os
import signal
import sys
import threading
import time

import numpy as np

import nexar

COUNT = 200_001
ROUNDS = 40
COMPRESSORS = {"topk": nexar.TopK(0.05), "randomk": nexar.RandomK(0.05), "int8": nexar.Int8()}


def die_in(seconds: float) -> None:
    """Anywhere in a call."""

    def die() -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()


def gradient(rank: int, number: int) -> np.ndarray:
    return np.random.default_rng([rank, number]).standard_normal(COUNT, np.float32)


def main(name: str) -> None:
    with nexar.init() as comm:
        me, doomed = comm.rank, comm.rank == comm.size - 1
        residual = np.zeros(COUNT, np.float32)
        changes = number = 0
        untouched = True
        while number < ROUNDS or not changes:
            if doomed and number == ROUNDS // 4:
                die_in(0.02)
            x, kept = gradient(me, number), residual.copy()
            try:
                comm.all_reduce_compressed(x, COMPRESSORS[name], residual=residual, op="avg")
                number += 1
            except nexar.MembershipChanged as change:
                untouched &= bool((x == gradient(me, number)).all() and (residual == kept).all())
                changes += 1
                comm = change.communicator  # type: ignore[assignment]  # noqa: PLW2901 - the block closes the node, and with it all of them
                number = int(comm.all_reduce(number, op="max"))
        digest = hashlib.sha256(x.tobytes()).hexdigest()
        seen = {"rank": me, "changes": changes, "untouched": untouched, "size": comm.size, "last": digest}
        sys.stdout.write(f"{json.dumps(seen)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
