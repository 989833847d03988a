"""Many runs at a time."""

import pytest

from nexar.testing.simulator import SimulationResult, command
from nexar.testing.simulator.command import main, nodes_of

GOOD = SimulationResult(seed=3, nodes=5, epochs=4, events=100, seconds=30.0, digest=0xABC)
BAD = SimulationResult(
    3, 5, 4, 100, 30.0, 0xABC, broken="a minority never decides: node 1", record=("1.0  1 dies", "2.0  x")
)


def test_the_number_of_nodes_is_the_seeds_own() -> None:
    drawn = [nodes_of(seed, 5, 50) for seed in range(200)]
    assert drawn == [nodes_of(seed, 5, 50) for seed in range(200)]
    assert (min(drawn), max(drawn)) == (5, 50)
    assert nodes_of(7, 9, 9) == 9


def test_seeds_are_run_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3:6", "--nodes", "3..5", "--jobs", "1", "--verbose"]) == 0
    shown = capsys.readouterr().out
    assert [line.split(",")[0] for line in shown.splitlines()[:3]] == ["seed 3", "seed 4", "seed 5"]
    assert shown.splitlines()[-1].startswith("3 seeds, ")
    assert shown.endswith("violated laws: none\n")


def test_a_broken_law_is_shown_with_what_it_takes_to_see_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_one", lambda run: BAD if run[0] == 3 else GOOD)
    assert main(["--seeds", "0:9", "--nodes", "5", "--jobs", "1"]) == 1
    shown = capsys.readouterr().out
    assert "a minority never decides" in shown
    assert "1 dies" in shown
    assert "--seeds 3:4 --nodes 5" in shown
    assert "violated laws: a minority never decides (1)" in shown
