"""`import nexar` itself: quick, and whole when asked."""

import subprocess
import sys

import pytest

import nexar

HEAVY = ("cryptography", "numpy", "msgspec", "nexar.transport", "nexar.cluster.seed", "ssl", "asyncio")


def test_importing_it_loads_nothing_that_runs_a_cluster() -> None:
    code = f"import sys, nexar; print([name for name in {HEAVY!r} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["nexar.cluster.seed", "nexar.cluster.seed_session", "nexar.launch.run"])
def test_the_seed_and_the_launcher_load_no_numpy(module: str) -> None:
    code = f"import sys, {module}; print('numpy' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "False"


@pytest.mark.parametrize("name", ["Communicator", "Membership", "Seed", "connect", "init", "local", "spawn"])
def test_what_runs_a_cluster_is_there_when_it_is_asked_for(name: str) -> None:
    assert getattr(nexar, name).__name__ == name
    assert name in dir(nexar)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        nexar.no_such_name  # noqa: B018


def test_the_documented_first_lines_work() -> None:
    with nexar.local(2) as (left, right):
        left.send([1.0, 2.0], dest=1, tag=7)
        values, source = right.recv(source=nexar.ANY_SOURCE, tag=nexar.ANY_TAG, return_source=True)
        assert (values.tolist(), source.rank, source.tag) == ([1.0, 2.0], 0, 7)
