import shutil

import pytest

from nexar.cli.bench import hosts
from nexar.cli.bench.hosts import Host, opened_hosts
from nexar.errors import UsageError


def test_one_host_is_this_machine():
    with opened_hosts(1, 1500) as found:
        assert found == (Host(),)


def test_more_hosts_than_a_wire_joins_are_refused():
    with pytest.raises(UsageError, match="--hosts 3"), opened_hosts(3, 1500):
        pass


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="root"), opened_hosts(2, 1500):
        pass


def test_a_missing_tool_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UsageError, match="iproute2"), opened_hosts(2, 1500):
        pass
