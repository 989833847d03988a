import json
import sys

import pytest

from nexar.cli.bench import report
from nexar.cli.bench.protocol import BenchReply
from nexar.cli.bench.report import BenchReport, BenchRequest, BenchRow, Figure, SystemInfo
from nexar.errors import UsageError
from tests.unit.cli.bench.test_comparison import WISHES


def test_this_interpreter_draws_if_it_has_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: object())
    assert report.plot_interpreter(tmp_path) == sys.executable


def test_another_one_draws_where_this_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    (tmp_path / "gloo" / "bin").mkdir(parents=True)
    (tmp_path / "gloo" / "bin" / "python").touch()
    assert report.plot_interpreter(tmp_path) == str(tmp_path / "gloo" / "bin" / "python")


def test_where_none_has_it_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        report.plot_interpreter(tmp_path)


def test_a_picture_that_was_not_drawn_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="Expecting value"):
        report.draw_plot(sys.executable, "no json", tmp_path / "plot.png")


def figure(system, time_us, wrong=0):
    return Figure(
        system=system, time_us=time_us, p10_us=1.0, p99_us=9.0, mean_us=2.0, algbw=4.0, busbw=6.0, wrong=wrong, calls=20
    )


def row(*figures, **problems):
    return BenchRow(
        measure="all_reduce",
        size_bytes=1024,
        count=256,
        dtype="float32",
        op="sum",
        root=-1,
        figures={each.system: each for each in figures},
        problems=problems,
    )


def test_a_line_has_the_columns_of_nccl_tests():
    assert report.table_head("all_reduce", []).splitlines()[3].split() == [
        "#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
    ]  # fmt: skip
    assert report.table_line(row(figure("nexar", 3.5)), []).split() == [
        "1024", "256", "float32", "sum", "-1", "3.50", "4.000", "6.000", "0",
    ]  # fmt: skip


def test_another_system_stands_beside_with_the_ratio():
    line = report.table_line(row(figure("nexar", 2.0), figure("gloo", 5.0)), ["gloo"])
    assert line.split("|")[1].split() == ["5.00", "6.000", "2.50"]


def test_the_columns_stand_below_their_names():
    *_, names, _ = report.table_head("all_reduce", ["gloo", "mpich"]).splitlines()
    line = report.table_line(
        row(figure("nexar", 2.0), figure("gloo", 5.0), figure("mpich", 12345.6)), ["gloo", "mpich"]
    )
    assert len(names) == len(line)
    assert [n for n, letter in enumerate(names) if letter == "|"] == [
        n for n, letter in enumerate(line) if letter == "|"
    ]


def test_a_system_without_a_figure_has_dashes_and_a_note():
    found = row(figure("nexar", 2.0), gloo="no avg")
    assert report.table_line(found, ["gloo"]).split("|")[1].split() == ["-", "-", "-"]
    assert report.table_notes([found, found]) == ["# all_reduce: gloo: no avg"]


def test_wrong_results_of_anybody_are_noted():
    (note,) = report.table_notes([row(figure("nexar", 2.0), figure("gloo", 2.0, wrong=3))])
    assert "3 elements of gloo" in note


def test_json_has_everything():
    found = json.loads(report.results_json({"ranks": 2}, [row(figure("nexar", 2.0))]))
    assert found["ranks"] == 2
    assert found["rows"][0]["figures"]["nexar"]["p99_us"] == 9.0


class Answering:
    """Two ranks; this many elements are wrong wherever they look."""

    def __init__(self, wrong):
        self._wrong = wrong

    def ask(self, order, patience):
        return [BenchReply(nanoseconds=(1_000_000,) * order.iterations, wrong=self._wrong)] * 2


def measured(*, as_json=False, plot=None, plot_python=None, **wrong):
    request = BenchRequest(
        measures=("barrier", "all_reduce"),
        sizes=(8, 16),
        options=WISHES,
        as_json=as_json,
        plot=plot,
        plot_python=plot_python,
    )
    about = [SystemInfo(name=name, version="1", flags="--fast") for name in wrong]
    systems = {name: Answering(count) for name, count in wrong.items()}
    return BenchReport(request, ranks=2, where="one host", systems=about).measure(systems)


def test_every_system_is_named_with_its_flags_before_the_tables(capsys):
    assert measured(nexar=0, gloo=0)
    shown = capsys.readouterr().out
    assert "# gloo: 1; flags: --fast" in shown
    assert shown.index("flags") < shown.index("# barrier") < shown.index("# all_reduce")
    assert len([line for line in shown.splitlines() if line and not line.startswith("#")]) == 3


def test_json_is_all_that_is_shown_where_it_was_asked_for(capsys):
    assert measured(as_json=True, nexar=0)
    found = json.loads(capsys.readouterr().out)
    assert (found["ranks"], found["where"], len(found["rows"])) == (2, "one host", 3)


@pytest.mark.parametrize(("ours", "right"), [(0, True), (1, False)])
def test_wrong_results_of_ours_are_reported(ours, right):
    assert measured(nexar=ours) is right


def test_wrong_results_of_another_system_are_not_our_failure(capsys):
    assert measured(nexar=0, gloo=3)
    assert "elements of gloo are wrong" in capsys.readouterr().out


def test_a_plot_is_drawn_of_everything(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(report, "draw_plot", lambda *arguments: drawn.append(arguments))
    assert measured(plot=tmp_path / "plot.png", plot_python="python", nexar=0)
    ((plot_python, results, path),) = drawn
    assert (plot_python, path) == ("python", tmp_path / "plot.png")
    assert len(json.loads(results)["rows"]) == 3
