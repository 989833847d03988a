import pytest

from nexar import ConfigError
from nexar.launch.slurm import first_host, tasks_on


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("alone", "alone"),
        ("a,b,c", "a"),
        ("node[001-004,7],x", "node001"),
        ("node[7,001-004]", "node7"),
        ("x,node[001-004]", "x"),
        ("rack[1-2]-node[03-09].cluster,z", "rack1-node03.cluster"),
        (" n[10-12] ", "n10"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    assert first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "node[1-", "[[1]]", "a b", "node[]]"])
def test_a_list_that_is_none_is_refused_by_its_variable(hosts):
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        first_host(hosts, "SLURM_JOB_NODELIST")


@pytest.mark.parametrize(("node", "count"), [(0, 2), (2, 2), (3, 1), (4, 8), (5, 8)])
def test_tasks_are_counted_node_by_node(node, count):
    assert tasks_on(node, "2(x3),1,8(x2)") == count


@pytest.mark.parametrize("tasks", ["two", "2(x)", "2x3", ""])
def test_counts_that_are_none_are_refused(tasks):
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_on(0, tasks)


def test_a_node_beyond_the_counts_is_refused():
    with pytest.raises(ConfigError, match="at least 4 nodes"):
        tasks_on(3, "2(x3)")
