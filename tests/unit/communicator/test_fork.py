"""A forked child leaves a communicator without touching what threads of the parent may have held at the fork."""

import os
import threading

from nexar.communicator.local import local_communicators
from nexar.config import Config
from tests.ranks import EVENT_TIMEOUT


def test_a_forked_child_closes_though_another_thread_held_a_lock_at_the_fork() -> None:
    held, done = threading.Event(), threading.Event()
    with local_communicators(2, Config()) as (comm, _):

        def hold() -> None:
            with comm._group.mesh._peers.changed, comm._runtime.successors._changed:
                held.set()
                done.wait(EVENT_TIMEOUT)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(EVENT_TIMEOUT)
        child = os.fork()
        if child == 0:
            threading.Timer(EVENT_TIMEOUT, os._exit, (1,)).start()
            comm.close()
            os._exit(0)
        done.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
