"""Programs that end without closing their communicator."""

import pytest

from tests.processes.launcher import script, without_notices
from tests.processes.nexar_command import Nexar

EVENT_TIMEOUT = 120.0
START = """
import nexar, numpy
comm = nexar.init()
"""
WAIT = """
if rank == 1:
    while not Path("gone").exists():
        time.sleep(0.01)
"""
RECEIVE = """
    got = [int(comm.recv(source=0, tag=tag)[0]) for tag in range(20)]
    assert got == list(range(20)), got
"""
REPORT = """
    try:
        comm.barrier()
    except nexar.MembershipChanged as change:
        print("lost:", change.lost[0].replace(chr(10), "|"))
"""
SEND = """
if rank == 0:
    for tag in range(20):
        comm.send(numpy.full(1000, tag), dest=1, tag=tag)
    Path("gone").touch()
"""


def run(folder, text, *options, start=START):
    with Nexar("run", "-n", 2, *options, script(folder, start + text), cwd=folder) as running:
        running.end(EVENT_TIMEOUT)
    return running


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "sys.exit(3)"])
def test_what_was_sent_arrives_and_the_rank_counts_as_left(tmp_path, end):
    ran = run(tmp_path, f"{SEND}    {end}\n{WAIT}{RECEIVE}{REPORT}")
    assert ran.process.returncode == (3 if "3" in end else 0), ran.stderr
    assert "lost: it left" in ran.stdout
    assert "Traceback" not in ran.stderr


def test_an_uncaught_exception_reaches_the_others_with_its_traceback(tmp_path):
    text = f"def fail(): raise ValueError('on purpose')\n{SEND}    fail()\n{WAIT}{REPORT}"
    ran = run(tmp_path, text)
    assert ran.process.returncode == 1
    assert "it raised an exception" in ran.stdout
    assert "ValueError: on purpose" in ran.stdout
    assert "in fail" in ran.stdout


def test_a_forked_child_that_exits_leaves_the_node_to_its_parent(tmp_path):
    fork = "    if os.fork() == 0: sys.exit(0)\n    os.wait()\n"
    ran = run(tmp_path, f"{SEND.replace('    for', fork + '    for')}\n{WAIT}{RECEIVE}{REPORT}")
    assert ran.process.returncode == 0, ran.stderr
    assert "lost: it left" in ran.stdout


def test_a_rank_that_ends_without_exit_handlers_is_lost_and_says_nothing(tmp_path):
    ran = run(tmp_path, f"{SEND}    os._exit(0)\n{WAIT}{REPORT}")
    assert "lost:" in ran.stdout
    assert "lost: it left" not in ran.stdout
    assert without_notices(ran.stderr) == ""


def test_daemon_threads_that_wait_in_a_call_end_without_a_traceback(tmp_path):
    text = "import threading\nstarted = threading.Event()\n"
    text += "def wait():\n    started.set()\n    comm.recv(source=1 - rank, tag=99)\n"
    text += "threading.Thread(target=wait, daemon=True).start()\nstarted.wait()\ncomm.barrier()\n"
    ran = run(tmp_path, text)
    assert ran.process.returncode == 0, ran.stderr
    assert without_notices(ran.stderr) == ""


def test_programs_that_a_rank_starts_do_not_get_the_ticket(tmp_path):
    text = "import subprocess\ncomm.barrier()\n"
    text += "child = 'import os; print(sorted(name for name in os.environ if name == \"NEXAR_TICKET\"))'\n"
    text += "print(subprocess.run([sys.executable, '-c', child], capture_output=True, text=True).stdout)\n"
    ran = run(tmp_path, text)
    assert ran.process.returncode == 0, ran.stderr
    assert ran.stdout.count("] []\n") == 2


START_SEND = """
if rank == 0:
    import atexit
    request = comm.start.send(numpy.arange(4_000_000), dest=1)
    atexit.register(Path("gone").touch)
"""


def test_a_send_that_was_started_is_delivered_before_the_process_ends(tmp_path):
    receive = "    got = comm.recv(source=0)\n    print('last:', int(got[-1]))\n"
    ran = run(tmp_path, f"{START_SEND}{WAIT}{receive}{REPORT}")
    assert ran.process.returncode == 0, ran.stderr
    assert "last: 3999999" in ran.stdout, ran.stderr
    assert "lost: it left" in ran.stdout
    assert "not delivered" not in ran.stderr


def test_sends_that_nobody_receives_are_named_at_exit(tmp_path):
    more = "    more = comm.start.send_object([numpy.arange(1_000_000)] * 3, dest=1, tag=5)\n"
    start = START.replace("init()", "init(early_bytes=1_000_000)")  # a receiver takes no more than that unasked
    ran = run(tmp_path, f"{START_SEND}{more}{WAIT}{REPORT}", start=start)
    assert ran.process.returncode == 0, ran.stderr
    assert "lost: it left" in ran.stdout, ran.stderr
    warnings = [line for line in ran.stderr.splitlines() if "not delivered" in line]
    assert len(warnings) == 1, ran.stderr
    assert "rank 0 exits: 2 messages to rank 1 were not delivered within 4 s" in warnings[0]


def test_a_rank_that_raised_does_not_wait_for_the_sends_that_it_started(tmp_path):
    ran = run(tmp_path, f"{START_SEND}    raise ValueError('on purpose')\n{WAIT}{REPORT}")
    assert ran.process.returncode == 1
    assert "ValueError: on purpose" in ran.stdout
    assert "not delivered" not in ran.stderr
