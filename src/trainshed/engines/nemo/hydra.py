"""Starting NeMo 24.07: its Hydra file, and the overrides that say where things lie."""

from __future__ import annotations

import re
from typing import Any

from trainshed.engines.config_tree import to_yaml
from trainshed.engines.engine_arguments import argument_problems, shown
from trainshed.engines.foreign import EngineLaunch, EngineTask, Wanted
from trainshed.engines.nemo.rules import hydra_problems
from trainshed.engines.nemo.settings import KNOWN, fixed_settings, place_settings, task_settings
from trainshed.recipe.messages import as_recipe_error

PROGRAM = "/opt/NeMo/examples/nlp/language_modeling/megatron_gpt_pretraining.py"
FILE = "nemo.yaml"
_ENVIRONMENT = {
    # The seed's: layer norms leave SMs to the communication that runs beside them.
    "NVTE_FWD_LAYERNORM_SM_MARGIN": "8",
    "NVTE_BWD_LAYERNORM_SM_MARGIN": "8",
    "OMP_NUM_THREADS": "12",
}
_PLAIN = re.compile(r"^[A-Za-z0-9_./:-]+$")


def hydra_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo 24.07 is started for a task."""
    recipe = task.recipe
    problems = list(hydra_problems(task))
    if problems:
        raise as_recipe_error(problems, recipe.places)
    config = hydra_config(task)
    overrides = [f"++{setting.key}={_hydra_value(setting.value)}" for setting in place_settings(task)]
    wanted: tuple[Wanted, ...] = ("tokenizer",) if recipe.data.synthetic else ("data-prefix", "tokenizer")
    late = {} if recipe.data.synthetic else {"++model.data.data_prefix=": f"{task.place.engine}/data_prefix.txt"}
    heading = f"NeMo 24.07, written by Trainshed for {recipe.name}; overrides on the command line say where things lie."
    return EngineLaunch(
        program=PROGRAM,
        arguments=(f"--config-path={task.place.job}", f"--config-name={FILE}", *overrides),
        files={FILE: to_yaml(config, heading)},
        environment=_ENVIRONMENT,
        wanted=wanted,
        late_arguments=late,
        notes=tuple(_notes(task)),
    )


def hydra_config(task: EngineTask) -> dict[str, Any]:
    """Return the whole configuration but the places, by dotted key."""
    recipe = task.recipe
    settings = task_settings(task)
    decided = {setting.key: setting for setting in (*place_settings(task), *settings)}
    wrong = list(argument_problems(recipe.engine.args, KNOWN, decided))
    if wrong:
        raise as_recipe_error(wrong, recipe.places)
    own = {setting.key: setting.value for setting in settings}
    return own | fixed_settings() | {key: value for key, value in recipe.engine.args.items() if key not in decided}


def _hydra_value(value: Any) -> str:
    text = shown(value)
    return text if _PLAIN.match(text) else f"'{text}'"


def _notes(task: EngineTask) -> list[str]:
    notes = [
        "NeMo 24.07 orders samples its own way (megatron-core's index, one seed): the order of `data` does not hold",
        "its first rank builds the sample index when training starts, while the others wait; it is kept in the run",
        "the embedding has as many rows as the tokenizer has tokens, padded to a multiple of 128 · tp",
    ]
    if task.recipe.checkpoint.resume == "fresh":
        notes.append("NeMo does not refuse to start where checkpoints already are: `resume: fresh` starts beside them")
    if task.recipe.observe.profile is not None:
        notes.append("NeMo marks the profiled steps; only a program started by `nsys profile` records them")
    return notes
