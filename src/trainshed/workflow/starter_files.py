"""A first recipe or cluster file from a few answers: `trainshed init` writes it. What it leaves out has its default."""

from __future__ import annotations

import re
from pathlib import Path

from trainshed.catalog import model_entry
from trainshed.catalog.machines import find_machine
from trainshed.data.recipe_keys import flags_to_recipe_keys
from trainshed.data.text.formats import refused_file
from trainshed.errors import InputError
from trainshed.recipe import parse_recipe
from trainshed.recipe.cluster.load import parse_cluster
from trainshed.recipe.cluster.schema import CPU_MACHINE, is_shared_path
from trainshed.recipe.schema import MAX_NAME_LENGTH
from trainshed.recipe.yaml_io import dump_yaml

TARGETS = ("slurm", "kubernetes", "ray", "local")
_SMALL_PARAMETERS = 10**7
"""Below it a model is one to try things with: few tokens a step, fp32, on any CPU."""
_LEARNING_RATES = ((10**9, 6e-4), (4 * 10**9, 3e-4), (10**12, 1.5e-4))
"""By the number of weights: about those of GPT-3, table 2.1 (arXiv 2005.14165)."""
_CONTINUED_LEARNING_RATE = 3e-5
"""Of weights that are there already: more unlearns what they know. That of recipes/eks-llama2-7b-cpt.yaml."""
_SEQUENCE_LENGTH, _BATCH_TOKENS, _VALIDATION_SHARE = 4096, 4 * 2**20, 0.01
_HUB_SOURCE = re.compile(r"hf://[\w.-]+/[\w.-]+")


def starter_recipe(name: str, model: str, data: str, length: str) -> str:
    """Return a recipe that pretrains a model on text.

    `model` is a preset (fresh weights) or the address of weights (training goes on from them), `data` the address of
    JSONL or parquet files, `length` a number of steps (1000) or of tokens (20B). Raises what loading it would raise.
    """
    if (refused := refused_file(data)) is not None:
        what, hint = refused
        raise InputError(f"`{data}`: {what}", where="--data", hint=flags_to_recipe_keys(hint))
    key = "steps" if length.strip().isdecimal() else "tokens"
    values: dict[str, object] = {"trainshed": 1, "name": _as_name(name)}
    if "/" in model or Path(model).is_dir():
        values |= {"model": {"from": model}, "tokenizer": model}
        parameters, positions = _SMALL_PARAMETERS, _SEQUENCE_LENGTH
        rate = _CONTINUED_LEARNING_RATE
    else:
        entry = model_entry(model)
        source = _HUB_SOURCE.match(entry.source)
        parameters, positions = entry.parameters, entry.config.max_positions
        fresh = next(fresh for limit, fresh in _LEARNING_RATES if parameters <= limit)
        rate = 1e-3 if parameters < _SMALL_PARAMETERS else fresh
        values["model"] = {"preset": model, "init": "random"}
        values["tokenizer"] = source[0] if source else {"train": {"vocab_size": min(entry.config.vocab_size, 8192)}}
    small = parameters < _SMALL_PARAMETERS
    sequence_length = min(256 if small else _SEQUENCE_LENGTH, positions)
    steps = int(length) if key == "steps" else None
    values["data"] = {
        "sequence_length": sequence_length,
        "train": [{"path": data}],
        "split": {"train": 1 - _VALIDATION_SHARE, "validation": _VALIDATION_SHARE},
        "validation": {"every": 100, "batches": 8},
    }
    values["train"] = {
        key: steps if steps is not None else length.strip(),
        "global_batch": 8 if small else _BATCH_TOKENS // sequence_length,
        "precision": "fp32" if small else "bf16",
        "optimizer": {"lr": rate},
        "schedule": {"name": "cosine", "warmup": 0 if steps is not None and steps < 100 else 50},
    }
    values["layout"] = "auto"
    values["checkpoint"] = {"every": 100}
    head = f"# {values['name']}: written by `trainshed init`; docs/recipe-reference.md has every key.\n"
    text = head + dump_yaml(values)
    parse_recipe(text, source="the new recipe")
    return text


def starter_cluster(name: str, target: str, machine: str, store: str, nodes: int, address: str | None = None) -> str:
    """Return a cluster file; raises what loading it would raise.

    `machine` is a name in the catalog, an instance type or `cpu`, `store` where artefacts and runs are kept, `nodes`
    how many there are at most, `address` where Ray's head takes jobs.
    """
    if target not in TARGETS:
        raise InputError(f"there is no target `{target}`", where="--target", hint=f"write one of {', '.join(TARGETS)}")
    if machine != CPU_MACHINE:
        find_machine(machine)
    if not is_shared_path(store, target):
        raise InputError(
            f"{store} is not a path that every node mounts",
            where="--store",
            hint="write an absolute path on a shared disk; `checkpoint.to` of a recipe may be a bucket",
        )
    values: dict[str, object] = {"trainshed": 1, "name": _as_name(name), "target": target}
    if target != "local" or machine != CPU_MACHINE:
        values["machine"] = machine
    if target != "local":
        values["nodes"] = {"default": 1, "max": nodes}
    values["store"] = store
    if address is not None:
        values["ray"] = {"address": address}
    notes = {
        "slurm": "slurm: {partition: …, venv: …} says where jobs go and what they run in.",
        "kubernetes": "image: …@sha256:… is what jobs run in, volumes: what they mount (the store among it).",
        "ray": "jobs run in the environment of its workers.",
        "local": "this machine.",
    }
    text = (
        f"# {values['name']}: written by `trainshed init cluster`; docs/cluster-reference.md has every key.\n"
        f"# {notes[target]}\n{dump_yaml(values)}"
    )
    parse_cluster(text, source="the new cluster file")
    return text


def _as_name(text: str) -> str:
    """Return a text as recipes and clusters may be called: small letters, digits and hyphens."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-").lstrip("0123456789-")[:MAX_NAME_LENGTH].rstrip("-")
    if not name:
        raise InputError(f"`{text}` is not a name", where="--name", hint="write letters, digits and hyphens")
    return name
