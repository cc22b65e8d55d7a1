"""Which keys a schema knows, and the nearest known one to a key nobody reads."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainshed.recipe.places import KeyPath

ELEMENT = "*"
"""Stands for any list index, or any name in a mapping of free names."""

# What the same thing is called elsewhere (Megatron-LM, NeMo, torchtune, Hugging Face; in cluster files of NeMo-Run and
# SkyPilot), so that a person who moves here is told the key at once.
FOREIGN_NAMES = {
    "batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "micro_batch_size": "layout.micro_batch",
    "max_steps": "train.steps",
    "train_iters": "train.steps",
    "iterations": "train.steps",
    "learning_rate": "train.optimizer.lr",
    "clip_grad": "train.optimizer.clip",
    "grad_clip": "train.optimizer.clip",
    "max_grad_norm": "train.optimizer.clip",
    "warmup_steps": "train.schedule.warmup",
    "lr_scheduler": "train.schedule",
    "seq_length": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "dtype": "train.precision",
    "save_interval": "checkpoint.every",
    "eval_interval": "data.validation.every",
    "eval_iters": "data.validation.batches",
    "json_keys": "data.train.0.key",
    "rampup_batch_size": "train.batch_ramp",
    "tensor_model_parallel_size": "layout.tp",
    "tensor_parallel_dim": "layout.tp",
    "pipeline_model_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "expert_model_parallel_size": "layout.ep",
    "activation_checkpointing": "layout.recompute",
    "dataset": "data",
    "weights": "model.from",
    "trainer": "train",
    "parallelism": "layout",
    "env": "environment",
    "envs": "environment",
    "env_vars": "environment",
    "modules": "setup",
    "module": "setup",
    "prolog": "setup",
    "prologue": "setup",
    "setup_lines": "setup",
    "time": "limits.hours",
    "walltime": "limits.hours",
    "container_image": "image",
    "container_mounts": "volumes",
    "mounts": "volumes",
    "instance_type": "machine",
    "accelerators": "machine",
    "use_spot": "capacity.spot",
    "ssh": "slurm.login",
    "gres": "slurm.gpus",
    "backend": "target",
    "cloud": "target",
}


@dataclass(frozen=True)
class Key:
    """One key of a schema, with its field."""

    path: KeyPath
    field: FieldInfo
    sections: tuple[type[BaseModel], ...]


@cache
def known_keys(kind: type[BaseModel]) -> dict[KeyPath, Key]:
    """Return every key of a schema by path, list elements as `*`, in the order of the schema."""
    return {key.path: key for key in _walk(kind, ())}


def _walk(kind: type[BaseModel], path: KeyPath) -> Iterator[Key]:
    for name, field in kind.model_fields.items():
        here = (*path, field.alias or name)
        nested = list(_sections(field.annotation, ()))
        yield Key(here, field, tuple(section for _, section in nested))
        for steps, section in nested:
            yield from _walk(section, here + steps)


def _sections(annotation: Any, steps: KeyPath) -> Iterator[tuple[KeyPath, type[BaseModel]]]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _sections(get_args(annotation)[0], steps)
    elif origin in (Union, UnionType):
        for choice in get_args(annotation):
            yield from _sections(choice, steps)
    elif origin in (tuple, list):
        yield from _sections(get_args(annotation)[0], (*steps, ELEMENT))
    elif origin is dict:
        yield from _sections(get_args(annotation)[1], (*steps, ELEMENT))
    elif isinstance(annotation, type) and annotation is not NoneType and issubclass(annotation, BaseModel):
        yield steps, annotation


def find_key(kind: type[BaseModel], path: KeyPath) -> Key | None:
    """Return the key at a concrete path such as `("data", "train", 0, "path")`."""
    known = known_keys(kind)
    generic: KeyPath = ()
    for step in path:
        generic = next((option for option in ((*generic, step), (*generic, ELEMENT)) if _leads(option, known)), ())
        if not generic:
            return None
    return known.get(generic)


def _leads(path: KeyPath, known: dict[KeyPath, Key]) -> bool:
    return any(option[: len(path)] == path for option in known)


def siblings(kind: type[BaseModel], parent: KeyPath) -> list[str]:
    """Return the keys that may stand below a concrete path."""
    found: list[str] = []
    for path in known_keys(kind):
        if len(path) == len(parent) + 1 and all(
            ours in (theirs, ELEMENT) for ours, theirs in zip(path, parent, strict=False)
        ):
            found.append(str(path[-1]))
    return found


def nearest_key(kind: type[BaseModel], path: KeyPath) -> KeyPath | None:
    """Return the path of the known key that was probably meant."""
    name, parent = str(path[-1]), path[:-1]
    wanted = name.lower().replace("-", "_")
    here = siblings(kind, parent)
    everywhere = [known for known in known_keys(kind) if ELEMENT not in known or known[: len(parent)] == parent]
    close = difflib.get_close_matches(wanted, here, n=1, cutoff=0.8)
    if close:
        return (*parent, close[0])
    foreign = FOREIGN_NAMES.get(wanted)
    if foreign and find_key(kind, _steps(foreign)):
        return _steps(foreign)
    same = [known for known in everywhere if known[-1] == wanted]
    if same:
        return _first(same[0])
    close = difflib.get_close_matches(wanted, here, n=1, cutoff=0.6)
    if close:
        return (*parent, close[0])
    elsewhere = {str(known[-1]): known for known in reversed(everywhere)}
    far = difflib.get_close_matches(wanted, elsewhere, n=1, cutoff=0.8)
    return _first(elsewhere[far[0]]) if far else None


def _first(path: KeyPath) -> KeyPath:
    return tuple(0 if step == ELEMENT else step for step in path)


def _steps(dotted: str) -> KeyPath:
    return tuple(int(step) if step.isdigit() else step for step in dotted.split("."))
