"""Starts a torchtune recipe in this process: `torchrun … start_torchtune.py NAME CONFIG BASE OUTPUT RESUME [OPTIONS]`.

`tune run` would start torchrun itself, and without a rendezvous endpoint as if there were one node; here the ranks
are already set. Three things are only known when the job starts: which files hold the weights, whether there is a
checkpoint to go on from (`auto`: if there is; `must`: fail without; `fresh`: fail with one), and how many steps one
pass over the data has. torchtune counts a run in passes: `steps=200` or `epochs=1.5` says how long it is, and
its passes and the steps of each are set so that it has exactly that length. `profile_ranks=0,3` are the ranks that are
profiled; torchtune itself profiles all of them.

This file is copied into the job as it is and runs in torchtune's image: it uses the standard library only.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

RECIPE_CLASSES = {
    "full_finetune_distributed": "FullFinetuneRecipeDistributed",
    "lora_finetune_distributed": "LoRAFinetuneRecipeDistributed",
}
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


def passes(steps: int, available: int) -> tuple[int, int]:
    """Return the passes and the steps of each that together are `steps`, where a pass has `available` steps."""
    epochs = -(-steps // available)
    while steps % epochs:
        epochs += 1
    return epochs, steps // epochs


def set_length(recipe_class: Any, length: str) -> None:
    """Make a recipe's runs as long as asked, whatever its data: it is counted where the recipe has loaded it."""
    kind, _, number = length.partition("=")
    setup_data = recipe_class._setup_data
    counted = []

    def setup_counted_data(self: Any, *arguments: Any, **options: Any) -> Any:
        loader = setup_data(self, *arguments, **options)
        if counted:  # the validation data, which is set up after the training data
            return loader
        counted.append(loader)
        available = len(loader) // self._gradient_accumulation_steps
        if not available:
            raise SystemExit("the data has less than one global batch: write a smaller train.global_batch")
        steps = int(number) if kind == "steps" else max(1, int(float(number) * available))
        self.total_epochs, self.max_steps_per_epoch = passes(steps, available)
        if self.rank == 0:
            steps_of_each = f"{self.max_steps_per_epoch} of the {available} steps that the data has"
            sys.stderr.write(f"{steps} steps: {self.total_epochs} passes of {steps_of_each}\n")
        return loader

    recipe_class._setup_data = setup_counted_data


def set_profiled_ranks(ranks: str) -> list[str]:
    """Switch the profiler off on all ranks but some; returns the keys that do it."""
    rank = int(os.environ.get("RANK", "0"))
    if rank not in map(int, ranks.split(",")):
        return ["profiler.enabled=False"]
    from torchtune.training import _profiler  # pyrefly: ignore

    # It ends a trace with a barrier of all ranks, which the others no longer come to; the rank is in its file names.
    _profiler.get_world_size_and_rank = lambda: (1, rank)
    return []


def main(arguments: list[str]) -> None:
    """Run a recipe of the installed torchtune."""
    recipe, config, base, output, resume, *options = arguments
    length = [option for option in options if not option.startswith("profile_ranks=")]
    profiled = [option.partition("=")[2] for option in options if option.startswith("profile_ranks=")]
    found = importlib.util.find_spec("torchtune")
    if found is None or found.origin is None:
        raise SystemExit("torchtune is not installed in this image")
    # Recipes lie beside the package and are no modules: importing them is refused.
    script = Path(found.origin).parent.parent / "recipes" / f"{recipe}.py"
    keys = overrides(recipe, Path(base), Path(output), resume)
    for ranks in profiled:
        keys += set_profiled_ranks(ranks)
    sys.argv = [str(script), "--config", config, *keys]
    if not length:
        runpy.run_path(str(script), run_name="__main__")
        return
    spec = importlib.util.spec_from_file_location("torchtune_recipe", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    set_length(getattr(module, RECIPE_CLASSES[recipe]), length[0])
    sys.exit(module.recipe_main())


if __name__ == "__main__":
    main(sys.argv[1:])
