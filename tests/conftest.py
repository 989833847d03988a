"""What every test gets: a leak check, hypothesis profiles, and the right to skip where namespaces are not permitted."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import Stock, leaked_since

# `ci` is what make test and make test-full run; `fuzz` is make fuzz. No deadline per example: the machine may be busy.
settings.register_profile("ci", max_examples=60, deadline=None, print_blob=True)
settings.register_profile(
    "fuzz", max_examples=20_000, deadline=None, print_blob=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("ci")

# A shell starts background commands with SIGINT ignored, nohup starts one with SIGHUP ignored. Tests of these signals
# need them to arrive.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves threads, descriptors, shared memory, children or tasks. Set up first, torn down last."""
    before = Stock.take()
    yield
    leaked = leaked_since(before)
    if leaked:
        pytest.fail("the test left behind:\n" + "\n".join(f"  {words}" for words in leaked), pytrace=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `netns` skip, with the reason, where they cannot run."""
    marked = [item for item in items if item.get_closest_marker("netns")]
    reason = _why_no_namespaces() if marked else ""
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_namespaces() -> str:
    """Why this process cannot make network namespaces; empty when it can."""
    if not shutil.which("ip"):
        return "network namespaces need the command `ip` (package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"nexar-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return f"network namespaces are not permitted: {made.stderr.strip()}" if made.returncode else ""
