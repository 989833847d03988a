"""A new operation is in every list that is kept by hand, or is named here as one that is left out on purpose.

`tests/architecture/test_golden_bytes.py`, `tests/architecture/test_reference.py`, `tests/unit/test_config.py` and
`tests/unit/communicator/test_collective_methods.py` check what else a new operation or setting needs.
"""

import ast
import re
from pathlib import Path

from nexar.collectives.operations import COLLECTIVES
from nexar.communicator.resilient import Team
from nexar_tools.kill_schedules import verbs
from tests.architecture.sources import PACKAGE, ROOT, tree
from tests.conformance.collectives.cases import every_verb

OPERATIONS = {row.name for row in COLLECTIVES.values()}
HOW_TO = ROOT / "docs" / "howto"
ALGORITHMS = ROOT / "docs" / "reference" / "algorithms.md"

WITHOUT_A_COUNTERPART = {"grow"}
"""Operations without a counterpart in MPI, torch or ULFM."""
NOT_USED_BY_TORCH = {
    *("broadcast_object", "gather_object", "all_gather_object", "scatter_object"),  # torch sends objects as tensors
    *("scan", "exclusive_scan", "gather_v", "scatter_v"),  # torch has no such call
    *("split", "checkpoint", "grow"),  # torch makes and replaces its groups itself
}
NOT_IN_TEAMS = {
    *("reduce", "gather", "gather_v", "gather_object"),  # only one rank has the result
    *("scatter", "scatter_v", "scatter_object"),  # only one rank has the input
    *("reduce_scatter_v", "all_to_all_v"),  # the caller gives a part for each rank, and ranks change
    *("split", "checkpoint", "grow"),  # they make communicators
}
WITH_TESTS_OF_THEIR_OWN = {"all_reduce_compressed", "split", "checkpoint", "grow"}
CALLED_ELSEWHERE_IN_SCHEDULES = {"split", "checkpoint"}  # kill schedules call them as steps of their own
NOT_IN_SCHEDULES = {"grow"}  # kill schedules start no further process
SEVERAL_CALLS = {"all_reduce_bucketed"}  # in kill schedules; not in the table of operations


def words(*documents: Path) -> set[str]:
    return {word for document in documents for word in re.findall(r"\w+", document.read_text())}


def chosen_by_table() -> set[str]:
    _, _, section = ALGORITHMS.read_text().partition("## Which one is chosen")
    rows = re.findall(r"^\| ([a-z][^|]*) \|", section, re.MULTILINE)
    return {word for row in rows for word in re.findall(r"\w+", row)}


def planned_for_torch() -> set[str]:
    """The first argument of every PlanStep. The source is read: torch need not be installed."""
    calls = [
        node
        for name in ("translation", "calls")
        for node in ast.walk(tree(PACKAGE / "torch" / f"{name}.py"))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "PlanStep"
    ]
    return {str(call.args[0].value) for call in calls if isinstance(call.args[0], ast.Constant)}


def test_a_guide_explains_every_operation() -> None:
    guides = [*HOW_TO.glob("*.md"), *(ROOT / "docs" / "tutorial").glob("*.md")]
    contributors = {HOW_TO / "write-a-collective.md", HOW_TO / "coming-from.md"}
    assert OPERATIONS - words(*set(guides) - contributors) == set()


def test_the_names_of_other_libraries_are_given_for_every_operation() -> None:
    assert OPERATIONS - words(HOW_TO / "coming-from.md") == WITHOUT_A_COUNTERPART


def test_the_page_about_algorithms_says_which_one_an_operation_chooses() -> None:
    choosing = {row.name for row in COLLECTIVES.values() if row.same_as is None and len(row.algorithms) > 1}
    assert choosing - chosen_by_table() == set()


def test_the_torch_backend_uses_an_operation_or_leaves_it_out_on_purpose() -> None:
    assert OPERATIONS - planned_for_torch() == NOT_USED_BY_TORCH


def test_a_team_has_an_operation_or_leaves_it_out_on_purpose() -> None:
    assert {name for name in OPERATIONS if not hasattr(Team, name)} == NOT_IN_TEAMS


def test_every_operation_has_expected_results() -> None:
    assert OPERATIONS - {case.verb for case in every_verb(2, [1])} == WITH_TESTS_OF_THEIR_OWN


def test_kill_schedules_call_every_operation() -> None:
    assert set(verbs.COLLECTIVES) - SEVERAL_CALLS == OPERATIONS - CALLED_ELSEWHERE_IN_SCHEDULES - NOT_IN_SCHEDULES


def test_kill_schedules_call_every_operation_of_teams() -> None:
    assert {name for name in OPERATIONS if hasattr(Team, name)} == set(verbs.TEAM_CALLS) - SEVERAL_CALLS
