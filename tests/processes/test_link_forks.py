"""A process forks while its links are busy: the child may not use them, the parent does not notice."""

import atexit
import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from nexar.errors import UsageError
from nexar.links.link import Link
from nexar.wire.control import Ping
from nexar_tools.peer_process import PeerProcess
from tests.processes.scale import measured, schemes, sized
from tests.processes.talk import TALKING, TalkingNode, echo, end_echo, post, round_trip, say

FORKS = sized(40, 300)
TAG, ROUND = 20, 21
HUNG = -signal.SIGALRM


def fork_often(node: TalkingNode, link: Link, forks: int) -> list[int]:
    """The exit codes of the children, 0 being good, with traffic before, meanwhile and after."""
    sys.setswitchinterval(1e-6)  # so that a fork meets the other threads in the middle of things
    stop = threading.Event()
    talker = threading.Thread(target=_chatter, args=(node, link, stop))
    talker.start()
    codes = [_fork(node, link) for _ in range(forks)]
    stop.set()
    talker.join()
    round_trip(node, link, ROUND)
    node.ping(link)
    end_echo(link, TAG, ROUND)
    return codes


def _chatter(node: TalkingNode, link: Link, stop: threading.Event) -> None:
    while not stop.is_set():
        round_trip(node, link, TAG)


def _fork(node: TalkingNode, link: Link) -> int:
    child = os.fork()
    if not child:
        _be_the_child(node, link)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _be_the_child(node: TalkingNode, link: Link) -> None:
    code = 99
    try:
        faulthandler.register(signal.SIGALRM, chain=True)  # shows where it hangs
        signal.alarm(5)  # a child that hangs ends by a signal
        code = _count_what_does_not_refuse(node, link)
        link.abort("a child's")
        link.close()
        node.close()
        atexit._run_exitfuncs()
    finally:
        os._exit(code)


def _count_what_does_not_refuse(node: TalkingNode, link: Link) -> int:
    verbs: list[Callable[[], Any]] = [
        lambda: say(link, TAG, b"small"),
        lambda: say(link, TAG, bytes(1 << 20)),
        lambda: link.send_control(Ping(1)),
        lambda: node.wait(post(node, link.peer, TAG), timeout=0.5),
    ]
    return sum(1 << place for place, verb in enumerate(verbs) if not _refuses(verb))


def _refuses(verb: Callable[[], Any]) -> bool:
    try:
        verb()
    except UsageError:
        return True
    return False


@schemes("shm", "quic", "tls")
def test_a_forked_child_is_refused_and_the_parent_goes_on(scheme: str, record_property: Any) -> None:
    with PeerProcess(fork_often, [FORKS], schemes=[scheme], node_class=TALKING) as peer:
        begin = time.monotonic()
        answered = echo(peer.node, peer.link, [TAG, ROUND])
        codes = peer.result()
        assert "Traceback" not in peer.stderr()
    measured(record_property, scheme=scheme, forks=FORKS, answered=answered, s=round(time.monotonic() - begin, 2))
    assert HUNG not in codes, f"{codes.count(HUNG)} of {FORKS} forked children hung"
    assert codes == [0] * FORKS
    assert peer.node.losses == []
