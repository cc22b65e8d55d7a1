"""The stacks of a job's ranks, read on its nodes: a small script goes there by the user's own srun, ssh or kubectl.

The script comes by standard input and needs only a Python: nothing is installed on the nodes or left there.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson

from trainshed.errors import InputError, TrainshedError
from trainshed.launch.target import (
    RemoteCommand,
    StageState,
    SubmittedJob,
    kubectl_command,
    node_of,
    refuse_registered,
)
from trainshed.observe import process_stacks
from trainshed.observe.process_stacks import RankStack
from trainshed.recipe import Cluster

_AT_A_TIME = 16
_COMMAND_SECONDS = 180.0  # py-spy takes seconds for each rank of a busy node


def stack_script() -> Path:
    """Return the script that reads the stacks on a node."""
    return Path(process_stacks.__file__)


def stack_commands(
    cluster: Cluster, submitted: SubmittedJob, stage_state: StageState, rank: int | None = None
) -> list[RemoteCommand]:
    """Return the commands that read the stacks of a running job, or of one rank; each gets the script as its input."""
    refuse_registered(cluster)
    if cluster.target == "ray":
        raise InputError(
            "Ray has no way into the place of an actor, where the ranks are",
            where=cluster.where("target"),
            hint="the Ray dashboard shows the stack of an actor's process; when the run has failed, `trainshed stacks` "
            "shows what its ranks have written down",
        )
    nodes = list(stage_state.nodes)
    first = node_of(stage_state, 0 if rank is None else rank // submitted.ranks_per_node)
    script = (cluster.python, "-", submitted.run, *(() if rank is None else (str(rank),)))
    if cluster.target == "kubernetes":
        pods = nodes if rank is None else [first]
        return [
            RemoteCommand((*kubectl_command(cluster), "exec", "-i", pod, "--", *script), f"the ranks in {pod}")
            for pod in pods
        ]
    where = ("--ntasks-per-node=1",) if rank is None else ("--nodes=1", "--ntasks=1", f"--nodelist={first}")
    srun = ("srun", f"--jobid={stage_state.id}", "--overlap", *where, *script)
    login = cluster.on_slurm.login
    command = srun if login is None else ("ssh", "--", login, shlex.join(srun))
    return [RemoteCommand(command, "the ranks of all nodes" if rank is None else f"rank {rank}")]


def read_remote_stacks(commands: Sequence[RemoteCommand]) -> tuple[list[RankStack], list[str]]:
    """Run the commands; returns the stacks, and for each command that failed why it did."""
    program = commands[0].command[0]
    if shutil.which(program) is None:
        raise InputError(f"there is no `{program}` on this machine", hint=f"run it elsewhere: {commands[0].text()}")
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        answers = list(pool.map(_run, commands))
    # Nodes that are parts of one machine see each other's processes.
    by_rank = {stack.rank: stack for answer, _ in reversed(answers) for stack in reversed(answer)}
    return [by_rank[rank] for rank in sorted(by_rank)], [problem for _, problem in answers if problem]


def _run(command: RemoteCommand) -> tuple[list[RankStack], str | None]:
    try:
        done = subprocess.run(
            command.command, input=stack_script().read_bytes(), capture_output=True, timeout=_COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return [], f"{command.description}: no answer within {_COMMAND_SECONDS:.0f} s"
    stacks = parse_stacks(done.stdout)
    if done.returncode and not stacks:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return [], f"{command.description}: {lines[-1] if lines else f'exit code {done.returncode}'}"
    return stacks, None


def parse_stacks(printed: bytes) -> list[RankStack]:
    """Return the stacks in what the script has printed on one or several nodes; other lines are of a site's own."""
    stacks = []
    for line in printed.splitlines():
        if not line.startswith(b"{"):
            continue
        try:
            body = orjson.loads(line)
            stacks += [RankStack(**stack) for stack in body["ranks"]]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            raise TrainshedError(
                "a node has answered with something that is not a list of stacks",
                where=line[:80].decode(errors="replace"),
            ) from None
    return stacks
