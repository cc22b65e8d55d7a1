"""A job as a script that writes its files, and an sbatch script per stage; both run without us.

`files.sh` runs once where jobs are submitted, and writes the job's files into `<run>/jobs/<hash>/`. Programs of ours
among them come from the store, by their hash. An sbatch script starts one task per node with srun, and exits with its
exit code or requeues itself if a new start may succeed. What each node runs is one of the job's files
(`train.node.sh`), so that it also runs inside a container: it unpacks our code, sets the environment, then starts the
agent or the script of a foreign engine.

Everything that a person wrote (names, paths, values, files) is quoted by a function of this module or of
`sbatch_options.py`.
"""

from __future__ import annotations

import hashlib
import posixpath
from collections.abc import Mapping
from shlex import quote

import orjson

from trainshed.engines.launch import PROGRAMS
from trainshed.errors import InputError, RecipeError
from trainshed.launch.fabric import FabricSetup, fabric_setup
from trainshed.launch.job import (
    JOB_FILE,
    MASTER_PORT,
    SETUP_FILE,
    CodeArchive,
    Job,
    ServingSpec,
    Stage,
    job_folder,
    setup_script,
)
from trainshed.launch.rendezvous import FIRST_PORT, PORTS
from trainshed.launch.slurm.sbatch_options import logs_folder, secret_references, stage_options
from trainshed.launch.target import RequestPart, SubmitRequest
from trainshed.recipe import Cluster
from trainshed.run_folder import store_address

FILES_PART = "files.sh"
"""The part of a request that writes the files of a job."""
FIRST_COMMAND = "set -euo pipefail"
"""The first line after a script's options."""
_TASK_ID = "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
_START_NAME = f'"slurm-{_TASK_ID}-${{SLURM_RESTART_COUNT:-0}}-$TRAINSHED_BEGAN"'
"""Names one start of a job or of a part of it."""


def render(job: Job) -> SubmitRequest:
    """Return the scripts of a job, and what must be in the store before they run."""
    _check_run_folder_and_images(job)
    store = store_address(job.run)
    setups = {stage.name: _stage_fabric(job, stage) for stage in job.stages}
    files = dict(job.files) | {
        node_script_file(stage): node_script(job, stage, store, setups[stage.name]) for stage in job.stages
    }
    setup_text = setup_script(job.cluster)
    files |= {SETUP_FILE: setup_text} if setup_text is not None else {}
    programs = {name: _stored_program(name, text) for name, text in files.items() if name.startswith(f"{PROGRAMS}/")}
    parts = [RequestPart(FILES_PART, None, _files_script(job, files, programs, store))]
    for number, stage in enumerate(job.stages):
        previous_stage = job.stages[number - 1].name if number else None
        text = _sbatch_script(job, stage, previous_stage, files_hash(files), store, setups[stage.name])
        parts.append(RequestPart(f"{stage.name}.sbatch", stage.name, text))
    uploads = {f"code/{job.code.sha256}/{job.code.name}": job.code.data} if job.code is not None else {}
    uploads |= {path: files[name].encode() for name, path in programs.items()}
    notes = [note for setup in setups.values() if setup is not None for note in setup.notes]
    if not job.cluster.on_slurm.exclusive:
        notes.append("slurm.exclusive is false: training has the CPUs and the memory that the cluster gives any job")
    return SubmitRequest("slurm", job.name, tuple(parts), uploads, tuple(dict.fromkeys(notes)))


def _check_run_folder_and_images(job: Job) -> None:
    cluster = job.cluster
    if not job.run.startswith("/"):
        raise RecipeError(
            f"the run's folder {job.run} is not a path that every node mounts",
            where=cluster.where("store"),
            hint="write `store: /shared/trainshed`, a folder of the shared disk",
        )
    for stage in job.stages:
        if runs_in_container(job, stage) and (stage.image or cluster.image) is None:
            raise RecipeError(
                f"in which image does {stage.name} run?",
                where=cluster.where("slurm.container"),
                hint="write `image: registry/name@sha256:…`, or `container: none` and a `venv`",
            )
        if stage.image is not None and not runs_in_container(job, stage):
            raise RecipeError(
                f"{stage.name} asks for the image {stage.image}, and this cluster has no containers",
                where=cluster.where("slurm.container"),
                hint="write `container: pyxis`",
            )


def _stage_fabric(job: Job, stage: Stage) -> FabricSetup | None:
    return fabric_setup(job.cluster, nodes=stage.nodes) if stage.name == "train" else None


def _stored_program(name: str, text: str) -> str:
    """Return where the store has a program: below its hash."""
    return f"code/{hashlib.sha256(text.encode()).hexdigest()}/{posixpath.basename(name)}"


def _files_script(job: Job, files: Mapping[str, str], programs: Mapping[str, str], store: str) -> str:
    """Return the script that writes the files of a job."""
    lines = [
        "#!/bin/bash",
        f"# The files of {job.name}, written by Trainshed. By hand: `bash {FILES_PART}`, then sbatch.",
    ]
    if job.code is not None or programs:
        lines.append(
            "# The store needs our code first: copy `store/` there, which `trainshed render --out DIR` writes."
        )
    lines += [
        FIRST_COMMAND,
        f"run={quote(job.run)}",
        f"store={quote(store)}",
        f"mkdir -p {quote(logs_folder(job.run))}",
        *write_job_files(files, programs),
    ]
    return "\n".join(lines) + "\n"


def _sbatch_script(
    job: Job, stage: Stage, previous_stage: str | None, files: str, store: str, setup: FabricSetup | None
) -> str:
    elastic = _is_elastic(job, stage)
    lines = [
        "#!/bin/bash",
        *stage_options(job, stage, previous_stage, elastic=elastic),
        "#",
        f"# The stage {stage.name} of {job.name}, written by Trainshed. By hand, first:",
        *_manual_steps(previous_stage),
        FIRST_COMMAND,
        f"run={quote(job.run)}",
        'TRAINSHED_BEGAN="$(date +%s)"',
        "export TRAINSHED_BEGAN",
        *_use_job_files(files),
        *_site_setup(job, stage),
        *_rendezvous(job, stage),
        *_start_and_wait(
            stage,
            f'srun {_srun_options(job, stage, store, setup, elastic)} bash "$files"/{quote(node_script_file(stage))}',
        ),
        *_exit_or_requeue(stage),
    ]
    return "\n".join(lines) + "\n"


def _is_elastic(job: Job, stage: Stage) -> bool:
    """Whether the agents of a stage continue in the same allocation after losing a node."""
    if stage.name != "train" or stage.script is not None:
        return False
    return stage.spares > 0 or orjson.loads(job.files.get(JOB_FILE, "{}")).get("min_nodes") is not None


def _manual_steps(previous_stage: str | None) -> list[str]:
    """Return comments that say what to do before submitting the script by hand."""
    lines = [f"#   bash {FILES_PART}"]
    if previous_stage is not None:
        lines.append(f"#   and write the job id of {previous_stage} into the --dependency line")
    return lines


def write_job_files(files: Mapping[str, str], stored: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that write the job's files, all or none; `stored` are those copied from a path in the store."""
    stored = stored or {}
    lines = [
        f'files="$run/jobs/{files_hash(files)}"',
        'mkdir -p "$run/jobs"',
        'if [ ! -e "$files" ]; then',
        'new="$(mktemp -d "$run/jobs/.new-XXXXXXXX")"',
    ]
    for name in sorted(files):
        lines += (
            copy_file_lines("new", name, stored[name]) if name in stored else write_file_lines("new", name, files[name])
        )
    return [
        *lines,
        'chmod 755 "$new"',
        'mv -T "$new" "$files" 2>/dev/null || rm -rf "$new" # another start was faster',
        "fi",
    ]


def _use_job_files(hash: str) -> list[str]:
    """Return the lines that find the job's files."""
    return [
        f'files="$run/jobs/{hash}"',
        'if [ ! -d "$files" ]; then',
        f'  echo "trainshed: $files is missing; {FILES_PART} of \\`trainshed render --out DIR\\` writes it" >&2',
        "  exit 2",
        "fi",
        *link_job_files(),
    ]


def link_job_files() -> list[str]:
    """Return the lines that make a job's files the ones of its run: foreign engines read them in `<run>/job`."""
    return [
        'mkdir -p "$run/starts"',
        'link="$(mktemp -u "$run/jobs/.link-XXXXXXXX")"',
        'ln -s "$files" "$link"',
        f'mv -T "$link" "$run/{posixpath.basename(job_folder("x"))}"',
    ]


def files_hash(files: Mapping[str, str]) -> str:
    """Return the name of a set of files: 16 hex digits of a hash of their names and texts."""
    digest = hashlib.sha256()
    for name in sorted(files):
        for text in (name, files[name]):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _site_setup(job: Job, stage: Stage) -> list[str]:
    """Return the line that sources the cluster's `setup` before srun: a container has no `module` command.

    srun passes what it exports to every container.
    """
    return [f'. "$files"/{SETUP_FILE}'] if job.cluster.setup and runs_in_container(job, stage) else []


def _rendezvous(job: Job, stage: Stage) -> list[str]:
    """Return the lines that name this start and the address of the first node."""
    if stage.serving is not None:
        own_port = stage.serving.port
        port_expression = own_port if own_port is not None else f"$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"
        return [f"export TRAINSHED_START={_START_NAME}", f"export TRAINSHED_PORT={port_expression}"]
    port = job.cluster.on_slurm.port
    lines = [f"export TRAINSHED_START={_START_NAME}"]
    if stage.nodes + stage.spares > 1:
        lines += [
            'mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'export MASTER_ADDR="${hosts[0]}"',
            f"export MASTER_PORT={port if port is not None else f'$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))'}",
            'echo "trainshed: $TRAINSHED_START on ${hosts[*]}" >&2',
        ]
    elif stage.script is not None:
        lines += ["export MASTER_ADDR=127.0.0.1", f"export MASTER_PORT={port or MASTER_PORT}"]
    return lines


def _srun_options(job: Job, stage: Stage, store: str, setup: FabricSetup | None, elastic: bool) -> str:
    # The job's own environment is a short list (--export), and by default srun would pass on only that.
    options = ["--export=ALL", f"--nodes={stage.nodes + stage.spares}", "--ntasks-per-node=1", "--cpu-bind=none"]
    options += ["--kill-on-bad-exit=0", "--no-kill"] if elastic else ["--kill-on-bad-exit=1"]
    if stage.nodes + stage.spares > 1:
        options.append("--label")
    if stage.cpus is not None:
        options.append(f"--cpus-per-task={stage.cpus}")
    if runs_in_container(job, stage):
        options += [
            f"--container-image={_pyxis_image(stage.image or job.cluster.image or '')}",
            f"--container-mounts={','.join(_container_mounts(job, store, setup))}",
            "--no-container-mount-home",
        ]
    return " ".join(quote(option) for option in options)


def _pyxis_image(image: str) -> str:
    """Return an image as pyxis names it: with a `#` after the registry, if it has one; a file as it is."""
    registry, slash, name = image.partition("/")
    if image.startswith(("/", "./")) or not slash or not ("." in registry or ":" in registry):
        return image
    return f"{registry}#{name}"


def _container_mounts(job: Job, store: str, setup: FabricSetup | None) -> list[str]:
    mounts = [f"{store}:{store}"]
    for volume in job.cluster.volumes:
        mounts.append(f"{volume.path}:{volume.mount}" + (":ro" if volume.read_only else ""))
    if job.cluster.local_disk is not None:
        mounts.append(f"{job.cluster.local_disk}:{job.cluster.local_disk}")
    mounts += setup.slurm.mounts if setup is not None else ()
    for mount in mounts:
        if "," in mount:
            raise RecipeError(f"{mount} has a comma, which pyxis takes for the next mount", hint="use another folder")
    return list(dict.fromkeys(mounts))


def serving_port(serving: ServingSpec, id: str) -> int:
    """Return the port of a server, as its script computes it."""
    return serving.port if serving.port is not None else FIRST_PORT + int(id) % PORTS


def _start_and_wait(stage: Stage, command: str) -> list[str]:
    """Return the lines that start a stage and wait for it; a server gets TERM shortly before its time limit."""
    if stage.serving is None:
        return ["code=0", f"{command} || code=$?"]
    return [
        f"{command} &",
        "server=$! late=",
        # bash handles a signal only after its current command, unless that is `wait`. TERM is sent by scancel to the
        # job step, because srun kills what it has started when it gets TERM itself.
        "trap 'late=1; scancel --signal=TERM \"$SLURM_JOB_ID.0\" || true' USR1",
        "while :; do",
        "  code=0",
        '  wait "$server" || code=$?',
        '  kill -0 "$server" 2>/dev/null || break',
        "done",
    ]


def _exit_or_requeue(stage: Stage) -> list[str]:
    """Return the lines that exit with the exit code, or requeue the job if a new start may succeed."""
    if stage.name != "train" and stage.serving is None:
        return ['exit "$code"']
    runs_agent = stage.script is None and stage.serving is None
    stopped = "saved" if runs_agent else "stopped"
    verdict = [
        # The first agent's exit code wins over srun's: a node that was lost and replaced has not failed the job.
        'verdict="$run/starts/$TRAINSHED_START/exit-code"',
        'if [ -s "$verdict" ]; then code="$(cat "$verdict")"; fi',
    ]
    if stage.script is not None and stage.serving is None:
        # srun stops the other nodes when one has failed, and returns the largest code of all.
        verdict = [
            """logs="$run/logs/$(printf 'attempt-%04d' "$((${SLURM_RESTART_COUNT:-0} + 1))")\"""",
            'ended="$(cat "$logs"/node-*.exit-code 2>/dev/null | sort -n | tail -n 1)" || true',
            'if [ "$code" != 0 ] && [ "${ended:-0}" != 0 ]; then code="$ended"; fi',
        ]
    return [
        *(verdict if stage.serving is None else []),
        "again() {",
        '  echo "trainshed: $1; queued again" >&2',
        # Requeueing makes Slurm send TERM, and some seconds later KILL.
        *(["  trap '' TERM"] if runs_agent else []),
        f'  if scontrol requeue "$SLURM_JOB_ID"; then {"avoid || true; " if runs_agent else ""}exit 0; fi',
        '  echo "trainshed: Slurm refused to queue it again" >&2',
        "}",
        *(_avoid_bad_nodes(stage) if runs_agent else []),
        *(['[ -z "$late" ] || again "drained before the time limit"'] if stage.serving is not None else []),
        'failures="$run/starts/slurm-$SLURM_JOB_ID.failures"',
        'case "$code" in',
        # 2: the input is wrong, a new start changes nothing. TERM and INT: a person ended it.
        "0 | 2 | 130 | 143) ;;",
        *([f'138) again "{stopped} before the time limit" ;;'] if stage.serving is None else []),
        "*)",
        '  echo "$TRAINSHED_START $code" >>"$failures"',
        '  failed="$(wc -l <"$failures")"',
        f'  if [ "$failed" -le {stage.restarts} ]; then',
        f'    again "failed with exit code $code ($failed of {stage.restarts} restarts)"',
        "  fi",
        "  ;;",
        "esac",
        'exit "$code"',
    ]


def _avoid_bad_nodes(stage: Stage) -> list[str]:
    """Return a function that excludes bad nodes from the next start, if enough others are left.

    Slurm changes the excluded nodes only of a pending job, so it is called after the requeue.
    """
    count_other_nodes = (
        'sinfo -h -N -p "$SLURM_JOB_PARTITION" -t idle,alloc,mix,comp -o %N | sort -u | grep -vcxF -f "$bad"'
    )
    return [
        "avoid() {",
        '  local bad="$run/starts/$TRAINSHED_START/bad-nodes" before all left',
        '  [ -s "$bad" ] || return 0',
        f'  left="$({count_other_nodes})" || true',
        f'  if [ "${{left:-0}}" -lt {stage.nodes + stage.spares} ]; then',
        '    echo "trainshed: too few nodes are left to avoid $(paste -sd, "$bad")" >&2',
        "    return 0",
        "  fi",
        '  before="$(scontrol show job -o "$SLURM_JOB_ID" | sed -n "s/.* ExcNodeList=\\([^ ]*\\).*/\\1/p")"',
        '  all="$(paste -sd, "$bad")"',
        '  if [ -n "$before" ] && [ "$before" != "(null)" ]; then all="$before,$all"; fi',
        '  scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$all"',
        '  echo "trainshed: the next start avoids $all" >&2',
        "}",
    ]


_UNPACK_SECONDS = 300


def node_script_file(stage: Stage) -> str:
    """Return the name of the file that each node of a stage runs."""
    return f"{stage.name}.node.sh"


def node_script(job: Job, stage: Stage, store: str, setup: FabricSetup | None) -> str:
    """Return the script that each node of a stage runs."""
    cluster = job.cluster
    lines = [
        "#!/usr/bin/env bash",
        f"# What every node of the stage {stage.name} runs.",
        "set -euo pipefail",
        'files="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"',
        *([f'. "$files"/{SETUP_FILE}'] if cluster.setup and not runs_in_container(job, stage) else []),
        f"cd -- {quote(job.run)}",
        *_python_lines(job, stage),
    ]
    if job.code is not None and stage.script is None:
        lines += _unpack_code(job.code, store)
    if setup is not None:
        lines += [*setup.shell_prologue(), *setup.slurm.prologue]
    for name, value in {**cluster.environment, **stage.environment}.items():
        lines.append(export_line(name, value))
    lines += [
        *secret_lines(cluster),
        'export TRAINSHED_HOST="${SLURMD_NODENAME:-$(hostname)}"',
        'export TRAINSHED_NODE_RANK="${SLURM_NODEID:-0}"',
        'TRAINSHED_INSTALLED="$(date +%s)"',
        "export TRAINSHED_INSTALLED",
    ]
    if stage.serving is not None:
        lines += _server_command(stage, stage.serving)
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


def _server_command(stage: Stage, serving: ServingSpec) -> list[str]:
    """Return the lines that start a server; the sbatch script has exported its port."""
    if stage.script is not None:
        check_file_name(stage.script)
        return [f'exec bash "$files"/{quote(stage.script)}']
    for argument in serving.words:
        refuse_nul(argument, "serve")
    arguments = " ".join(quote(argument) for argument in serving.words)
    return [f'exec "$python" -P -m trainshed {arguments} --port "$TRAINSHED_PORT"']


def _python_lines(job: Job, stage: Stage) -> list[str]:
    venv = job.cluster.on_slurm.venv
    if venv is None or runs_in_container(job, stage):
        refuse_nul(job.cluster.python, "python")
        return [f"python={quote(job.cluster.python)}"]
    return [
        export_line("VIRTUAL_ENV", venv),
        'export PATH="$VIRTUAL_ENV/bin:$PATH"',
        'python="$VIRTUAL_ENV/bin/python"',
    ]


def runs_in_container(job: Job, stage: Stage) -> bool:
    """Whether a stage runs in an image."""
    return job.cluster.on_slurm.container == "pyxis"


def _unpack_code(code: CodeArchive, store: str) -> list[str]:
    """Return the lines that unpack our code beside its archive, once for all nodes and jobs."""
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
        f"    for ((waited = 0; waited < {_UNPACK_SECONDS}; waited++)); do",
        '      [ ! -e "$code/unpacked" ] || break',
        "      sleep 1",
        "    done",
        "  fi",
        "fi",
        'export PYTHONPATH="$code/unpacked${PYTHONPATH:+:$PYTHONPATH}"',
    ]


def secret_lines(cluster: Cluster) -> list[str]:
    """Return the lines that set the secrets on a node; a missing one ends the job with its name."""
    lines = []
    for name, reference in secret_references(cluster):
        if reference.env is not None:
            lines.append(f'export {name}="${{{reference.env}:?is not set where the job was submitted}}"')
        elif reference.file is not None:
            # Not in one line with `export`, which would hide that the file cannot be read.
            lines += [f'{name}="$(cat -- {quote(reference.file)})"', f"export {name}"]
    return lines


def export_line(name: str, value: str) -> str:
    """Return a line that sets a variable and exports it."""
    refuse_nul(value, name)
    return f"export {name}={quote(value)}"


def write_file_lines(folder: str, name: str, text: str) -> list[str]:
    """Return the lines that write a file of any text, byte for byte; `folder` is a variable's name."""
    check_file_name(name)
    refuse_nul(text, name)
    path = f'"${folder}"/{quote(name)}'
    lines = [f'mkdir -p "${folder}"/{quote(posixpath.dirname(name))}'] if "/" in name else []
    delimiter = _heredoc_delimiter(text)
    if text.endswith("\n"):
        return [*lines, f"cat >{path} <<'{delimiter}'", text[:-1], delimiter]
    # A heredoc always ends with a line break.
    return [*lines, f"head -c -1 >{path} <<'{delimiter}'", text, delimiter]


def copy_file_lines(folder: str, name: str, path: str) -> list[str]:
    """Return the lines that copy a file from the store, where its folder is named by its hash, if it has that hash."""
    check_file_name(name)
    sha256 = posixpath.basename(posixpath.dirname(path))
    source = f'"$store"/{quote(path)}'
    return [
        *([f'mkdir -p "${folder}"/{quote(posixpath.dirname(name))}'] if "/" in name else []),
        f'if [ "$(sha256sum <{source})" != "{sha256}  -" ]; then',
        f'  echo "trainshed: $store/{path} is not what was submitted" >&2',
        "  exit 1",
        "fi",
        f'cp {source} "${folder}"/{quote(name)}',
    ]


def check_file_name(name: str) -> None:
    """Refuse a name of a job's file that is outside the job's folder."""
    parts = name.split("/")
    if name.startswith("/") or ".." in parts or "" in parts or "\x00" in name or "\n" in name:
        raise InputError(f"{name!r} is not a name for a file of a job", hint="write a path inside the job's folder")


def refuse_nul(text: str, subject: str) -> None:
    """Refuse the one character that no script can hold."""
    if "\x00" in text:
        raise InputError(f"{subject} holds a NUL character, which no script can", hint="take it out")


def _heredoc_delimiter(text: str) -> str:
    """Return a delimiter that is not a line of the text; the same text gives the same delimiter."""
    lines = set(text.split("\n"))
    number = 0
    while (delimiter := f"END_OF_FILE{number or ''}") in lines:
        number += 1
    return delimiter
