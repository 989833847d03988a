"""The seed as a process, started by rank 0: `python -m nexar.launch.seed_main`.

If its standard input, held by rank 0, ends before the cluster has formed, rank 0 has failed and the world will never
be complete. The process that rank 0 starts only forks the seed, so that rank 0 has no child to reap.
"""

import os
import sys
import threading

import msgspec

from nexar.config import Config
from nexar.errors import NexarError
from nexar.launch.seed_process import SeedFailed, SeedReady, SeedTerms


def main() -> int:
    """Serve until every member has left."""
    if os.fork():  # no imported module has started a thread yet
        os._exit(0)
    from nexar.cluster.seed import SeedService  # noqa: PLC0415  # the parent reports a failing import like any other failure

    terms = msgspec.json.decode(sys.stdin.buffer.readline(), type=SeedTerms)
    config = Config(**terms.settings)
    try:
        seed = SeedService(terms.listen, terms.size, config=config)
    except NexarError as error:
        _send(SeedFailed(str(error)))
        return 1
    with seed:
        _send(SeedReady(seed.ticket, seed.address, os.getpid()))
        formed = threading.Event()
        threading.Thread(target=_end_with_parent, args=(formed,), name="nexar-parent", daemon=True).start()
        try:
            seed.wait_formed()  # the seed keeps the time, and notifies every joiner first
        except NexarError:
            return 1  # the seed has sent every joiner the reason
        formed.set()
        _detach_output()
        seed.wait_empty()
    return 0


def _send(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_parent(formed: threading.Event) -> None:
    """If rank 0 joins and leaves at once, the end of the pipe races with the commit, which one second lets win."""
    sys.stdin.buffer.read()
    if not formed.wait(1.0):
        os._exit(1)


def _detach_output() -> None:
    """A reader of rank 0's output must not wait for the seed."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    os.close(null)


if __name__ == "__main__":
    sys.exit(main())
