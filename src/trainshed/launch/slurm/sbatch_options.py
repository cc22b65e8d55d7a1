"""The #SBATCH lines of a stage: what Slurm is asked for, and which variables of the submitting user a job sees.

A secret is the name of a variable where the job is submitted, or a file that nodes read. A script holds the
reference, never the value, and nothing prints it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from trainshed.errors import InputError, RecipeError
from trainshed.launch.job import Job, Stage
from trainshed.recipe import Cluster
from trainshed.recipe.cluster import SecretReference

_PLAIN_OPTION = re.compile(r"[A-Za-z0-9_@%+=:,./\-]*")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")


def sbatch_option(name: str, value: str | int | None = None, *, where: str | None = None) -> str:
    """Return an #SBATCH line.

    Slurm reads these lines itself: it treats quotes and backslashes much like a shell, expands no variables, and an
    option ends with its line, so that no line break can be written at all.
    """
    text = name if value is None else f"{name}={value}"
    if _CONTROL_CHARACTER.search(text):
        raise InputError(
            f"{text!r} has a line break or another control character, which no option of Slurm can have",
            where=where,
            hint="take it out",
        )
    if _PLAIN_OPTION.fullmatch(text):
        return f"#SBATCH {text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH "{escaped}"'


def output_pattern(path: str) -> str:
    """Return a path for --output, in which Slurm replaces %x; a backslash would turn that off for the whole path."""
    if "\\" in path:
        raise InputError(
            f"{path!r} has a backslash, with which Slurm names no log", where="store", hint="choose another folder"
        )
    return path.replace("%", "%%")


_EXPORTED_VARIABLES = ("HOME", "USER", "LOGNAME", "PATH", "LANG")
"""Variables of the submitting user; all others come from the cluster file, so that a job is the same for everybody."""

_END_SECONDS = 60
"""Added to the time to drain: Slurm checks time limits once a minute."""
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKMGTP]i?)?")
_BYTES = {None: 1, "k": 1e3, "Ki": 2**10, "M": 1e6, "Mi": 2**20, "G": 1e9, "Gi": 2**30}
_BYTES |= {"T": 1e12, "Ti": 2**40, "P": 1e15, "Pi": 2**50}

_LONG_NAMES = {
    "-A": "--account",
    "-a": "--array",
    "-C": "--constraint",
    "-c": "--cpus-per-task",
    "-D": "--chdir",
    "-d": "--dependency",
    "-e": "--error",
    "-i": "--input",
    "-J": "--job-name",
    "-k": "--no-kill",
    "-N": "--nodes",
    "-n": "--ntasks",
    "-o": "--output",
    "-p": "--partition",
    "-q": "--qos",
    "-t": "--time",
}
_CLUSTER_KEYS = {
    "--account": "slurm.account",
    "--constraint": "slurm.constraint",
    "--cpus-per-task": "limits.cpu_stage_cpus",
    "--exclusive": "slurm.exclusive",
    "--gres": "slurm.gpus",
    "--gpus-per-node": "slurm.gpus",
    "--mem": "limits.cpu_stage_memory",
    "--nodes": "nodes.default",
    "--partition": "slurm.partition",
    "--qos": "slurm.qos",
    "--reservation": "capacity.reservation",
    "--time": "limits.hours",
}
_RESERVED_OPTIONS = {
    *_CLUSTER_KEYS,
    "--array",
    "--chdir",
    "--dependency",
    "--error",
    "--export",
    "--input",
    "--job-name",
    "--no-kill",
}
_RESERVED_OPTIONS |= {
    "--kill-on-invalid-dep",
    "--no-requeue",
    "--ntasks",
    "--ntasks-per-node",
    "--open-mode",
    "--output",
}
_RESERVED_OPTIONS |= {"--requeue", "--signal", "--wrap"}


def stage_options(job: Job, stage: Stage, previous_stage: str | None, *, elastic: bool) -> list[str]:
    """Return the #SBATCH lines of a stage; `previous_stage` is the one it waits for."""
    cluster = job.cluster
    slurm = cluster.on_slurm
    is_training = stage.name == "train"
    task = "%A_%a" if stage.parts > 1 else "%j"
    lines = [
        sbatch_option("--job-name", f"{job.name}-{stage.name}"),
        # The folder must exist before: Slurm ends a job silently if it cannot write its output.
        sbatch_option("--output", output_pattern(logs_folder(job.run)) + f"/{stage.name}-{task}.log", where="store"),
        sbatch_option("--open-mode", "append"),
        sbatch_option("--requeue"),
        sbatch_option("--export", ",".join((*_EXPORTED_VARIABLES, *exported_names(cluster)))),
        sbatch_option("--nodes", stage.nodes + stage.spares),
        sbatch_option("--ntasks-per-node", 1),
    ]
    if previous_stage is not None:
        lines += [dependency_line(f"<id of {previous_stage}>"), sbatch_option("--kill-on-invalid-dep", "yes")]
    if stage.parts > 1:
        lines.append(sbatch_option("--array", f"0-{stage.parts - 1}"))
    partition = slurm.partition if stage.gpus_per_node or is_training else slurm.cpu_partition or slurm.partition
    named_options = {"partition": partition, "account": slurm.account, "qos": slurm.qos}
    if stage.gpus_per_node or is_training:
        named_options |= {"constraint": slurm.constraint, "reservation": cluster.capacity.reservation}
    for name, value in named_options.items():
        if value is not None:
            lines.append(sbatch_option(f"--{name}", value, where=cluster.where(f"slurm.{name}")))
    if stage.gpus_per_node and slurm.gpus is not None:
        lines.append(sbatch_option("--gres", f"{slurm.gpus}:{stage.gpus_per_node}", where=cluster.where("slurm.gpus")))
    if is_training:
        lines += _training_options(job, cluster, elastic)
    if stage.serving is not None:
        # Only to the script (`B:`): it makes the server drain, and knows that it was the time limit.
        lines.append(sbatch_option("--signal", f"B:USR1@{stage.serving.drain_seconds + _END_SECONDS}"))
        lines += _time_limit(cluster)
    if stage.cpus is not None:
        lines.append(sbatch_option("--cpus-per-task", stage.cpus))
    if stage.memory is not None:
        lines.append(sbatch_option("--mem", f"{_mebibytes(stage.memory)}M"))
    return [*lines, *_user_options(cluster)]


def dependency_line(id: str) -> str:
    """Return the line that makes a stage wait for another; the id is filled in when that one is submitted."""
    return f"#SBATCH --dependency=afterok:{id}"


def logs_folder(run: str) -> str:
    """Return the folder of the output of a run's scripts."""
    return f"{run}/logs/slurm"


def _training_options(job: Job, cluster: Cluster, elastic: bool) -> list[str]:
    # Without `B:` the signal goes to the agents, not to the script: they make the ranks save and end.
    lines = [sbatch_option("--signal", f"USR1@{job.grace_seconds}")]
    if cluster.on_slurm.exclusive:
        # 0 is all memory of a node; the default of many clusters is a few gibibytes per CPU.
        lines += [sbatch_option("--exclusive"), sbatch_option("--mem", 0)]
    lines += _time_limit(cluster)
    if elastic:
        # A lost node must not end the allocation: a spare replaces it.
        lines.append(sbatch_option("--no-kill"))
    return lines


def _time_limit(cluster: Cluster) -> list[str]:
    if cluster.limits.hours is None:
        return []
    seconds = round(cluster.limits.hours * 3600)
    return [sbatch_option("--time", f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}")]


def _user_options(cluster: Cluster) -> Iterator[str]:
    for number, option_text in enumerate(cluster.on_slurm.options):
        where = cluster.where(f"slurm.options.{number}")
        if not option_text.startswith("-"):
            raise RecipeError(
                f"`{option_text}` is not an option of sbatch", where=where, hint="write for example --comment=x"
            )
        name = re.split(r"[=\s]", option_text, maxsplit=1)[0]
        name = _LONG_NAMES.get(name[:2], name) if not name.startswith("--") else name
        if name in _RESERVED_OPTIONS:
            key = _CLUSTER_KEYS.get(name)
            hint = f"write `{key}` in place of it" if key else "delete it"
            raise RecipeError(f"`{name}` is set by Trainshed", where=where, hint=hint)
        yield sbatch_option(option_text, where=where)


def _mebibytes(size: str) -> int:
    match = _SIZE.fullmatch(size)
    if match is None:
        raise RecipeError(f"`{size}` is not an amount of memory", hint="write for example 32Gi")
    return max(1, int(float(match[1]) * _BYTES[match[2]] / 2**20))


_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def exported_names(cluster: Cluster) -> list[str]:
    """Return the names of the submitting user's variables that hold secrets for jobs."""
    return sorted({reference.env for _, reference in secret_references(cluster) if reference.env is not None})


def secret_references(cluster: Cluster) -> Iterator[tuple[str, SecretReference]]:
    """Yield the cluster's secrets by variable name; refuse what names no variable and no path."""
    for name, reference in sorted(cluster.secrets.items()):
        where = cluster.where(f"secrets.{name}")
        if reference.env is not None and not _VARIABLE_NAME.fullmatch(reference.env):
            raise RecipeError(
                f"{reference.env!r} is not a name of a variable", where=where, hint="write for example HF_TOKEN"
            )
        if reference.file is not None and ("\x00" in reference.file or "\n" in reference.file):
            raise RecipeError("this is not a path", where=where, hint="write the path of a file that every node reads")
        yield name, reference
