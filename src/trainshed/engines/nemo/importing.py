"""A NeMo file read as a recipe: 24.07's Hydra file (`llama3-70b-fp8.yaml`), or a script for Megatron-Bridge (26.06).

What a script sets is found in its text: nothing of it is run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from trainshed.engines.importing import ConfigImport, ImportedConfig, recipe_name
from trainshed.engines.nemo.bridge_keys import BRIDGE_KEYS, BRIDGE_TABLE
from trainshed.engines.nemo.hydra_data import note_index
from trainshed.engines.nemo.hydra_keys import HYDRA_KEYS, HYDRA_PLACES, HYDRA_TABLE
from trainshed.engines.nemo.hydra_model import note_differences
from trainshed.engines.nemo.launch import BRIDGE_RELEASE, HYDRA_RELEASE, NEMO_IMAGES
from trainshed.errors import InputError
from trainshed.recipe.yaml_io import parse_yaml

_TIME_LIMIT = re.compile(r"^(?:(\d+)-)?(\d+):(\d+):\d+$")
"""Slurm's `[days-]hours:minutes:seconds`."""


def read_nemo(text: str, name: str) -> ImportedConfig:
    """Read NeMo's YAML; errors call the file `name`."""
    config = ConfigImport.from_yaml(parse_yaml(text, name), "nemo", name)
    config.set_recipe("name", recipe_name(str(config.get("run.name") or config.get("name") or "imported"), "run"))
    config.note_mapped(f"name: {config.recipe['name']}", "run.name")
    _read_cluster(config)
    HYDRA_TABLE.read(config)
    HYDRA_PLACES.read(config)
    config.set_recipe("engine.name", "nemo")
    config.set_recipe("engine.version", HYDRA_RELEASE)
    note_differences(config)
    note_index(config)
    config.keep_rest(HYDRA_KEYS)
    return config.imported()


def _read_cluster(config: ConfigImport) -> None:
    config.cluster["image"] = NEMO_IMAGES[HYDRA_RELEASE]
    limit = _TIME_LIMIT.match(str(config.get("run.time_limit", "")))
    if limit:
        days, hours, minutes = (int(part or 0) for part in limit.groups())
        config.set_cluster("run.time_limit", "limits.hours", 24.0 * days + hours + round(minutes / 60, 3))


def read_bridge(text: str, name: str) -> ImportedConfig:
    """Read a script that builds a ConfigContainer as ours do; errors call it `name`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise InputError(
            f"is not Python: {error.msg}", where=f"{name}:{error.lineno}", hint="give the script as it is run"
        ) from None
    nodes = dict(_assigned_values(tree))
    config = ConfigImport(
        {key: _value(node) for key, node in nodes.items()},
        {key: f"{key} = {ast.unparse(node)}" for key, node in nodes.items()},
        kind="nemo",
        name=name,
        where=lambda key: f"{name}:{nodes[key].lineno} ({key})" if key in nodes else f"{name} ({key})",
    )
    if "train.train_iters" not in config:
        raise InputError(
            "sets no TrainingConfig(train_iters=…)", where=name, hint="give a script that builds its ConfigContainer"
        )
    config.set_recipe("name", recipe_name(name.rpartition(".")[0] or name, "run"))
    config.cluster["image"] = NEMO_IMAGES[BRIDGE_RELEASE]
    BRIDGE_TABLE.read(config)
    config.set_recipe("engine.name", "nemo")
    config.set_recipe("engine.version", BRIDGE_RELEASE)
    config.keep_rest(BRIDGE_KEYS)
    return config.imported()


def _assigned_values(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield every field that the script sets, `section.field`, in its order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield ast.unparse(node.targets[0]).removeprefix("config."), node.value
        elif isinstance(node, ast.Call):
            yield from _called_values(node)


def _called_values(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    function = ast.unparse(call.func)
    if function == "AutoBridge.from_hf_pretrained" and call.args:
        yield "from_hf_pretrained", call.args[0]
    elif function == "GPTModelProvider":
        yield from ((f"model.{field.arg}", field.value) for field in call.keywords)
    elif function == "ConfigContainer":
        for section in call.keywords:
            if not isinstance(section.value, ast.Call):
                continue
            if section.arg == "mixed_precision" and section.value.args:
                yield "mixed_precision", section.value.args[0]
            elif section.arg == "dataset":
                yield "dataset", section.value.func
            yield from ((f"{section.arg}.{field.arg}", field.value) for field in section.value.keywords)


def _value(node: ast.expr) -> Any:
    """Return a literal as it is, and anything else as its source text."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
