"""The recipe as it was understood: every key with its value, written back as YAML; and the id of its run."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from trainshed.recipe.schema import Recipe
from trainshed.recipe.section import Section
from trainshed.recipe.yaml_text import dump

# Keys whose change continues the same run. The length may grow; a skip list may grow while the run goes on;
# `stage` says where tokens are read, never which; `verdict` whether weights are taken, never which.
NOT_IN_ID = {"model": ("verdict",), "train": ("steps", "tokens", "epochs"), "data": ("skip", "stage")}
# Schedules whose `decay` says to which step of the run it goes: whoever makes the run longer is asked for it. That of
# wsd is a length, and stays as it is.
DECAY_NOT_IN_ID = ("cosine", "linear")


def to_yaml(recipe: Section) -> str:
    """Write a recipe (or cluster) in full, defaults included; loading it gives an equal one."""
    return dump(to_plain(recipe))


def to_plain(section: Section, *, defaults: bool = True) -> dict[str, Any]:
    """Return a section as plain values in the order of the schema.

    A key that is null by default and null here says nothing (`steps` beside `tokens`) and is left out; with
    `defaults=False` so is every key that has its default.
    """
    plain: dict[str, Any] = {}
    filled_in = section.filled_in()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        usual = field.get_default(call_default_factory=True, validated_data={})
        if value == usual and (value is None or not defaults) and not field.is_required():
            continue
        if not defaults and name in filled_in and filled_in[name] == value:
            continue
        plain[field.alias or name] = _plain(value, defaults)
    return plain


def _plain(value: Any, defaults: bool) -> Any:
    if isinstance(value, Section):
        return to_plain(value, defaults=defaults)
    if isinstance(value, tuple | list):
        return [_plain(item, defaults) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, defaults) for key, item in value.items()}
    return value


def run_id(recipe: Recipe) -> str:
    """Return 8 hex digits of what makes this training this training, so that a rerun finds its run.

    Model, tokenizer, data, train and seed count, except the length of the run and of its cosine or linear decay,
    `data.skip`, `data.stage` and `model.verdict`.
    Layout, engine, checkpoint, observe, resources and store do not: a run may go on elsewhere. Files behind
    an address do not either (their artefacts have hashes of their own): pin revisions to tell them apart.
    """
    canonical = json.dumps(identity(recipe), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def identity(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that `run_id` is made of, with their values."""
    # Without defaults, so that a key which a later version adds does not rename the runs of today. In
    # exchange no default of these sections may ever change.
    plain = to_plain(recipe, defaults=False)
    if recipe.train.schedule.name in DECAY_NOT_IN_ID:
        plain["train"]["schedule"].pop("decay", None)
    said = {key: plain.get(key) for key in ("model", "tokenizer", "data", "train", "seed")}
    for section, keys in NOT_IN_ID.items():
        said[section] = {key: value for key, value in plain[section].items() if key not in keys}
    return said
