import shutil
from pathlib import Path

import pytest

from nexar.cli.bench import systems
from nexar.cli.bench.systems import BenchHost, SystemSettings, opened_hosts, plan_nexar, plan_other
from nexar.errors import UsageError


def test_one_host_is_this_machine():
    with opened_hosts(1, 1500) as found:
        assert found == (BenchHost(),)


def test_more_hosts_than_a_wire_joins_are_refused():
    with pytest.raises(UsageError, match="--hosts 3"), opened_hosts(3, 1500):
        pass


def test_who_is_not_root_is_notified(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(systems.os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="root"), opened_hosts(2, 1500):
        pass


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="iproute2"), opened_hosts(2, 1500):
        pass


NAMES = ("gloo", "openmpi", "mpich")
ONE = (BenchHost(),)
TWO = (BenchHost(("enter", "a"), "10.0.0.1", "wire"), BenchHost(("enter", "b"), "10.0.0.2", "wire"))


@pytest.fixture
def peers(tmp_path):
    for name in NAMES:
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    return tmp_path


def setting(peers, hosts=ONE, ranks=2, cores=2):
    return SystemSettings(
        hosts=hosts, ranks=ranks, cores=cores, folder=Path("/run"), peers=peers, python="py", sources=Path("/src")
    )


def words(plan):
    return [" ".join(start.command) for start in plan.starts]


def test_ours_is_started_by_its_launcher(peers):
    (command,) = words(plan_nexar(setting(peers, ranks=4), {}))
    assert command == "py -m nexar run -n 4 -m nexar.cli.bench.rank /run/nexar.socket"


def test_ours_on_two_hosts_is_a_seed_and_two_launchers(peers):
    plan = plan_nexar(setting(peers, TWO, ranks=4), {"NEXAR_ENCRYPT_BULK_TRANSPORT": "false"})
    seed, first, second = words(plan)
    assert seed.startswith("enter a py -m nexar seed --size 4 --ticket-file")
    assert first.startswith("enter a py -m nexar run -n 2 --ticket-file")
    assert second.startswith("enter b py -m nexar run -n 2 --ticket-file")
    assert plan.flags == "NEXAR_ENCRYPT_BULK_TRANSPORT=false"
    assert all(start.environment["NEXAR_ENCRYPT_BULK_TRANSPORT"] == "false" for start in plan.starts)


def test_gloo_is_one_process_per_rank_on_the_host_of_the_rank(peers):
    plan = plan_other("gloo", setting(peers, TWO, ranks=4))
    assert [command.split()[1] for command in words(plan)] == ["a", "a", "b", "b"]
    assert {start.environment["GLOO_SOCKET_IFNAME"] for start in plan.starts} == {"wire"}


@pytest.mark.parametrize("name", ["openmpi", "mpich"])
def test_mpi_is_started_by_its_own_launcher_with_our_sources(peers, name):
    plan = plan_other(name, setting(peers))
    (start,) = plan.starts
    assert start.command[0] == str(peers / name / "bin" / "mpiexec")
    assert start.command[-1] == f"/run/{name}.socket"
    assert start.environment["PYTHONPATH"] == "/src"


@pytest.mark.parametrize(("name", "flag"), [("openmpi", "mpi_yield_when_idle"), ("mpich", "POLLS_BEFORE_YIELD")])
def test_ranks_that_share_cores_are_configured_to_yield(peers, name, flag):
    assert flag not in plan_other(name, setting(peers, ranks=2)).flags
    assert flag in plan_other(name, setting(peers, ranks=4)).flags


def test_mpi_runs_on_one_host_only(peers):
    with pytest.raises(UsageError, match="one host"):
        plan_other("openmpi", setting(peers, TWO))


def test_what_is_not_installed_is_said_with_the_remedy(tmp_path):
    with pytest.raises(UsageError, match="make bench-peers"):
        plan_other("gloo", setting(tmp_path))


def test_what_is_not_known_is_said_with_what_is(peers):
    with pytest.raises(UsageError, match="gloo, openmpi, mpich"):
        plan_other("nccl", setting(peers))
