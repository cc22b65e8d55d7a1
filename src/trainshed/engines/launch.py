"""Starting another engine: what it is asked to train, what it needs, and the script that starts it on a node.

An adapter (`megatron/`, `nemo/`, `torchtune/`) turns an `EngineTask` into an `EngineLaunch`; `build_launch` picks it
by the recipe. An adapter does not import its framework, and the same task always gives the same bytes.

Tokens, tokenizer and base weights are ready only after the data is prepared. The stage before training stores them
under fixed names in the run's folder (`EngineInput`).

`launcher_script` is torchrun with static ranks in the engine's stock image. Its exit code is torchrun's, so a failed
training is a failed job; after a requested stop it is 128 + signal. It is 2, which no target starts again, where a new
start would end the same way: after an error before the first step, and after a stop at the time limit of an engine that
saves nothing then and has not saved since it was started. It needs bash and coreutils, and nothing of Trainshed. Every
name and value in it is quoted: none can become a command. Where the stage before has left `watch_node.py`, that runs
beside torchrun: it says what the node's devices report and which rank a stall is about.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from trainshed.catalog import Gpu
from trainshed.errors import InputError, RecipeError
from trainshed.observe.process_stacks import RUN_FOLDER_VARIABLE
from trainshed.plan.layout import RankLayout
from trainshed.recipe import ModelConfig, Recipe
from trainshed.run_folder import CHECKPOINTS, PROFILE

EngineInput = Literal["data-args", "data-prefix", "tokenizer", "base-megatron", "base-hf"]
"""What a CPU stage leaves under `<run>/engine/` for the engine:

data-args       data.json: Megatron's --per-split-data-args-path, {"train": [w, prefix, …], "valid": …, "test": …}
data-prefix     data_prefix.txt: NeMo's `model.data.data_prefix` as one Hydra value
tokenizer       tokenizer/: the tokenizer's files
base-megatron   base/: the base weights as a Megatron `torch_dist` checkpoint, with their verdict
base-hf         base/: the base weights as Hugging Face safetensors
"""


@dataclass(frozen=True)
class EngineSite:
    """Where a foreign engine runs; paths are those that its processes see."""

    run_folder: str
    """The run's folder in the store."""
    job_folder: str
    """The folder of the job's files (`EngineLaunch.files`)."""
    nodes: int
    gpus_per_node: int
    image: str | None = None
    sharp: bool = False
    vendor: Literal["nvidia", "amd"] = "nvidia"
    node_disk: str | None = None
    """A folder on each node's own disk."""

    @property
    def input_folder(self) -> str:
        """The folder with what earlier stages made for the engine."""
        return f"{self.run_folder}/engine"


@dataclass(frozen=True)
class EngineTask:
    """A recipe on one layout, ready to be rendered for another engine."""

    recipe: Recipe
    config: ModelConfig
    layout: RankLayout
    length: int | None
    """In steps; None where `train.epochs` says it, which torchtune alone takes: it counts its data itself."""
    site: EngineSite

    @property
    def steps(self) -> int:
        """The length in steps, for engines that must be told it."""
        assert self.length is not None, "`epochs` is refused before it is rendered for an engine that counts steps"
        return self.length


@dataclass(frozen=True)
class CpuStage:
    """Work in the engine's image that needs no GPU (building an index), done before GPUs are asked for."""

    name: str
    argv: tuple[str, ...]


NODE_NUMBER = "{node}"
PROGRAMS = "programs"
"""The folder, among a job's files, of programs of this package that run in images without it."""


@dataclass(frozen=True)
class ImageExpectation:
    """What an engine's image must have; `prove_image.py` looks for it in the first stage."""

    modules: tuple[str, ...]
    """What can be imported there."""
    package: str | None = None
    """Whose version is compared."""
    version: str | None = None
    """The one that the job is rendered for."""
    parser: Literal["megatron", "hydra", "torchtune", "script"] | None = None
    """Which of its own parsers is asked about the arguments."""
    config: str | None = None
    """A file of the job that the parser reads."""
    program_in_image: bool = True
    """Whether `program` lies in the image, and its folder on the path of modules; otherwise it is a job file."""


@dataclass(frozen=True)
class EngineLaunch:
    """How to start an engine: on every node torchrun starts `program` with `arguments` on every GPU."""

    program: str
    arguments: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Text files of the job, by their name in the job's folder."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[EngineInput, ...] = ()
    """What earlier stages leave in the run's folder for it."""
    late_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments whose value is read from a file when the job starts: `{"++model.data.data_prefix=": "/run/…txt"}`."""
    staging: tuple[str, ...] = ()
    """A command that each node runs first. It gets the file of a late argument and a folder of the node, the last word
    here; it copies what the file lists into the folder, and prints the value with the new paths."""
    node_arguments: tuple[str, ...] = ()
    """Arguments in which `NODE_NUMBER` stands for the number of the node: files that each node writes for itself."""
    cpu_stages: tuple[CpuStage, ...] = ()
    """What is done before it starts."""
    is_module: bool = False
    """`program` is a Python module (`-m`), not a file."""
    companion: tuple[str, ...] = ()
    """A command that the first node runs beside training, with the folder of the attempt's logs as its last word; and
    once more after it, with `--once`."""
    step_line: str | None = None
    """A pattern for `grep -E` of the lines that report a step in its log; None: its log reports none."""
    last_checkpoint: tuple[str, str] | None = None
    """A file that says which checkpoint is the newest, and what it says once the run has its length; None: it has
    none. An engine that ends without an error before is not taken for one that has finished."""
    saves_when_stopped: bool = True
    """Whether it saves when it is asked to stop; otherwise it ends, and goes on from the checkpoint before."""
    rank_script: str | None = None
    """A bash script of the job that starts each rank, given its command; None: torchrun starts Python itself."""
    runner: str | None = None
    """A Python file of the job that runs `program`, its first argument; None: Python runs it itself."""
    expects: ImageExpectation | None = None
    """What is looked for in its image before anything else is done."""
    notes: tuple[str, ...] = ()
    """What was chosen, and where this engine differs from what the recipe suggests."""


def build_launch(task: EngineTask, *, gpu: Gpu | None = None) -> EngineLaunch:
    """Return how the engine that a recipe names is started; `gpu` is what it would run on, where that is known."""
    launch = _adapter_launch(task, gpu)
    return replace(launch, step_line=_STEP_LINES.get(task.recipe.engine.name))


_STEP_LINES = {"torchtune": r"\|Loss: ", "megatron": r"iteration +[0-9]+/ *[0-9]+ "}


def _adapter_launch(task: EngineTask, gpu: Gpu | None) -> EngineLaunch:
    recipe = task.recipe
    if recipe.train.precision == "fp8" and gpu is not None and gpu.dense_tflops.fp8 is None:
        raise RecipeError(
            f"{recipe.engine.name} in fp8 needs GPUs that have it, and {gpu.name} has not",
            where=recipe.where("train.precision"),
            hint="write precision: bf16, or run it on an H100 or newer",
        )
    # Imported here: none of them needs what another one does.
    match recipe.engine.name:
        case "megatron":
            from trainshed.engines.megatron.launch import megatron_launch

            return megatron_launch(task)
        case "nemo":
            from trainshed.engines.nemo.launch import nemo_launch

            return nemo_launch(task)
        case "torchtune":
            from trainshed.engines.torchtune.launch import torchtune_launch

            return torchtune_launch(task)
    raise RecipeError(
        f"{recipe.engine.name} is our own engine: it needs no adapter",
        where=recipe.where("engine.name"),
        hint="engine: megatron, nemo or torchtune",
    )


STAGE_FILE = f"{PROGRAMS}/stage_tokens.py"
SHARED_MEMORY = "/dev/shm"


def staging_command(task: EngineTask, python: str = "python3") -> tuple[str, ...]:
    """Return the command that copies tokens to the node as `data.stage` says; empty where they are read in place."""
    stage = task.recipe.data.stage
    if stage == "direct" or task.recipe.data.synthetic:
        return ()
    folder = SHARED_MEMORY if stage == "shm" else task.site.node_disk
    if folder is None:
        raise RecipeError(
            "the cluster names no disk of its nodes",
            where=task.recipe.where("data.stage"),
            hint="write `local_disk: /ssd` in the cluster file, the folder as jobs see it",
        )
    return (python, f"{task.site.job_folder}/{STAGE_FILE}", f"{folder.rstrip('/')}/trainshed-tokens")


def staging_files(task: EngineTask) -> dict[str, str]:
    """Return the file of the job that `staging_command` runs."""
    if not staging_command(task):
        return {}
    return {STAGE_FILE: Path(__file__).with_name(Path(STAGE_FILE).name).read_text(encoding="utf-8")}


def losses_rank(recipe: Recipe, image: str | None, world_size: int) -> int:
    """Return the rank that prints the losses: of Megatron-LM and Megatron-Bridge the last one, of others rank 0."""
    last = recipe.engine.name == "megatron"
    if recipe.engine.name == "nemo":
        from trainshed.engines.nemo.launch import BRIDGE_RELEASE, nemo_release

        last = nemo_release(recipe, recipe.engine.image or image) == BRIDGE_RELEASE
    return world_size - 1 if last else 0


_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Ranks get the signal themselves: torchrun would kill them 30 seconds after its own, in the middle of a checkpoint.
# Both signals reach them as TERM, the one that engines know. While there are no ranks yet, torchrun is stopped.
_SIGNAL_HANDLER = """\
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
_WAIT_LOOP = """\
while true; do
  interrupted=
  code=0
  wait "$torchrun" || code=$?
  [[ -n $interrupted ]] || break
done"""

_CLOSE_LOG = """\
if [[ -n $nccl ]]; then
  [[ $code == 0 || -n $requested ]] || grep -hF 'NCCL WARN' "$nccl"*.log 2>/dev/null | tail -n 20 >&"$log" || true
  rm -f "$nccl"*.log
fi
exec {log}>&-
[[ -z $watch ]] || kill "$watch" 2>/dev/null || true
rm -f "${TMPDIR:-/tmp}/trainshed-$$-"*.pipe"""

# What ranks have started, such as a process that writes checkpoints, may outlive a rank that is killed. It keeps the
# log's pipe open, and tee and this script would wait for ever. It has a minute to end by itself, as an upload may need,
# or five seconds after a failure.
_KILL_LEFTOVERS = """\
tenths=$((code == 0 ? 600 : 50))
while ((tenths--)) && kill -0 "$tee" 2>/dev/null; do
  sleep 0.1
done
if kill -0 "$tee" 2>/dev/null; then
  killed=
  for fd in /proc/[0-9]*/fd/*; do
    pid=${fd#/proc/}
    pid=${pid%%/*}
    if [[ $pid != "$tee" && $pid != "$killed" && $fd -ef /proc/$tee/fd/0 ]] && kill -KILL "$pid" 2>/dev/null; then
      echo "trainshed: process $pid outlived the ranks and was killed" >&2
      killed=$pid
    fi
  done
fi
wait "$tee" || true"""

# torchrun ends with a box of its own; what counts is the error of the rank that it names last, as the root cause.
_RANK_ERROR = """\
if [[ $code != 0 && -z $requested ]]; then
  own=$(tail -c "+$(($(cat "${file%.log}.began" 2>/dev/null || echo 0) + 1))" "$file" | tail -c 1000000)
  root=$(grep -oE '^ +rank +: [0-9]+' <<<"$own" | tail -n 1 | grep -oE '[0-9]+' || true)
  errors='[A-Za-z_.]*(Error|Exception)(:.*)?$'
  why=$(grep -E "^\\[rank$root\\]: $errors" <<<"$own" | tail -n 1 || true)
  [[ -n $why ]] || why=$(grep -E "^$errors" <<<"$own" | grep -v ChildFailedError | tail -n 1 || true)
  [[ -z $why ]] || echo "trainshed: $why" >&2
fi"""

# The log of an attempt may go on from an earlier job's: what was there before does not count. torchrun's exit code is 1
# whatever became of a rank; a negative one in its summary is the signal that ended the rank. The last one there is that
# of the rank that failed first: torchrun ends the others by signals itself.
_PLAIN_ERROR = """\
has_stepped() {{
  local one
  for one in "$folder"/node-*.log; do
    if grep -qE {step_line} <(tail -c "+$(($(cat "${{one%.log}}.began" 2>/dev/null || echo 0) + 1))" "$one"); then
      return 0
    fi
  done
  return 1
}}
if [[ $code == 1 && -z $requested ]] && ! has_stepped &&
  ! grep -oE 'exitcode +: -?[0-9]+' "$file" | tail -n 1 | grep -q -- -; then
  echo "trainshed: it failed before its first step, and a new start would fail the same way" >&2
  code=2
fi"""

# On the first node alone, whose rank 0 writes the file: others may see it later.
_ENDED_EARLY = """\
if [[ $code == 0 && -z $requested ]] && ((10#$node == 0)); then
  reached=$(cat {file} 2>/dev/null || true)
  if [[ $reached != {expected} ]]; then
    echo "trainshed: it ended without an error, and its newest checkpoint is ${{reached:-none}} instead of" \
      "{expected}: its log says why" >&2
    code=1
    has_stepped || code=2
  fi
fi"""

_STOPPED_WITHOUT_SAVING = """\
if [[ $requested == 138 ]]; then
  saved=$(find {checkpoints} -name '*.safetensors' -newer "${{file%.log}}.began" -print -quit 2>/dev/null || true)
  if [[ -n $saved ]]; then
    echo "trainshed: this engine saves nothing when it is stopped: it goes on from its last checkpoint" >&2
  else
    echo "trainshed: this engine saves nothing when it is stopped, and has saved nothing since this start:" \\
      "a new start would get no further; give it a longer time limit, or write engine: torch" >&2
    requested=2
  fi
fi"""


WATCH_FOLDER = "watch"
"""Under `<run>/engine/`: `watch_node.py` and its helpers, which every foreign engine gets."""

QUIET_SECONDS = 1800
"""A foreign engine whose log does not grow for so long is reported as stalled: a save of a large model, or a first step
that compiles, takes minutes and prints nothing."""

# PyTorch before 2.9 knows the older names, newer ones both. What the cluster file or the image sets wins.
_FLIGHT_RECORDER = """\
export TORCH_FR_BUFFER_SIZE="${TORCH_FR_BUFFER_SIZE-2000}"
export TORCH_NCCL_TRACE_BUFFER_SIZE="${TORCH_NCCL_TRACE_BUFFER_SIZE-2000}"
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT-1}"
export TORCH_FR_DUMP_TEMP_FILE="${TORCH_FR_DUMP_TEMP_FILE-$health/nccl-rank-}"
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="${TORCH_NCCL_DEBUG_INFO_TEMP_FILE-$health/nccl-rank-}"
export TORCH_NCCL_DEBUG_INFO_PIPE_FILE="${TORCH_NCCL_DEBUG_INFO_PIPE_FILE-${TMPDIR:-/tmp}/trainshed-$$-}\""""


NETWORK_FILE = "network.json"
"""A file of the job that says what NCCL's logs must show (`observe/nccl_log.py`)."""

# If one of them is set, somebody wants to read NCCL's log elsewhere: it stays so, and the network is not checked.
_NCCL_LOG = """\
nccl=
if [[ -f {network} && -z ${{NCCL_DEBUG:-}}${{NCCL_DEBUG_FILE:-}} ]]; then
  nccl=${{TMPDIR:-/tmp}}/trainshed-nccl-$$-
  export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE="$nccl%p.log"
fi"""


def launcher_script(
    launch: EngineLaunch, site: EngineSite, *, python: str = "python3", quiet_seconds: float = QUIET_SECONDS
) -> str:
    """Return the script that every node runs; `python` is the one that has the engine.

    It reads NODE_RANK (or what Slurm and Kubernetes call it), MASTER_ADDR and MASTER_PORT, and TRAINSHED_ATTEMPT. The
    log goes to stdout and to `<run>/logs/attempt-NNNN/node-NNNNN.log`.
    """
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "set -euo pipefail",
            *_identity_lines(site),
            *_profile_lines(launch, site),
            *_environment_lines(launch),
            _FLIGHT_RECORDER,
            _NCCL_LOG.format(network=shlex.quote(f"{site.job_folder}/{NETWORK_FILE}")),
            *_argument_lines(launch),
            _SIGNAL_HANDLER,
            'exec {log}> >(trap "" TERM USR1 INT; exec tee -a "$file")',
            "tee=$!",
            *_torchrun_lines(launch, site, python),
            "torchrun=$!",
            *_companion_lines(launch),
            *_watch_lines(site, python, quiet_seconds),
            _WAIT_LOOP,
            *_companion_end(launch),
            *_end_lines(launch, site),
        ]
    )


def _end_lines(launch: EngineLaunch, site: EngineSite) -> Iterator[str]:
    yield _CLOSE_LOG
    yield _KILL_LEFTOVERS
    if launch.step_line is not None:
        yield _PLAIN_ERROR.format(step_line=shlex.quote(launch.step_line))
        if launch.last_checkpoint is not None:
            file, expected = launch.last_checkpoint
            yield _ENDED_EARLY.format(file=shlex.quote(file), expected=shlex.quote(expected))
    if not launch.saves_when_stopped:
        folder = shlex.quote(f"{site.run_folder}/{CHECKPOINTS}")
        yield _STOPPED_WITHOUT_SAVING.format(checkpoints=folder)
    yield _RANK_ERROR
    # Where one node fails, others are stopped: theirs is not the code that counts.
    yield '[[ -n $requested ]] || echo "$code" >"${file%.log}.exit-code"'
    yield 'exit "${requested:-$code}"\n'


def _identity_lines(site: EngineSite) -> Iterator[str]:
    yield "node=${NODE_RANK:-${TRAINSHED_NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}"
    yield "attempt=${TRAINSHED_ATTEMPT:-}"
    yield "[[ -n $attempt || ! ${SLURM_RESTART_COUNT:-0} =~ ^[0-9]+$ ]] || attempt=$((${SLURM_RESTART_COUNT:-0} + 1))"
    # Checked before bash counts with them: arithmetic would run a command that hides in a variable.
    yield '[[ $node =~ ^[0-9]+$ ]] || { echo "NODE_RANK is not a number: ${node:-not set}" >&2; exit 2; }'
    yield '[[ $attempt =~ ^[0-9]+$ ]] || { echo "TRAINSHED_ATTEMPT is not a number: $attempt" >&2; exit 2; }'
    yield ': "${MASTER_ADDR:?the address of node 0 is not set}" "${MASTER_PORT:?the port of node 0 is not set}"'
    yield f"folder={shlex.quote(f'{site.run_folder}/logs')}/$(printf 'attempt-%04d' \"$((10#$attempt))\")"
    yield f"health={shlex.quote(f'{site.run_folder}/health')}/${{folder##*/}}"
    yield 'mkdir -p "$folder" "$health"'
    yield f"export {RUN_FOLDER_VARIABLE}={shlex.quote(site.run_folder)}"
    yield "file=$folder/$(printf 'node-%05d.log' \"$((10#$node))\")"
    yield 'rm -f "${file%.log}.exit-code"'
    yield '{ stat -c %s "$file" 2>/dev/null || echo 0; } >"${file%.log}.began"'


def _companion_lines(launch: EngineLaunch) -> Iterator[str]:
    if launch.companion:
        yield "companion="
        yield "if ((10#$node == 0)); then"
        yield f'  {shlex.join(launch.companion)} "$folder" >&"$log" 2>&1 &'
        yield "  companion=$!"
        yield "fi"


def _companion_end(launch: EngineLaunch) -> Iterator[str]:
    if launch.companion:
        yield "if [[ -n $companion ]]; then"
        yield '  kill "$companion" 2>/dev/null || true'
        yield '  wait "$companion" || true'
        yield f'  {shlex.join(launch.companion)} "$folder" --once >&"$log" 2>&1 || true'
        yield "fi"


def _profile_lines(launch: EngineLaunch, site: EngineSite) -> Iterator[str]:
    """Say where a script that starts ranks under a profiler puts its reports."""
    if launch.rank_script is not None:
        attempt = "$(printf 'attempt-%04d' \"$((10#$attempt))\")"
        yield f"TRAINSHED_PROFILE={shlex.quote(f'{site.run_folder}/{PROFILE}')}/{attempt}"
        yield "export TRAINSHED_PROFILE"


def _environment_lines(launch: EngineLaunch) -> Iterator[str]:
    for name, value in launch.environment.items():
        if not _VARIABLE_NAME.fullmatch(name):
            raise InputError(f"`{name}` is not the name of a variable", hint="letters, digits and underscores")
        yield f"export {name}={shlex.quote(value)}"


def _argument_lines(launch: EngineLaunch) -> Iterator[str]:
    yield "arguments=("
    yield from (f"  {shlex.quote(word)}" for word in launch.arguments)
    yield ")"
    for start, file in launch.late_arguments.items():
        if launch.staging:
            command, folder = launch.staging[:-1], launch.staging[-1]
            yield f"late=$({shlex.join((*command, file, folder))})"
        else:
            yield f"late=$(cat {shlex.quote(file)})"
        # `key=` and its value are one word, `--key` and its value two.
        between = "" if start.endswith("=") else " "
        yield f'arguments+=({shlex.quote(start)}{between}"$late")'
    for word in launch.node_arguments:
        before, after = (shlex.quote(part) for part in word.split(NODE_NUMBER))
        yield f'arguments+=({before}"$((10#$node))"{after})'
    yield "# Further arguments of whoever runs this script come last."
    yield 'arguments+=("$@")'


def _watch_lines(site: EngineSite, python: str, quiet_seconds: float) -> Iterator[str]:
    yield "watch="
    yield f"watcher={shlex.quote(f'{site.input_folder}/{WATCH_FOLDER}/watch_node.py')}"
    yield "if [[ -f $watcher ]]; then"
    words = [
        f"  {shlex.quote(python)}",
        '"$watcher"',
        f"--run {shlex.quote(site.run_folder)}",
        '--attempt "$((10#$attempt))"',
        '--node "$((10#$node))"',
        f"--nodes {site.nodes}",
        f"--ranks-per-node {site.gpus_per_node}",
        '--torchrun "$torchrun"',
        f"--quiet-seconds {quiet_seconds:g}",
        f"--network {shlex.quote(f'{site.job_folder}/{NETWORK_FILE}')}",
        '--nccl-log "$nccl"',
    ]
    # It keeps the log's pipe closed: tee ends when torchrun has.
    yield " \\\n    ".join([*words, "{log}>&- &"])
    yield "  watch=$!"
    yield "fi"


def _torchrun_lines(launch: EngineLaunch, site: EngineSite, python: str) -> Iterator[str]:
    words = [
        shlex.quote(python),
        "-m torch.distributed.run",
        f"--nnodes {site.nodes}",
        '--node-rank "$node"',
        '--master-addr "$MASTER_ADDR"',
        '--master-port "$MASTER_PORT"',
        f"--nproc-per-node {site.gpus_per_node}",
    ]
    program = shlex.quote(launch.program)
    if launch.runner is not None:
        program = f"{shlex.quote(f'{site.job_folder}/{launch.runner}')} {program}"
    if launch.rank_script is not None:
        words.append("--no-python")
        starter = f"bash {shlex.quote(f'{site.job_folder}/{launch.rank_script}')} {shlex.quote(python)}"
        program = f"{starter} {'-m ' if launch.is_module else ''}{program}"
    elif launch.is_module:
        words.append("--module")
    yield " \\\n  ".join(words) + " \\"
    yield f'  {program} "${{arguments[@]}}" >&"$log" 2>&1 &'
