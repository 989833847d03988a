"""The harness of the process tests: results come back, failures are shown, nothing hangs, nothing is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nexar_tools import environment
from nexar_tools.peer_process import PeerFailed, PeerPair, PeerProcess
from nexar_tools.peer_protocol import ConnectionTerms, HostSpec

# -- what peers do ---------------------------------------------------------------------------------------------------


def add(node, carrier, a, b):
    sys.stdout.write("this goes to standard error\n")
    sys.stdout.flush()
    return {"sum": a + b, "pid": os.getpid(), "dialed": carrier.dialed}


def raise_on_purpose(node, carrier):
    raise ValueError("on purpose")


def write_and_exit(node, carrier):
    sys.stderr.write("last words\n")
    os._exit(7)


def wait_for_ever(node, carrier):
    signal.pause()


def return_what_cannot_be_sent(node, carrier):
    return object()


def which_side(node, carrier, *arguments):
    return [node.node, carrier.peer.node, carrier.dialed, *arguments]


class UnclosableNode:
    """A node that never closes."""

    def __init__(self, *args, **kwargs):
        self.parent = os.environ.get("NEXAR_TEST_PARENT") == str(os.getpid())

    def addresses_for(self, peer):
        return {}

    def connect(self, peer, addresses, timeout):
        return None

    def accept(self, timeout):
        return None

    def close(self):
        if not self.parent:
            signal.pause()


def nothing(node, line):
    return None


# -- results and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("peer_dials", [False, True])
def test_the_result_of_the_peer_comes_back(raw_terms, peer_dials):
    with PeerProcess(add, [2, 3], terms=raw_terms, peer_dials=peer_dials) as peer:
        result = peer.result(timeout=20)
        assert result == {"sum": 5, "pid": peer.pid, "dialed": peer_dials}
        assert peer.carrier.dialed is not peer_dials
        assert peer.carrier.peer.node == peer.peer_node
        assert "this goes to standard error" in peer.stderr()


def test_a_peer_that_raises_is_shown_with_its_traceback(raw_terms):
    with (
        pytest.raises(PeerFailed, match="on purpose") as caught,
        PeerProcess(raise_on_purpose, terms=raw_terms) as peer,
    ):
        peer.result(timeout=20)
    assert "in raise_on_purpose" in caught.value.traceback


def test_a_failure_that_nobody_asked_for_is_raised_at_the_end(raw_terms):
    with pytest.raises(PeerFailed, match="on purpose"), PeerProcess(raise_on_purpose, terms=raw_terms):
        pass


def test_an_error_of_the_parent_carries_what_the_peer_raised(raw_terms):
    with pytest.raises(ZeroDivisionError) as caught, PeerProcess(raise_on_purpose, terms=raw_terms) as peer:
        _divide_by_zero_once_it_ended(peer)
    assert any("on purpose" in note for note in caught.value.__notes__)


def _divide_by_zero_once_it_ended(peer):
    peer._peer.process.wait(20)
    raise ZeroDivisionError


def test_a_peer_that_cannot_be_imported_says_so_at_once(raw_terms):
    with (
        pytest.raises(PeerFailed, match="no_such_function"),
        PeerProcess(f"{__name__}:no_such_function", terms=raw_terms),
    ):
        pass


def test_a_result_that_json_cannot_say_is_a_failure_of_the_peer(raw_terms):
    with (
        pytest.raises(PeerFailed, match="object"),
        PeerProcess(return_what_cannot_be_sent, terms=raw_terms) as peer,
    ):
        peer.result(timeout=20)


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_peer_that_ends_by_itself_is_reported_with_its_last_output(raw_terms):
    with (
        pytest.raises(PeerFailed, match="exit code 7") as caught,
        PeerProcess(write_and_exit, terms=raw_terms) as peer,
    ):
        peer.result(timeout=20)
    assert caught.value.exit_code == 7
    assert "last words" in caught.value.stderr


def test_a_peer_that_was_killed_is_reported_at_once(raw_terms):
    with PeerProcess(wait_for_ever, terms=raw_terms) as peer:
        peer.kill()
        begin = time.monotonic()
        with pytest.raises(PeerFailed, match="SIGKILL"):
            peer.result(timeout=20)
        assert time.monotonic() - begin < 10


def test_a_silent_peer_is_reported_at_the_deadline_and_ended(raw_terms):
    with pytest.raises(PeerFailed, match="did not report"), PeerProcess(wait_for_ever, terms=raw_terms) as peer:
        peer.result(timeout=0.2)
    assert not Path(f"/proc/{peer.pid}").exists()


def test_a_stopped_peer_is_ended_too(raw_terms):
    with PeerProcess(wait_for_ever, terms=raw_terms) as peer:
        peer.stop()
    assert not Path(f"/proc/{peer.pid}").exists()


def test_a_peer_that_does_not_end_is_made_to_and_reported(monkeypatch):
    monkeypatch.setenv("NEXAR_TEST_PARENT", str(os.getpid()))
    monkeypatch.setattr("nexar_tools.peer_process._END_TIMEOUT", 0.5)
    terms = ConnectionTerms(node_class=f"{__name__}:UnclosableNode")
    with pytest.raises(PeerFailed, match="did not end"), PeerProcess(nothing, terms=terms) as peer:
        peer.result(timeout=20)
    assert not Path(f"/proc/{peer.pid}").exists()


def test_a_prefix_that_cannot_start_it_is_reported(raw_terms):
    place = HostSpec(prefix=("sh", "-c", "echo no such place >&2; exit 4"))
    with pytest.raises(PeerFailed, match="no such place"), PeerProcess(add, [1, 2], terms=raw_terms, place=place):
        pass


def test_a_peer_ends_when_its_parent_dies():
    script = (
        "import os, sys\n"
        "from nexar_tools.peer_process import PeerProcess\n"
        f"with PeerProcess('{__name__}:wait_for_ever', raw=True) as peer:\n"
        "    print(peer.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=50, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    pid = int(parent.stdout)
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- two peers -------------------------------------------------------------------------------------------------------


def test_two_peers_meet_and_both_results_come_back(raw_terms):
    with PeerPair(which_side, which_side, ["x"], terms=raw_terms) as pair:
        left, right = pair.results(timeout=20)
    assert left == [right[1], right[0], True, "x"]
    assert right[2] is False


def test_the_failure_of_one_of_two_peers_is_raised_at_once(raw_terms):
    with (
        pytest.raises(PeerFailed, match="on purpose"),
        PeerPair(wait_for_ever, raise_on_purpose, terms=raw_terms) as pair,
    ):
        pair.results(timeout=20)
