"""What cannot work, with a real cluster behind the command: one clear message, an exit code, no traceback of ours."""

import re
import socket

import pytest

from nexar.security.invitation import Invitation, format_ticket, make_secret
from nexar_tools.transports import why_unavailable
from tests.processes.launcher import script
from tests.processes.nexar_command import Nexar, Python

TOKEN = "5f1d7c0a93be48e2a6d4c8f07b3e9a15"
NOBODY = "127.0.0.1:9"
TICKET = format_ticket(Invitation((NOBODY,), make_secret(), bytes(32)))
INIT = "import nexar\nnexar.init()\n"
SHORT = {"NEXAR_FORMATION_TIMEOUT_SECS": "2"}


@pytest.fixture
def refused(tmp_path):
    """Run it; what it says on standard error."""
    (tmp_path / "join.py").write_text(INIT)

    def run(kind, *arguments, code=1, **variables):
        with kind(*arguments, cwd=tmp_path, **variables) as running:
            assert running.end() == code, running.stderr
        return running.stderr

    return run


@pytest.fixture(params=["tcp", "udp"])
def taken(request):
    """A port that somebody else has, for one of the two protocols."""
    missing = why_unavailable("quic")
    if request.param == "udp" and missing is not None:
        pytest.skip(f"nobody wants a UDP port: {missing}")
    kind = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}[request.param]
    with socket.socket(socket.AF_INET, kind) as other:
        other.bind(("127.0.0.1", 0))
        if kind == socket.SOCK_STREAM:
            other.listen()
        yield other.getsockname()[1]


def complaint(said):
    """The one message of a command, but for what it says while it waits."""
    lines = [line for line in said.splitlines() if not line.startswith("nexar: no seed answers at")]
    assert [line.startswith("nexar: ") for line in lines] == [True, *[False] * (len(lines) - 1)]
    return "\n".join(lines)


def last_of(said):
    """The message of an uncaught error; before it are the user's own line, and the one of ours that it called."""
    assert said.count("Traceback") == 1
    assert said.count("  File ") == 2
    return said[re.search(r"^nexar\.errors\.", said, re.MULTILINE).start() :]


def test_a_seed_that_cannot_be_reached_is_named(refused):
    said = complaint(refused(Nexar, "run", "-n", 2, "--ticket", TICKET, "join.py", **SHORT))
    assert f"no seed at {NOBODY}" in said.splitlines()[0]
    assert len(said.splitlines()[0]) <= len("nexar: ") + 120
    assert "Connection refused" in said
    assert "check that the seed runs" in said
    assert TICKET not in said


def test_a_seed_whose_name_nobody_knows_is_named(refused):
    variables = {"NEXAR_SEED": "nobody.invalid:4000", "NEXAR_CLUSTER_TOKEN": TOKEN}
    said = complaint(refused(Nexar, "run", "join.py", **variables, **SHORT))
    assert "no seed at nobody.invalid:4000" in said


def test_a_script_that_cannot_reach_the_seed_shows_its_own_line_and_the_reason(refused):
    said = last_of(refused(Python, "join.py", NEXAR_TICKET=TICKET, **SHORT))
    assert said.startswith("nexar.errors.SeedUnreachable: no seed at")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"NEXAR_TICKET": "nonsense"}, "ticket"),
        ({"NEXAR_TICKET": TICKET, "NEXAR_TOPOLOGY": "donut"}, "NEXAR_TOPOLOGY = 'donut' is refused"),
        ({"NEXAR_TICKET": TICKET, "NEXAR_PORT": "abc"}, "NEXAR_PORT = 'abc' is refused"),
        ({"NEXAR_SEED": NOBODY}, "NEXAR_CLUSTER_TOKEN"),
        ({}, "nexar run"),
    ],
)  # fmt: skip
def test_a_script_with_wrong_settings_shows_its_own_line_and_the_reason(refused, variables, words):
    assert words in last_of(refused(Python, "join.py", **variables))


def test_a_seed_is_notified_that_its_port_is_taken(refused, taken):
    said = complaint(refused(Nexar, "seed", "--size", 2, "--listen", f"127.0.0.1:{taken}", code=2))
    assert f"cannot listen on 127.0.0.1:{taken}: Address already in use" in said
    assert "take another port" in said


def test_a_rank_is_notified_that_its_port_is_taken(refused, taken):
    said = refused(Nexar, "run", "join.py", NEXAR_PORT=str(taken), NEXAR_BIND="127.0.0.1")
    assert f"NEXAR_PORT = {taken} is refused\n" in said
    assert "allowed: a port that is free for UDP and TCP" in said
    assert said.count("Traceback") == 1


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        (["--page", "{}"], {}, "the page cannot listen at 127.0.0.1:{}: Address already in use; give --page another"),
        ([], {"NEXAR_METRICS_PORT": "{}"}, "the metrics cannot listen at 127.0.0.1:{}: Address already in use; set"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("taken", ["tcp"], indirect=True)
def test_a_port_that_others_are_to_look_at_and_is_taken_is_reported_before_anybody_starts(
    refused, taken, options, variables, words
):
    options = [option.format(taken) for option in options]
    variables = {name: value.format(taken) for name, value in variables.items()}
    assert words.format(taken) in complaint(refused(Nexar, "run", *options, "join.py", code=2, **variables))


def test_ranks_of_one_host_cannot_have_one_port(refused):
    said = complaint(refused(Nexar, "run", "-n", 2, "join.py", NEXAR_PORT="4000", code=2))
    assert "give NEXAR_PORT_RANGE" in said


def test_more_ranks_than_the_maximum_are_refused_at_once(refused):
    said = complaint(refused(Nexar, "run", "-n", 4, "--elastic", "--max", 2, "join.py", code=2))
    assert "--max = 2 is refused; allowed: 4 or more" in said


def test_a_world_that_does_not_become_complete_says_who_is_there(refused):
    said = refused(Nexar, "seed", "--size", 2, "--listen", "127.0.0.1:0", **SHORT)
    # A seed that gets too little CPU extends the timeout of 2 s by its own delay.
    assert re.search(r"nexar: 0 of 2 nodes joined in 2(\.\d+)? s\n", said)
    assert "Traceback" not in said


def test_ranks_that_end_while_another_one_needs_them_are_named(refused, tmp_path):
    text = "import nexar\ncomm = nexar.init()\nif comm.rank == 0: comm.barrier()\n"
    said = refused(Nexar, "run", "-n", 3, script(tmp_path, text))
    named = "NoQuorum: ranks 1, 2 left, " in said or re.search(r"lost: rank \d: it left.*; joined", said)
    assert named, said
    assert "repair the network" not in said


def test_the_rank_that_raised_is_shown_whole_and_those_that_failed_because_of_it_in_a_line(refused, tmp_path):
    text = "import nexar\nwith nexar.init() as comm:\n    if comm.rank == 2: raise ValueError('on purpose')\n"
    said = refused(Nexar, "run", "-n", 4, script(tmp_path, text + "    comm.barrier()\n")).splitlines()
    culprit = re.compile(
        "nexar: rank 2 (ended with exit code 1|raised ValueError), the first to fail:"
    )  # it may end slowly
    begin = next(number for number, line in enumerate(said) if culprit.fullmatch(line))
    assert said[begin + 1] == "Traceback (most recent call last):"
    assert said[-4] == "ValueError: on purpose"
    assert all(line.endswith("MembershipChanged, because rank 2 failed") for line in said[-3:])
