"""The cluster file's `setup` as a script: lines of a site that every node runs before anything of ours.

They are bash by design. Each runs by `eval`, so that a quote or a comment in it reaches no further than its own line;
it is run as a login shell would, not strictly, since scripts of sites read variables that are not set. A line whose
exit status is not 0, or that ends the shell, ends the job with its number and its text.
"""

from __future__ import annotations

from shlex import quote

from trainshed.recipe import Cluster

SETUP_FILE = "setup.sh"
"""Its name among the files of a job."""
_MODULES = ("module", "ml")


def setup_script(cluster: Cluster) -> str | None:
    """Return what a node sources first, None where the cluster file asks for nothing."""
    if not cluster.setup:
        return None
    lines = [
        f"# `setup` of {cluster.name}: what its nodes run before a stage; to be sourced.",
        "trainshed_flags=$-",
        "set +eu",
        # Also where a line says `exit`: a stage must not look done that has not begun.
        "trap 'echo \"trainshed: setup ended the shell at line $trainshed_line\" >&2; trap - EXIT; exit 1' EXIT",
    ]
    if any(line.split()[0] in _MODULES for line in cluster.setup):
        # `module` is a function of login shells, and jobs do not get the functions of whoever submits them.
        lines.append("type module >/dev/null 2>&1 || . /etc/profile")
    for number, line in enumerate(cluster.setup, start=1):
        lines += [
            f"trainshed_line={quote(f'{number}: {line}')}",
            f"eval {quote(line)} || {{",
            '  echo "trainshed: setup failed with exit code $? at line $trainshed_line" >&2',
            "  trap - EXIT",
            "  exit 1",
            "}",
        ]
    lines += ["trap - EXIT", *_strict_again(), "unset trainshed_flags trainshed_line"]
    # Pods and Ray set variables before a process starts; those of the cluster file hold whatever a line has set.
    lines += [f"export {name}={quote(value)}" for name, value in cluster.environment.items()]
    return "\n".join(lines) + "\n"


def _strict_again() -> list[str]:
    return [f"case $trainshed_flags in *{flag}*) set -{flag} ;; *) set +{flag} ;; esac" for flag in "eu"]
