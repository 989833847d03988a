"""The seed as a process of its own, started by rank 0: `python -m nexar.launch.seed_main`.

It ends when every member has left. Its standard input is a pipe that rank 0 holds: the pipe's end before the cluster
has formed means that rank 0 has failed, and then the world will never be complete; afterwards it means nothing, for
rank 0 is a member like any other.

The process that rank 0 starts only starts the seed. So rank 0 has a child for a moment, and not until the last member
has left, when nobody would be there to take note of the end.
"""

import os
import sys
import threading

import msgspec

from nexar.config import Config
from nexar.errors import NexarError
from nexar.launch.seed_process import SeedFailed, SeedReady, SeedTerms


def main() -> int:
    """Leave the parent, open, say so, attend."""
    if os.fork():  # nothing was imported yet that has threads
        os._exit(0)
    from nexar.cluster.seed import SeedService  # noqa: PLC0415  # an import that fails is told like any other failure

    terms = msgspec.json.decode(sys.stdin.buffer.readline(), type=SeedTerms)
    config = Config(**terms.settings)
    try:
        seed = SeedService(terms.listen, terms.size, config=config)
    except NexarError as error:
        _say(SeedFailed(str(error)))
        return 1
    with seed:
        _say(SeedReady(seed.ticket, seed.address, os.getpid()))
        formed = threading.Event()
        threading.Thread(target=_end_with_parent, args=(formed,), name="nexar-parent", daemon=True).start()
        try:
            seed.wait_formed()  # as long as the settings allow: the seed counts, and tells every candidate first
        except NexarError:
            return 1  # every candidate was told why
        formed.set()
        _let_go()
        seed.wait_empty()
    return 0


def _say(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_parent(formed: threading.Event) -> None:
    """The end of the pipe and the commit race when rank 0 joins and leaves at once: a moment decides for the commit."""
    sys.stdin.buffer.read()
    if not formed.wait(1.0):
        os._exit(1)


def _let_go() -> None:
    """Whoever reads the output of rank 0 to its end must not wait for the seed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


if __name__ == "__main__":
    sys.exit(main())
