"""The script that starts a foreign engine on one node: torchrun with static ranks, in the engine's stock image.

Its exit code is torchrun's, so that a failed training is a failed job; after a requested stop it is 128 + signal. It
needs bash and coreutils, and nothing of Trainshed. Every name and value in it is quoted: none can become a command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from trainshed.engines.foreign import EngineLaunch, EnginePlace
from trainshed.errors import InputError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Ranks get the signal themselves: torchrun would kill them 30 seconds after its own, in the middle of a checkpoint.
# Both signals reach them as TERM, the one that engines know. While there are no ranks yet, torchrun is stopped.
_STOPPING = """\
torchrun=
requested=
interrupted=
stop() {
  [[ -n $torchrun ]] || exit "$1"
  interrupted=1
  requested=$1
  local ranks
  ranks=$(cat "/proc/$torchrun/task/$torchrun/children" 2>/dev/null || true)
  # shellcheck disable=SC2086 # one word per rank
  kill -TERM ${ranks:-"$torchrun"} 2>/dev/null || true
}
trap 'stop 143' TERM
trap 'stop 138' USR1"""

# A signal ends `wait` early, and what it returns then is not the exit code: ask again.
_WAITING = """\
while true; do
  interrupted=
  code=0
  wait "$torchrun" || code=$?
  [[ -n $interrupted ]] || break
done
exec {log}>&-
wait "$tee" || true
exit "${requested:-$code}"
"""


def launcher_script(launch: EngineLaunch, place: EnginePlace, *, python: str = "python3") -> str:
    """Return the script that every node runs; `python` is the one that has the engine.

    It reads NODE_RANK (or what Slurm and Kubernetes call it), MASTER_ADDR and MASTER_PORT, and TRAINSHED_ATTEMPT. The
    log goes to stdout and to `<run>/logs/attempt-NNNN/node-NNNNN.log`.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "set -euo pipefail",
            *_identity(place),
            *_environment(launch),
            *_arguments(launch),
            _STOPPING,
            'exec {log}> >(trap "" TERM USR1 INT; exec tee -a "$file")',
            "tee=$!",
            *_torchrun(launch, place, python),
            "torchrun=$!",
            _WAITING,
        ]
    )


def _identity(place: EnginePlace) -> Iterator[str]:
    yield "node=${NODE_RANK:-${TRAINSHED_NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}"
    yield "attempt=${TRAINSHED_ATTEMPT:-}"
    yield "[[ -n $attempt || ! ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || attempt=$((${SLURM_RESTART_COUNT:-0} + 1))"
    # Checked before bash counts with them: arithmetic would run a command that hides in a variable.
    yield '[[ $node =~ ^[0-9]+$ ]] || { echo "NODE_RANK is no number: ${node:-not set}" >&2; exit 2; }'
    yield '[[ $attempt =~ ^[0-9]+$ ]] || { echo "TRAINSHED_ATTEMPT is no number: $attempt" >&2; exit 2; }'
    yield ': "${MASTER_ADDR:?the address of node 0 is not set}" "${MASTER_PORT:?the port of node 0 is not set}"'
    yield f"folder={shlex.quote(f'{place.run}/logs')}/$(printf 'attempt-%04d' \"$((10#$attempt))\")"
    yield 'mkdir -p "$folder"'
    yield "file=$folder/$(printf 'node-%05d.log' \"$((10#$node))\")"


def _environment(launch: EngineLaunch) -> Iterator[str]:
    for name, value in launch.environment.items():
        if not _NAME.fullmatch(name):
            raise InputError(f"`{name}` is not the name of a variable", hint="letters, digits and underscores")
        yield f"export {name}={shlex.quote(value)}"


def _arguments(launch: EngineLaunch) -> Iterator[str]:
    yield "arguments=("
    yield from (f"  {shlex.quote(word)}" for word in launch.arguments)
    yield ")"
    for start, file in launch.late_arguments.items():
        yield f"late=$(cat {shlex.quote(file)})"
        # `key=` and its value are one word, `--key` and its value two.
        between = "" if start.endswith("=") else " "
        yield f'arguments+=({shlex.quote(start)}{between}"$late")'


def _torchrun(launch: EngineLaunch, place: EnginePlace, python: str) -> Iterator[str]:
    words = [
        shlex.quote(python),
        "-m torch.distributed.run",
        f"--nnodes {place.nodes}",
        '--node-rank "$node"',
        '--master-addr "$MASTER_ADDR"',
        '--master-port "$MASTER_PORT"',
        f"--nproc-per-node {place.gpus_per_node}",
    ]
    yield " \\\n  ".join([*words, *(["--module"] if launch.module else [])]) + " \\"
    yield f'  {shlex.quote(launch.program)} "${{arguments[@]}}" >&"$log" 2>&1 &'
