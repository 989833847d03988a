import pytest

from nexar import ConfigError
from nexar.launch.detect import LaunchInfo, detect, first_slurm_host, slurm_tasks_on
from tests.unit.launch.recorded import recorded

# -- recorded environments -------------------------------------------------------------------------------------------


def test_nobody_started_a_process_with_an_ordinary_environment():
    assert detect({"PATH": "/usr/bin", "HOME": "/root", "RANK": "", "PMI_RANK": "  "}) is None


def test_a_child_of_our_launcher_knows_it():
    assert detect(recorded("nexar")) == LaunchInfo(
        kind="nexar", rank=3, size=4, local_rank=1, local_size=2, master_addr="10.0.0.5",
        master_port=29501, launcher=0x00C0FFEE00C0FFEE,
    )  # fmt: skip


def test_a_worker_of_torchrun():
    start = detect(recorded("torchrun"))
    assert (start.kind, start.rank, start.size) == ("torch", 1, 2)
    assert (start.local_rank, start.local_size) == (1, 2)
    assert (start.master_addr, start.master_port) == ("localhost", 43017)
    assert start.on_one_host


def test_a_task_of_srun():
    start = detect(recorded("srun"))
    assert (start.kind, start.rank, start.size) == ("slurm", 3, 6)
    assert (start.local_rank, start.local_size) == (1, 2)
    assert (start.master_addr, start.master_port) == ("node001", None)
    assert "418234" in start.job
    assert not start.on_one_host


def test_the_script_of_sbatch_is_no_task():
    assert detect(recorded("sbatch")) is None


def test_a_rank_of_open_mpi():
    start = detect(recorded("openmpi"))
    assert (start.kind, start.rank, start.size, start.local_rank, start.local_size) == ("openmpi", 2, 4, 2, 4)
    assert start.on_one_host


def test_a_rank_of_open_mpi_does_not_believe_the_slurm_variables_of_its_daemon():
    start = detect(recorded("openmpi_in_slurm"))
    assert (start.kind, start.rank, start.size) == ("openmpi", 3, 4)


def test_a_rank_of_mpich():
    start = detect(recorded("mpich"))
    assert (start.kind, start.rank, start.size, start.local_rank, start.local_size) == ("pmi", 2, 3, 2, 3)
    assert start.job is None


def test_a_rank_of_cray_pals():
    start = detect(recorded("pals"))
    assert (start.kind, start.rank, start.size, start.local_rank, start.local_size) == ("pmi", 5, 8, 1, 4)


def test_a_pod_of_an_indexed_job():
    start = detect(recorded("kubernetes"))
    assert (start.kind, start.rank, start.size, start.master_addr) == ("kubernetes", 2, 4, "train-0.train")
    assert start.job is None  # whatever a pod could report of itself, the other pods could not
    assert not start.on_one_host


# -- who wins --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("winner", "loser", "kind"),
    [
        ("nexar", "torchrun", "nexar"),
        ("torchrun", "srun", "torch"),
        ("openmpi", "mpich", "openmpi"),
        ("mpich", "kubernetes", "pmi"),
        ("nexar", "srun", "nexar"),
    ],
)
def test_the_first_launcher_of_the_list_wins(winner, loser, kind):
    assert detect(recorded(loser) | recorded(winner)).kind == kind


def test_slurm_wins_over_the_pmi_that_srun_itself_provides():
    both = recorded("srun") | {"PMI_RANK": "3", "PMI_SIZE": "6"}
    assert detect(both).kind == "slurm"


def test_the_four_names_of_slurm_are_enough():
    start = detect({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "a,b"})
    assert (start.kind, start.rank, start.size, start.local_rank, start.master_addr) == ("slurm", 1, 2, 0, "a")


def test_two_starts_of_one_job_differ_in_their_identity():
    again = recorded("torchrun") | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert detect(again).job != detect(recorded("torchrun")).job


# -- nonsense --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recording", "changes", "variable"),
    [
        ("torchrun", {"RANK": "abc"}, "RANK"),
        ("torchrun", {"RANK": "-1"}, "RANK"),
        ("torchrun", {"RANK": "2"}, "RANK"),
        ("torchrun", {"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ("torchrun", {"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ("torchrun", {"RANK": ""}, "RANK"),
        ("torchrun", {"MASTER_PORT": "http"}, "MASTER_PORT"),
        ("torchrun", {"LOCAL_RANK": "2"}, "LOCAL_RANK"),
        ("nexar", {"NEXAR_LAUNCHER": "me"}, "NEXAR_LAUNCHER"),
        ("nexar", {"RANK": ""}, "RANK"),
        ("srun", {"SLURM_PROCID": "x"}, "SLURM_PROCID"),
        ("srun", {"SLURM_PROCID": "6"}, "SLURM_PROCID"),
        ("srun", {"SLURM_STEP_NUM_TASKS": "", "SLURM_NTASKS": ""}, "SLURM_NTASKS"),
        ("srun", {"SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "SLURM_JOB_NODELIST"),
        ("srun", {"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST"),
        ("srun", {"SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE"),
        ("openmpi", {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE"),
        ("openmpi", {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK"),
        ("mpich", {"PMI_RANK": ""}, "PMI_RANK"),
        ("mpich", {"PMI_SIZE": "1e3"}, "PMI_SIZE"),
        ("kubernetes", {"WORLD_SIZE": ""}, "WORLD_SIZE"),
        ("kubernetes", {"JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_variable(recording, changes, variable):
    with pytest.raises(ConfigError) as caught:
        detect(recorded(recording) | changes)
    assert caught.value.variable == variable
    assert caught.value.value == changes.get(variable, "")


def test_half_a_set_says_what_the_other_half_is():
    with pytest.raises(ConfigError, match="set both, or unset both"):
        detect({"WORLD_SIZE": "4"})


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
    assert first_slurm_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "node[1-", "[[1]]", "a b", "node[]]"])
def test_a_list_that_is_none_is_refused_by_its_variable(hosts):
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST"):
        first_slurm_host(hosts, "SLURM_JOB_NODELIST")


@pytest.mark.parametrize(("node", "count"), [(0, 2), (2, 2), (3, 1), (4, 8), (5, 8)])
def test_tasks_are_counted_node_by_node(node, count):
    assert slurm_tasks_on(node, "2(x3),1,8(x2)") == count


@pytest.mark.parametrize("tasks", ["two", "2(x)", "2x3", ""])
def test_counts_that_are_none_are_refused(tasks):
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE"):
        slurm_tasks_on(0, tasks)


def test_a_node_beyond_the_counts_is_refused():
    with pytest.raises(ConfigError, match="at least 4 nodes"):
        slurm_tasks_on(3, "2(x3)")


def test_a_rank_outside_the_world_cannot_start():
    with pytest.raises(ConfigError, match="0 to 3"):
        LaunchInfo(kind="torch", rank=4, size=4)


def test_an_empty_world_cannot_start():
    with pytest.raises(ConfigError, match="1 or more"):
        LaunchInfo(kind="torch", rank=0, size=0)


def test_a_host_cannot_have_more_ranks_than_the_world():
    with pytest.raises(ConfigError, match="at most the size of the world"):
        LaunchInfo(kind="torch", rank=0, size=2, local_rank=0, local_size=3)


@pytest.mark.parametrize(
    ("size", "local_size", "one"), [(4, 4, True), (4, 2, False), (4, None, False), (1, None, True)]
)
def test_all_ranks_share_a_host_only_if_that_is_known(size, local_size, one):
    assert LaunchInfo(kind="pmi", rank=0, size=size, local_rank=0, local_size=local_size).on_one_host is one
