"""Slurm's two compressed notations: lists of hosts (`node[001-004,7],x`) and tasks per node (`2(x3),1`). Pure."""

import re

from nexar.errors import ConfigError

_HOSTS_VARIABLE = "SLURM_STEP_NODELIST"
_TASKS_VARIABLE = "SLURM_STEP_TASKS_PER_NODE"
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def first_host(hosts: str, variable: str = _HOSTS_VARIABLE) -> str:
    """The first host of a list. Each bracket gives the first of what it holds; digits keep their leading zeros."""
    name = _first_item(hosts.strip())
    expanded = re.sub(r"\[([^\[\]]*)\]", lambda bracket: re.split(r"[-,]", bracket[1], maxsplit=1)[0], name)
    if not re.fullmatch(r"[A-Za-z0-9._-]+", expanded):
        raise ConfigError(variable=variable, value=hosts, allowed="a list of hosts such as node[001-004,7],x")
    return expanded


def _first_item(hosts: str) -> str:
    """Everything before the first comma that is outside brackets."""
    inside = 0
    for position, character in enumerate(hosts):
        inside += (character == "[") - (character == "]")
        if character == "," and not inside:
            return hosts[:position]
    return hosts


def tasks_on(node: int, tasks: str, variable: str = _TASKS_VARIABLE) -> int:
    """How many tasks run on the node of this index."""
    passed = 0
    for part in tasks.strip().split(","):
        found = _TASKS.fullmatch(part.strip())
        if found is None:
            raise ConfigError(variable=variable, value=tasks, allowed="counts such as 2(x3),1")
        passed += int(found[2] or 1)
        if node < passed:
            return int(found[1])
    raise ConfigError(variable=variable, value=tasks, allowed=f"counts for at least {node + 1} nodes (SLURM_NODEID)")
