"""init() returns the whole world on every rank, or raises on every rank and names the pair and the reason."""

import json
import re
from pathlib import Path

import pytest

import nexar
from nexar_tools.transports import why_unavailable
from tests.processes.nexar_command import Nexar, Python

RANK = Path(__file__).with_name("formation_rank.py")
EVENT_TIMEOUT = 120.0
needs_quic = pytest.mark.skipif(why_unavailable("quic") is not None, reason=str(why_unavailable("quic")))


def outcomes(tmp_path, mistake, size=3, **variables):
    """What each rank printed that came to the end of init(), by rank; and the exit code."""
    with Nexar("run", "-n", size, RANK, mistake, cwd=tmp_path, **variables) as ran:
        code = ran.end(EVENT_TIMEOUT)
    lines = [line[line.index("{") :] for line in ran.stdout.splitlines() if "{" in line]
    return {facts["rank"]: facts for facts in map(json.loads, lines)}, code


def errors(found, ranks):
    """The texts of the errors on these ranks: nobody else has a world."""
    assert sorted(found) == sorted(ranks), found
    assert all("error" in facts for facts in found.values()), found
    return [found[rank]["error"] for rank in ranks]


@needs_quic
def test_ranks_without_a_common_transport_all_raise_and_name_the_pair(tmp_path):
    found, code = outcomes(tmp_path, "differing_transports")
    texts = errors(found, [0, 1, 2])
    pair = re.compile(r"rank 0 offers tls, rank [12] offers quic|rank [12] offers quic, rank 0 offers tls")
    assert all(pair.search(text) for text in texts), texts
    assert code != 0


def test_a_death_between_the_commit_and_the_end_of_init_raises_on_every_other_rank(tmp_path):
    found, code = outcomes(tmp_path, "killed_after_the_commit")
    for text in errors(found, [0, 2]):
        assert "rank 1" in text.splitlines()[0]
    assert code != 0


def test_a_death_between_the_commit_and_the_end_of_init_raises_in_an_elastic_cluster_too(tmp_path):
    found, _ = outcomes(tmp_path, "killed_after_the_commit", NEXAR_ELASTIC_ENABLED="1")
    errors(found, [0, 2])


@pytest.mark.full
def test_a_pair_that_cannot_connect_raises_on_every_rank_and_names_the_setting(tmp_path):
    found, code = outcomes(tmp_path, "unreachable_pair")
    for text in errors(found, [0, 1, 2]):
        first = text.splitlines()[0]
        assert re.search(r"rank [12] cannot connect to rank [12] at 127.0.0.77:9", first), text
        assert "NEXAR_ADVERTISE" in text
    assert code != 0


@pytest.mark.full
def test_a_rank_that_cannot_be_dialed_is_found_by_those_that_watch_it_where_links_are_opened_on_demand(tmp_path):
    """Rank 5 of nine is dialed by ranks 6, 7 and 0 (opposite on the ring), and by nobody else."""
    found, code = outcomes(tmp_path, "undialable_rank", size=9)
    for text in errors(found, range(9)):
        first = text.splitlines()[0]
        assert re.search(r"rank [670] cannot connect to rank 5 at 127.0.0.77:9", first), text
        assert "NEXAR_ADVERTISE" in text
    assert code != 0


@pytest.mark.full
def test_a_pair_that_is_not_connected_is_named_while_init_waits(tmp_path):
    """Ranks 0 and 1 report what they wait for, after 2 s; the pair is given up after 6 s."""
    with Nexar("run", "-n", 3, RANK, "unreachable_pair", cwd=tmp_path) as ran:
        ran.end(EVENT_TIMEOUT)
    words = r"waiting until all 3 ranks are connected; rank 1 has no connection to rank 2 at 127.0.0.77:9 \(.+\)"
    assert re.search(words, ran.stderr), ran.stderr


@pytest.mark.full
@pytest.mark.parametrize(("mistake", "side"), [("clock_ahead", "ahead of"), ("clock_behind", "behind")])
def test_clocks_that_differ_by_more_than_certificates_allow_are_named_on_both_sides(tmp_path, mistake, side):
    found, code = outcomes(tmp_path, mistake, size=2)
    for text in errors(found, [0, 1]):
        assert re.search(rf"the clock of rank 1 is (1799|180\d) s {side} the seed's", text), text
    assert code != 0


def test_a_setting_that_must_agree_is_refused_by_name_with_both_values(tmp_path):
    found, code = outcomes(tmp_path, "differing_setting", size=2)
    for text in errors(found, [0, 1]):
        assert "NEXAR_PIPELINE_SEGMENT_BYTES" in text
        assert "65536 on rank 1" in text
        assert "2097152 on rank 0" in text
    assert code != 0


def test_the_doctor_names_a_clock_that_differs_by_more_than_certificates_allow(tmp_path):
    with nexar.Seed("127.0.0.1:0", size=2) as seed:
        arguments = ["clock_behind", "doctor", "--ticket", seed.ticket]
        with Python(RANK, *arguments, cwd=tmp_path, RANK="1", WORLD_SIZE="2", LOCAL_RANK="1") as doctor:
            assert doctor.end(EVENT_TIMEOUT) != 0
    assert re.search(r"the clock of .* is (1799|180\d) s behind the seed's", doctor.stderr), doctor.stderr
