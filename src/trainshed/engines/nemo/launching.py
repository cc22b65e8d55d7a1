"""NeMo by its release: 24.07 takes a Hydra file, 26.06 a Megatron-Bridge script."""

from __future__ import annotations

import re
from dataclasses import replace

from trainshed.engines.foreign import EngineLaunch, EngineTask
from trainshed.engines.nemo.bridge import bridge_launch
from trainshed.engines.nemo.hydra import hydra_launch
from trainshed.errors import RecipeError

HYDRA = "24.07"
BRIDGE = "26.06"
IMAGES = {HYDRA: "nvcr.io/nvidia/nemo:24.07", BRIDGE: "nvcr.io/nvidia/nemo:26.06"}
_ENTRIES = {HYDRA: hydra_launch, BRIDGE: bridge_launch}
# NVIDIA's releases are a year and a month; images that others build on them keep the tag (nemo_workload:24.07).
_TAG = re.compile(r"nemo[^/]*:(\d\d\.\d\d)\b")


def nemo_launch(task: EngineTask) -> EngineLaunch:
    """Return how NeMo is started for a task; `engine.version` says which release."""
    recipe = task.recipe
    image = recipe.engine.image or task.place.image
    tag = _TAG.search(image or "")
    version = recipe.engine.version or (tag[1] if tag else BRIDGE)
    if version not in _ENTRIES:
        raise RecipeError(
            f"NeMo {version} is not known here",
            where=recipe.where("engine.version"),
            hint=f'version: "{HYDRA}" (Hydra) or "{BRIDGE}" (Megatron-Bridge)',
        )
    if tag and tag[1] != version:
        raise RecipeError(
            f"the image {image} is release {tag[1]}, and engine.version is {version}",
            where=recipe.where("engine.version"),
            hint=f"write the same release in both, for example {IMAGES[version]}",
        )
    launch = _ENTRIES[version](task)
    notes = list(launch.notes)
    if recipe.engine.version is None:
        why = "the release of the image" if tag else "the newest that is known here"
        notes.insert(0, f"NeMo {version} is meant, {why}; engine.version says another")
    if image is None:
        notes.append(f"no image is named; {IMAGES[version]} has this release")
    return replace(launch, notes=tuple(notes))
