import json

from nexar.cli.bench import page
from nexar.cli.bench.comparison import Row
from nexar.cli.bench.figures import Figure


def figure(system, time_us, wrong=0):
    return Figure(
        system=system, time_us=time_us, p10_us=1.0, p99_us=9.0, mean_us=2.0, algbw=4.0, busbw=6.0, wrong=wrong, calls=20
    )


def row(*figures, **problems):
    return Row(
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
    assert page.head("all_reduce", []).splitlines()[3].split() == [
        "#", "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong",
    ]  # fmt: skip
    assert page.line(row(figure("nexar", 3.5)), []).split() == [
        "1024", "256", "float32", "sum", "-1", "3.50", "4.000", "6.000", "0",
    ]  # fmt: skip


def test_another_system_stands_beside_with_the_ratio():
    line = page.line(row(figure("nexar", 2.0), figure("gloo", 5.0)), ["gloo"])
    assert line.split("|")[1].split() == ["5.00", "6.000", "2.50"]


def test_the_columns_stand_below_their_names():
    *_, names, _ = page.head("all_reduce", ["gloo", "mpich"]).splitlines()
    line = page.line(row(figure("nexar", 2.0), figure("gloo", 5.0), figure("mpich", 12345.6)), ["gloo", "mpich"])
    assert len(names) == len(line)
    assert [n for n, letter in enumerate(names) if letter == "|"] == [
        n for n, letter in enumerate(line) if letter == "|"
    ]


def test_a_system_without_a_figure_has_dashes_and_a_note():
    found = row(figure("nexar", 2.0), gloo="no avg")
    assert page.line(found, ["gloo"]).split("|")[1].split() == ["-", "-", "-"]
    assert page.notes([found, found]) == ["# all_reduce: gloo: no avg"]


def test_wrong_results_of_anybody_are_noted():
    (note,) = page.notes([row(figure("nexar", 2.0), figure("gloo", 2.0, wrong=3))])
    assert "3 elements of gloo" in note


def test_json_has_everything():
    found = json.loads(page.as_json({"ranks": 2}, [row(figure("nexar", 2.0))]))
    assert found["ranks"] == 2
    assert found["rows"][0]["figures"]["nexar"]["p99_us"] == 9.0
