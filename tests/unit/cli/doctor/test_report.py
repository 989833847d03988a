import json

from nexar.cli.doctor import report as doctor_report
from nexar.cli.doctor.observations import DoctorFinding
from tests.unit.cli.doctor.seen import HEALTHY, machine, report, reports

SEEN = reports(
    report(0, "a", (1, "quic", 50e-6), (1, "tls", "refused"), (2, "quic", None)),
    report(1, "b", (0, "quic", 2e-3), (0, "tls", 60e-6)),
)


def test_a_machine_is_shown_row_by_row():
    rows = dict(doctor_report.machine_rows(HEALTHY))
    assert rows["host"] == "a (host id aaaa)"
    assert rows["interface eth0"] == "10.0.0.1/24  MTU 1500"
    assert rows["round trip, quic"] == "40 µs"
    assert rows["largest socket buffers"] == "receive 4 MiB, send 4 MiB"
    assert rows["clock"] == "2023-11-14 22:13:20 UTC"


def test_what_is_not_known_is_not_guessed():
    assert dict(doctor_report.machine_rows(machine(memory=None)))["/dev/shm"] == "-"


def test_the_matrix_has_who_dials_at_the_left():
    assert doctor_report.matrix_rows(SEEN, 3, "quic") == [
        ("from \\ to", "0", "1", "2"),
        ("0", "·", "50 µs, MTU 1452", "-"),
        ("1", "2 ms, MTU 1452", "·", "?"),
        ("2", "?", "?", "·"),
    ]
    assert doctor_report.matrix_rows(SEEN, 2, "tls")[1] == ("0", "·", "NO")


def test_a_cluster_is_shown_as_ranks_and_one_matrix_for_each_transport(capsys):
    doctor_report.show_cluster(SEEN, 2)
    shown = capsys.readouterr().out
    assert "ranks:\n  rank  host" in shown
    assert "over UDP (quic)" in shown
    assert "over TCP (tls)" in shown


def test_a_terminal_gets_tables_with_frames(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    doctor_report.show_machine(HEALTHY)
    doctor_report.show_cluster(SEEN, 2)
    assert "│" in capsys.readouterr().out


def test_findings_are_numbered_through(capsys):
    doctor_report.show_findings([DoctorFinding("open port 4000"), DoctorFinding("wait", needed=False)])
    assert capsys.readouterr().out == "to change:\n  1. open port 4000\nwould help:\n  2. wait\n"


def test_where_nothing_is_wrong_it_says_so(capsys):
    doctor_report.show_findings([])
    assert capsys.readouterr().out == "nothing to change\n"


def test_json_has_everything_that_was_seen():
    found = json.loads(doctor_report.report_json(HEALTHY, SEEN, [DoctorFinding("open port 4000")]))
    assert found["machine"]["interfaces"][1]["mtu_bytes"] == 1500
    assert found["ranks"][0]["reaches"][1] == {
        "source": 0, "dest": 1, "scheme": "tls", "round_trip": None, "problem": "refused", "mtu_bytes": None,
        "skew": None, "offered": True,
    }  # fmt: skip
    assert found["clock_skew"] == {"0": 0.0, "1": 0.0}
    assert found["findings"] == [{"text": "open port 4000", "needed": True}]
