"""`nexar doctor` with real processes: on this machine, and on hosts that are network namespaces with firewalls."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from nexar import Config
from nexar.cli.doctor.machine import inspect_machine, try_round_trip
from nexar_tools.network_namespaces import NetworkNamespaces
from nexar_tools.transports import why_unavailable

EVENT_TIMEOUT = 150.0
NEXAR = (sys.executable, "-m", "nexar")
needs_quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


class Doctor:
    """`nexar doctor …`, running."""

    def __init__(self, *arguments, cwd, enter=(), **variables):
        environment = {name: text for name, text in os.environ.items() if not name.startswith("NEXAR_")}
        self.process = subprocess.Popen(
            [*enter, *NEXAR, "doctor", *arguments], cwd=cwd, env={**environment, **variables}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self):
        self.stdout, self.stderr = self.process.communicate(timeout=EVENT_TIMEOUT)
        return self.process.returncode

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=EVENT_TIMEOUT)


def run(*arguments, cwd, **variables):
    with Doctor(*arguments, cwd=cwd, **variables) as doctor:
        doctor.end()
    return doctor


def meet(places, folder, *arguments, **variables):
    """One doctor in each place; the first opens the cluster. All of them, ended."""
    ticket = folder / "ticket"
    with ExitStack() as stack:
        opener = ("--size", str(len(places)), "--ticket-file", str(ticket), *arguments)
        doctors = [stack.enter_context(Doctor(*opener, cwd=folder, enter=places[0], **variables))]
        deadline = time.monotonic() + EVENT_TIMEOUT
        while not ticket.exists():
            assert doctors[0].process.poll() is None, doctors[0].process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for place in places[1:]:
            joiner = Doctor("--ticket-file", str(ticket), *arguments, cwd=folder, enter=place, **variables)
            doctors.append(stack.enter_context(joiner))
        for doctor in doctors:
            doctor.end()
    return doctors


# -- one machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["shm", "quic", "tls"])
def test_a_round_trip_inside_this_process_really_connects(scheme):
    if why_unavailable(scheme):
        pytest.skip(why_unavailable(scheme))
    trip = try_round_trip(scheme, Config())
    assert trip.problem == ""
    assert 0 < trip.round_trip < 1


def test_a_machine_is_looked_at_without_a_cluster():
    seen = inspect_machine(Config())
    assert {version.name for version in seen.versions} >= {"python", "nexar", "nexar-native", "numpy", "openssl"}
    assert seen.door.problem == ""
    assert seen.door.advertised
    assert seen.cpus >= 1


def test_settings_that_cannot_be_had_are_a_finding(tmp_path):
    doctor = run(cwd=tmp_path, NEXAR_BIND="198.51.100.1")
    assert doctor.process.returncode == 1
    assert "cannot listen: NEXAR_BIND" in doctor.stdout.partition("to change:")[2]


def test_json_holds_the_machine_and_no_secret(tmp_path):
    token = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"
    doctor = run("--json", cwd=tmp_path, NEXAR_CLUSTER_TOKEN=token)
    page = json.loads(doctor.stdout)
    assert page["ranks"] == []
    assert {trip["scheme"] for trip in page["machine"]["trips"]} == {"shm", "quic", "tls"}
    assert token not in doctor.stdout + doctor.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--size", "0"), "--size = 0 is refused"),
        (("--size", "2", "--ticket", "x"), "give one of them"),
        (("--listen", "127.0.0.1:0"), "give both"),
        (("--ticket", "x"), "ticket"),
    ],
)
def test_wrong_input_is_one_message(arguments, words, tmp_path):
    doctor = run(*arguments, cwd=tmp_path)
    assert doctor.process.returncode == 2
    assert words in doctor.stderr
    assert "Traceback" not in doctor.stderr


def test_doctors_of_one_machine_reach_one_another(tmp_path):
    first, *others = meet([(), (), ()], tmp_path)
    assert [doctor.process.returncode for doctor in (first, *others)] == [0, 0, 0], first.stdout + first.stderr
    assert "nothing to change" in first.stdout
    assert "NO" not in first.stdout
    assert all("rank 0 has the table" in doctor.stderr for doctor in others)


def test_the_launcher_may_start_doctors(tmp_path):
    command = [*NEXAR, "run", "-n", "2", "-m", "nexar", "doctor"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=EVENT_TIMEOUT, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "[rank 0] who reaches whom over TCP" in ran.stdout


# -- two hosts -------------------------------------------------------------------------------------------------------


@pytest.fixture
def network():
    with NetworkNamespaces() as hosts:
        yield hosts


def doctors_on(network, folder, *arguments, **variables):
    return meet([place.prefix for place in network.places], folder, *arguments, **variables)


def cells(page, scheme):
    return {(reach["source"], reach["dest"]): reach for report in page["ranks"] for reach in report["reaches"]
            if reach["scheme"] == scheme}  # fmt: skip


@pytest.mark.netns
@needs_quic
def test_two_hosts_are_a_matrix_with_times_and_clocks(network, tmp_path):
    first, second = doctors_on(network, tmp_path, "--json")
    assert (first.process.returncode, second.process.returncode) == (0, 0), first.stdout + first.stderr
    page = json.loads(first.stdout)
    for scheme in ("quic", "tls"):
        found = cells(page, scheme)
        assert set(found) == {(0, 1), (1, 0)}
        assert all(reach["round_trip"] is not None and abs(reach["skew"]) < 1 for reach in found.values())
    assert all(1200 <= reach["mtu_bytes"] <= 1500 for reach in cells(page, "quic").values())


@pytest.mark.netns
@needs_quic
def test_a_host_that_drops_udp_is_named_with_the_remedy(network, tmp_path):
    network.drop(1, protocol="udp")
    first, second = doctors_on(network, tmp_path, NEXAR_PORT="4000")
    assert (first.process.returncode, second.process.returncode) == (1, 1), first.stdout + first.stderr
    assert "NO" in first.stdout
    change = first.stdout.partition("to change:")[2]
    assert "cannot be reached over UDP" in change
    assert "open port 4000 for UDP there, or set NEXAR_TRANSPORTS=shm,tls" in change


@pytest.mark.full
@pytest.mark.netns
@needs_quic
def test_a_host_that_drops_tcp_works_over_udp_and_learns_what_would_help(network, tmp_path):
    network.drop(1, protocol="tcp")
    first, second = doctors_on(network, tmp_path)
    assert (first.process.returncode, second.process.returncode) == (0, 0), first.stdout + first.stderr
    assert "cannot be reached over TCP" in first.stdout.partition("would help:")[2]
