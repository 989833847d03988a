import json

import pytest

from nexar.cli.bench import report
from nexar.cli.bench.order import Reply
from nexar.cli.bench.report import About, Report, Request
from tests.unit.cli.bench.test_comparison import WISHES


class Answering:
    """Two ranks; this many elements are wrong wherever they look."""

    def __init__(self, wrong):
        self._wrong = wrong

    def ask(self, order, patience):
        return [Reply(nanoseconds=(1_000_000,) * order.iterations, wrong=self._wrong)] * 2


def measured(*, as_json=False, plot=None, artist=None, **wrong):
    request = Request(
        measures=("barrier", "all_reduce"), sizes=(8, 16), wishes=WISHES, as_json=as_json, plot=plot, artist=artist
    )
    about = [About(name=name, version="1", flags="--fast") for name in wrong]
    systems = {name: Answering(count) for name, count in wrong.items()}
    return Report(request, ranks=2, where="one host", systems=about).measure(systems)


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
def test_wrong_results_of_ours_are_told(ours, right):
    assert measured(nexar=ours) is right


def test_wrong_results_of_another_system_are_not_our_failure(capsys):
    assert measured(nexar=0, gloo=3)
    assert "elements of gloo are wrong" in capsys.readouterr().out


def test_a_plot_is_drawn_of_everything(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(report, "draw", lambda *arguments: drawn.append(arguments))
    assert measured(plot=tmp_path / "plot.png", artist="python", nexar=0)
    ((artist, results, path),) = drawn
    assert (artist, path) == ("python", tmp_path / "plot.png")
    assert len(json.loads(results)["rows"]) == 3
