"""What each node of a stage runs: our code and the environment in place, then the agent or a foreign engine's script.

It is a file of the job (`train.node.sh`), so that it also runs inside a container.
"""

from __future__ import annotations

from shlex import quote

from trainshed.launch.fabric import FabricSetup
from trainshed.launch.job import Code, Job, Serving, Stage
from trainshed.launch.site_setup import SETUP_FILE
from trainshed.launch.slurm.secrets import secret_lines
from trainshed.launch.slurm.shell import assign, check_file_name, refuse_nul

_WAIT_SECONDS = 300


def node_file(stage: Stage) -> str:
    """Return the name of the file that each node of a stage runs."""
    return f"{stage.name}.node.sh"


def node_script(job: Job, stage: Stage, store: str, setup: FabricSetup | None) -> str:
    """Return that file's text."""
    cluster = job.cluster
    lines = [
        "#!/usr/bin/env bash",
        f"# What every node of the stage {stage.name} runs.",
        "set -euo pipefail",
        'files="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        *([f'. "$files"/{SETUP_FILE}'] if cluster.setup and not in_container(job, stage) else []),
        f"cd -- {quote(job.run)}",
        *_python(job, stage),
    ]
    if job.code is not None and stage.script is None:
        lines += _unpacked(job.code, store)
    if setup is not None:
        lines += [*setup.shell_prologue(), *setup.slurm.prologue]
    for name, value in {**cluster.environment, **stage.environment}.items():
        lines.append(assign(name, value))
    lines += [
        *secret_lines(cluster),
        'export TRAINSHED_HOST="${SLURMD_NODENAME:-$(hostname)}"',
        'export TRAINSHED_NODE_RANK="${SLURM_NODEID:-0}"',
        'TRAINSHED_INSTALLED="$(date +%s)"',
        "export TRAINSHED_INSTALLED",
    ]
    if stage.serving is not None:
        lines += _server(stage, stage.serving)
    elif stage.script is not None:
        check_file_name(stage.script)
        lines += [
            f'export NODE_RANK="$TRAINSHED_NODE_RANK" NNODES={stage.nodes}',
            f'exec bash "$files"/{quote(stage.script)}',
        ]
    else:
        part = f' --part "$SLURM_ARRAY_TASK_ID/{stage.parts}"' if stage.parts > 1 else ""
        lines.append(f'exec "$python" -P -m trainshed agent {quote(stage.name)} --job "$files"{part}')
    return "\n".join(lines) + "\n"


def _server(stage: Stage, serving: Serving) -> list[str]:
    """What serves; the stage's own script has said the port."""
    if stage.script is not None:
        check_file_name(stage.script)
        return [f'exec bash "$files"/{quote(stage.script)}']
    for word in serving.words:
        refuse_nul(word, "serve")
    words = " ".join(quote(word) for word in serving.words)
    return [f'exec "$python" -P -m trainshed {words} --port "$TRAINSHED_PORT"']


def _python(job: Job, stage: Stage) -> list[str]:
    venv = job.cluster.on_slurm.venv
    if venv is None or in_container(job, stage):
        refuse_nul(job.cluster.python, "python")
        return [f"python={quote(job.cluster.python)}"]
    return [
        assign("VIRTUAL_ENV", venv),
        'export PATH="$VIRTUAL_ENV/bin:$PATH"',
        'python="$VIRTUAL_ENV/bin/python"',
    ]


def in_container(job: Job, stage: Stage) -> bool:
    """Whether a stage runs in an image."""
    return job.cluster.on_slurm.container == "pyxis"


def _unpacked(code: Code, store: str) -> list[str]:
    """Our own code: unpacked once beside its archive, however many nodes and jobs want it."""
    return [
        f"code={quote(f'{store}/code/{code.sha256}')}",
        f"archive={quote(code.name)}",
        'if [ ! -e "$code/unpacked" ]; then',
        '  if [ "${SLURM_NODEID:-0}" = 0 ]; then',
        f'    if [ "$(sha256sum <"$code/$archive")" != "{code.sha256}  -" ]; then',
        '      echo "trainshed: $code/$archive is not what was submitted" >&2',
        "      exit 1",
        "    fi",
        '    new="$(mktemp -d "$code/.new-XXXXXXXX")"',
        '    "$python" -m tarfile -e "$code/$archive" "$new"',
        '    chmod 755 "$new"',
        '    mv -T "$new" "$code/unpacked" 2>/dev/null || rm -rf "$new" # another job was faster',
        "  else",
        f"    for ((waited = 0; waited < {_WAIT_SECONDS}; waited++)); do",
        '      [ ! -e "$code/unpacked" ] || break',
        "      sleep 1",
        "    done",
        "  fi",
        "fi",
        'export PYTHONPATH="$code/unpacked${PYTHONPATH:+:$PYTHONPATH}"',
    ]
