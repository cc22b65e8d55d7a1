"""Starts a torchtune recipe in this process: `torchrun … start_torchtune.py RECIPE CONFIG BASE OUTPUT RESUME`.

`tune run` would start torchrun itself, and without a rendezvous endpoint as if there were one node; here the ranks
are already set. Two things are only known when the job starts: which files hold the weights, and whether there is a
checkpoint to go on from (`auto`: if there is; `must`: fail without; `fresh`: fail with one).

This file is copied into the job as it is and runs in torchtune's image: it uses the standard library only.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path

CHECKPOINT = re.compile(r"^(epoch|step)_(\d+)$")


def newest_checkpoint(output: Path) -> Path | None:
    """Return the checkpoint that torchtune would take: of epochs, else of steps, the one with the largest number."""
    found: dict[str, dict[int, Path]] = {"epoch": {}, "step": {}}
    for folder in output.iterdir() if output.is_dir() else ():
        match = CHECKPOINT.match(folder.name)
        if match and folder.is_dir() and any(folder.iterdir()):
            found[match[1]][int(match[2])] = folder
    newest = found["epoch"] or found["step"]
    return newest[max(newest)] if newest else None


def overrides(recipe: str, base: Path, output: Path, resume: str) -> list[str]:
    """Return the keys that are known only now."""
    checkpoint = newest_checkpoint(output)
    if checkpoint is None and resume == "must":
        raise SystemExit(f"checkpoint.resume is must, and {output} holds no checkpoint")
    if checkpoint is not None and resume == "fresh":
        raise SystemExit(f"checkpoint.resume is fresh, and {checkpoint} is there")
    if checkpoint is not None and not (checkpoint / "recipe_state.pt").is_file():
        raise SystemExit(f"{checkpoint} was not written to its end: delete it to go on from the one before")
    # An adapter's checkpoint holds no weights of the model: those are read from the base again.
    weights = base if checkpoint is None or recipe.startswith("lora") else checkpoint
    files = sorted(file.name for file in weights.glob("*.safetensors") if not file.name.startswith("adapter_model"))
    if not files:
        raise SystemExit(f"{weights} holds no .safetensors files")
    return [
        f"checkpointer.checkpoint_files=[{','.join(files)}]",
        f"resume_from_checkpoint={checkpoint is not None}",
    ]


def main(arguments: list[str]) -> None:
    """Run a recipe of the installed torchtune."""
    recipe, config, base, output, resume = arguments
    found = importlib.util.find_spec("torchtune")
    if found is None or found.origin is None:
        raise SystemExit("torchtune is not installed in this image")
    # Recipes lie beside the package and are no modules: importing them is refused.
    script = Path(found.origin).parent.parent / "recipes" / f"{recipe}.py"
    sys.argv = [str(script), "--config", config, *overrides(recipe, Path(base), Path(output), resume)]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
