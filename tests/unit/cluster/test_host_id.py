import os
import re
import socket
import subprocess
import sys

import pytest

from nexar.cluster import host_id as module
from nexar.cluster.host_id import host_id
from nexar.config import Config


def test_the_setting_rules():
    assert host_id(Config(host_id="rack-3")) == "rack-3"


def test_every_process_of_this_host_finds_the_same():
    code = "from nexar.cluster.host_id import host_id; from nexar.config import Config; print(host_id(Config()))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == host_id(Config())
    assert re.fullmatch(r"[0-9a-f]{12}", told)


@pytest.mark.parametrize("fact", ["boot", "name", "network"])
def test_another_boot_name_or_network_is_another_host(monkeypatch, tmp_path, fact):
    before = host_id(Config())
    (tmp_path / "fact").write_text("another")
    if fact == "boot":
        monkeypatch.setattr(module, "_BOOT", tmp_path / "fact")
    elif fact == "name":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    else:
        monkeypatch.setattr(module, "_NETWORK", tmp_path / "fact")
    assert host_id(Config()) != before


def test_a_system_that_tells_less_is_known_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_BOOT", tmp_path / "nothing")
    monkeypatch.setattr(module, "_NETWORK", tmp_path / "nothing")
    assert host_id(Config()) == host_id(Config())
    assert os.path.basename(host_id(Config()))
