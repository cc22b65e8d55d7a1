"""Every path of a run, named once.

<store>/runs/<name>/<id>/
    recipe.yaml, cluster.yaml                  the recipe as resolved; the cluster file it was started with here
    prepared.json                              where tokens, index and base weights are, and their fingerprints
    running.json                               who works on it on this machine; counts only while it is locked
    attempts/0001.json                         the number that each attempt has taken
    plans/attempt-0001.json                    layout and reasons of an attempt
    events/attempt-0001/000001.jsonl           the truth; `rank-00003.jsonl` is what a failed rank had in memory;
                                               `attempt-0000/` has the stages before and after training
    logs/attempt-0001/rank-00000.log           what a rank printed; `logs/<stage>/` for stages on CPUs
    health/attempt-0001/                       flight records and errors of ranks, hosts, preflight;
                                               `health/image.json` is what the first stage saw of the image
    profile/attempt-0001/                      traces, their summaries, memory snapshots (`engines/torch/profiler.py`)
    checkpoints/step-00000100/, latest, best   the state; `checkpoints-megatron/` is Megatron's own
    answers/step-00000100.json                 answers to `data.validation.prompts`; `tokenizer.json` decodes them
    engine/                                    what CPU stages leave for a foreign engine; `run.json`: where it runs
    starts/<start>/                            where the agents of one start meet
    tensorboard/, dllogger/, wandb/            exported figures
    exported/wandb.json                        the last step that an experiment tracker was sent
    notified.json                              when somebody was last told of what (`notify`)
    export/                                    exported weights
    evaluations/step-00000100/<what>-<hash>/   evaluation.json and its manifest: the scores of a checkpoint
    evaluating/step-00000100/                  a checkpoint that is held until it is evaluated
    report.html                                the page of the run in one file, written when it ends

<store>/sweeps/<name>/<id>/
    sweep.json                                 the runs of a sweep, how they stand and their figures
    report.html                                its table and plots in one file
    logs/<id>.log                              what `trainshed run` wrote of each run on this machine

Names are relative POSIX strings. They serve a `Path` (`folder / name`), a store (`store.read(name)`) and a script
(`f"{run}/{name}"`). What is inside a file is known where its type is: `data/tokens/token_source.py`,
`observe/events.py`, `checkpoints/native/folder.py`, `launch/job.py`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import orjson

from trainshed.errors import CorruptData

RECIPE_FILE = "recipe.yaml"
CLUSTER_FILE = "cluster.yaml"
PREPARED_FILE = "prepared.json"
LOCK_FILE = "running.json"

ATTEMPTS = "attempts"
PLANS = "plans"
EVENTS = "events"
LOGS = "logs"
HEALTH = "health"
IMAGE_CHECKS = f"{HEALTH}/image.json"
PROFILE = "profile"
CHECKPOINTS = "checkpoints"
ANSWERS = "answers"
MEGATRON_CHECKPOINTS = "checkpoints-megatron"
"""Apart from our own, whose names they share."""
ANSWERS_TOKENIZER = f"{ANSWERS}/tokenizer.json"
ENGINE = "engine"
ENGINE_RUN_FILE = f"{ENGINE}/run.json"
STARTS = "starts"
TENSORBOARD = "tensorboard"
DLLOGGER = "dllogger"
WANDB = "wandb"
EXPORTED = "exported"
NOTIFIED_FILE = "notified.json"
EXPORT = "export"
EVALUATIONS = "evaluations"
EVALUATING = "evaluating"
REPORT = "report.html"
SWEEP_FILE = "sweep.json"

WITHOUT_REFERENCES = frozenset(
    {
        *(ATTEMPTS, EVENTS, LOGS, HEALTH, PROFILE, CHECKPOINTS, ANSWERS, MEGATRON_CHECKPOINTS, STARTS, TENSORBOARD),
        *(DLLOGGER, WANDB, EXPORTED, EVALUATIONS, EVALUATING),
    }
)
"""Folders in which no file names an artefact that the run needs."""

_ATTEMPT = re.compile(r"attempt-(\d{4,})")
_STEP = re.compile(r"step-(\d{8,})")


def run_address(store: str, name: str, id: str) -> str:
    """Return the folder of a run in a store, as a text."""
    return f"{store}/runs/{name}/{id}"


def run_path(store: Path, name: str, id: str) -> Path:
    """Return the folder of a run in a store on a disk."""
    return store / "runs" / name / id


def sweep_address(store: str, name: str, id: str) -> str:
    """Return the folder of a sweep in a store, as a text."""
    return f"{store}/sweeps/{name}/{id}"


def sweeps_in(store: Path) -> list[Path]:
    """Return the folders of the sweeps in a store on a disk."""
    return sorted(file.parent for file in (store / "sweeps").glob(f"*/*/{SWEEP_FILE}"))


def sweep_log(id: str) -> str:
    """Return the file with what `trainshed run` wrote of a run, by the run's id."""
    return f"{LOGS}/{id}.log"


def store_of(run: Path) -> Path:
    """Return the store that a run's folder is in."""
    return run.absolute().parents[2]


def store_address(run: str) -> str:
    """Return the store that a run's folder is in, as a text."""
    return posixpath.dirname(posixpath.dirname(posixpath.dirname(run)))


def artefacts_of(store: Path) -> Path:
    """Return the folder of a store's artefacts, which runs share."""
    return store / "artefacts"


def runs_in(store: Path, pattern: str = "*/*") -> list[Path]:
    """Return the folders below `runs` that match a pattern of name and id."""
    return sorted((store / "runs").glob(pattern))


def is_run(folder: Path) -> bool:
    """Whether a folder is a run's: it was started here, or it has attempts, checkpoints or events."""
    parts = (RECIPE_FILE, ATTEMPTS, CHECKPOINTS, MEGATRON_CHECKPOINTS, EVENTS)
    return any((folder / part).exists() for part in parts)


def read_prepared(data: bytes, where: str | Path) -> dict[str, Any]:
    """Read the bytes of `prepared.json`, or say that they are damaged."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        body = None
    tokens = body.get("data") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(tokens, dict) or not isinstance(tokens.get("sources"), list):
        raise CorruptData(
            "this file is damaged: it does not say which tokens the run began with",
            where=str(where),
            hint="put back a copy of it; without one delete it, and `trainshed run RECIPE` writes it by what the "
            "recipe's data is now",
        )
    return body


def attempt_name(attempt: int) -> str:
    """Return `attempt-0001`."""
    return f"attempt-{attempt:04d}"


def attempt_number(name: str) -> int | None:
    """Return the attempt that a folder's name says; None where it says none."""
    match = _ATTEMPT.fullmatch(name)
    return int(match[1]) if match else None


def rank_name(rank: int) -> str:
    """Return `rank-00003`."""
    return f"rank-{rank:05d}"


def node_name(node: int) -> str:
    """Return `node-00001`."""
    return f"node-{node:05d}"


def step_name(step: int) -> str:
    """Return `step-00000100`."""
    return f"step-{step:08d}"


def step_number(name: str) -> int | None:
    """Return the step that a checkpoint folder's name says; None where it says none."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def answers_file(step: int) -> str:
    """Return the file with the answers after a step."""
    return f"{ANSWERS}/{step_name(step)}.json"


def evaluations_folder(step: int) -> str:
    """Return the folder with the scores of the checkpoint of a step."""
    return f"{EVALUATIONS}/{step_name(step)}"


def held_checkpoint(step: int) -> str:
    """Return where a checkpoint is held until it is evaluated."""
    return f"{EVALUATING}/{step_name(step)}"


def plan_file(attempt: int) -> str:
    """Return the file with the layout of an attempt."""
    return f"{PLANS}/{attempt_name(attempt)}.json"


def attempt_folder(part: str, attempt: int) -> str:
    """Return the folder of an attempt in `events`, `logs`, `health` or `profile`."""
    return f"{part}/{attempt_name(attempt)}"


def rank_log(attempt: int, rank: int) -> str:
    """Return the log of a rank."""
    return f"{attempt_folder(LOGS, attempt)}/{rank_name(rank)}.log"


def preflight_folder(attempt: int) -> str:
    """Return the folder in which the checks before an attempt are kept."""
    return f"{attempt_folder(HEALTH, attempt)}/preflight"
