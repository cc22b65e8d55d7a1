"""Starts a torchtune recipe in this process: `torchrun … start_torchtune.py NAME CONFIG BASE OUTPUT RESUME OPTIONS`.

`tune run` would start torchrun itself, and without a rendezvous endpoint as if there were one node; here the ranks
are already set. Three things are only known when the job starts: which files hold the weights, whether there is a
checkpoint to go on from (`auto`: if there is; `must`: fail without; `fresh`: fail with one), and how many steps one
pass over the data has. torchtune counts a run in passes: `steps=200` or `epochs=1.5` says how long it is, and
its passes and the steps of each are set so that it has exactly that length. `version=0.6.1` is the torchtune that the
configuration is for. `profile_ranks=0,3` are the ranks that are profiled; torchtune itself profiles all of them.

torchtune goes on from the newest folder of weights, whatever state it finds for it: 0.6 keeps one state for all of them
(`recipe_state/`), its last version one in each, and neither writes one with the last weights of a run. So this program
looks for weights and state that belong together, and sets newer weights without a state aside: a save was interrupted
there. What has ended is noted in `finished.json`, and is not trained again.

This file is copied into the job as it is and runs in torchtune's image: it uses the standard library and torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

RECIPE_CLASSES = {
    "full_finetune_distributed": "FullFinetuneRecipeDistributed",
    "lora_finetune_distributed": "LoRAFinetuneRecipeDistributed",
}
CHECKPOINT = re.compile(r"^(epoch|step)_(\d+)$")
STATE = "recipe_state.pt"
FINISHED = "finished.json"
SET_ASIDE = "unfinished_"


def saved_weights(output: Path) -> list[Path]:
    """Return the folders of weights, the one that torchtune would take first: epochs before steps, newest first."""
    found = []
    for folder in output.iterdir() if output.is_dir() else ():
        match = CHECKPOINT.match(folder.name)
        if match and folder.is_dir():
            found.append((match[1] == "epoch", int(match[2]), folder))
    return [folder for _, _, folder in sorted(found, reverse=True)]


def are_whole(weights: Path) -> bool:
    """Tell whether all files of some weights are there and as long as they say; another rank may move them away."""
    try:
        adapter, index = weights / "adapter_config.json", weights / "model.safetensors.index.json"
        if index.is_file():
            files = {weights / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            files = {weights / "adapter_model.safetensors", weights / "adapter_model.pt"}
            if not adapter.is_file():
                return False
        return all(_is_whole(file) for file in files)
    except (OSError, ValueError, KeyError):
        return False


def _is_whole(file: Path) -> bool:
    if file.suffix == ".pt":
        return zipfile.is_zipfile(file)
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        entries = json.loads(content.read(length))
    ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    return file.stat().st_size == 8 + length + max(ends, default=0)


def checkpoint_to_go_on_from(output: Path) -> Path | None:
    """Return the newest weights that have the state of the run beside them, None where there are none."""
    shared = output / "recipe_state" / STATE
    if shared.is_file():
        if not zipfile.is_zipfile(shared):
            raise SystemExit(f"{shared} was not written to its end: delete {output} to begin anew")
        import torch

        epochs = int(torch.load(shared, map_location="cpu", mmap=True, weights_only=True)["epochs_run"])
        weights = output / f"epoch_{epochs - 1}"
        if not are_whole(weights):
            raise SystemExit(f"{shared} is the state after {weights.name}, which is not there whole")
        return weights
    return next((folder for folder in saved_weights(output) if are_whole(folder) and zipped_state(folder)), None)


def zipped_state(weights: Path) -> bool:
    """Tell whether the state beside some weights was written to its end."""
    return zipfile.is_zipfile(weights / STATE)


def set_aside(output: Path, checkpoint: Path | None) -> None:
    """Move weights that torchtune would take before those that it is to go on from."""
    for folder in saved_weights(output):
        if folder == checkpoint:
            return
        number, aside = 0, output / f"{SET_ASIDE}{folder.name}"
        while aside.exists():
            number, aside = number + 1, output / f"{SET_ASIDE}{folder.name}_{number + 1}"
        sys.stderr.write(f"{folder} has no state of the run with it: set aside as {aside.name}\n")
        folder.rename(aside)


def has_finished(output: Path, length: str) -> bool:
    """Tell whether a run of this length has ended; raise for one that is to be longer than it was."""
    file = output / FINISHED
    if not file.is_file():
        return False
    ended = json.loads(file.read_text())["length"]
    if ended == length:
        return True
    raise SystemExit(
        f"the run in {output} has ended ({ended}), and torchtune writes no state with its last weights: a longer run "
        f"({length}) begins under another id, from {output} as its model.from"
    )


def overrides(recipe: str, base: Path, checkpoint: Path | None, version: str) -> list[str]:
    """Return the keys that are known only now."""
    # An adapter's checkpoint holds no weights of the model: those are read from the base again.
    weights = base if checkpoint is None or recipe.startswith("lora") else checkpoint
    files = sorted(file.name for file in weights.glob("*.safetensors") if not file.name.startswith("adapter_model"))
    if not files:
        raise SystemExit(f"{weights} holds no .safetensors files")
    if checkpoint is not None and weights == checkpoint and version.startswith("0.6."):
        files = [f"{checkpoint.name}/{name}" for name in files]  # it looks for them beside its folders of weights
    return [
        f"checkpointer.checkpoint_files=[{','.join(files)}]",
        f"resume_from_checkpoint={checkpoint is not None}",
    ]


def choose_checkpoint(output: Path, resume: str, rank: int) -> Path | None:
    """Return what to go on from, as `checkpoint.resume` allows it; rank 0 sets aside what must not be read."""
    checkpoint = checkpoint_to_go_on_from(output)
    if checkpoint is None and resume == "must":
        raise SystemExit(f"checkpoint.resume is must, and {output} holds no checkpoint to go on from")
    if resume == "fresh" and (there := checkpoint or next(iter(saved_weights(output)), None)) is not None:
        raise SystemExit(f"checkpoint.resume is fresh, and {there} is there")
    if rank == 0:
        # Before this rank joins the others: none of them looks for weights earlier.
        set_aside(output, checkpoint)
    return checkpoint


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


def recipe_script(recipe: str, version: str) -> Path:
    """Return the script of a recipe in the installed torchtune, which must be the one that was rendered for."""
    spec = importlib.util.find_spec("torchtune")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "torchtune is not installed here: `trainshed image build --engine torchtune` makes an image or, with "
            "--venv, an environment that has it"
        )
    try:
        installed = importlib.metadata.version("torchtune")
    except importlib.metadata.PackageNotFoundError:
        installed = ""
    # A source that nobody released calls itself 0.0.0, or is found on the path alone.
    release = ".".join(installed.split(".")[:2])
    if release not in ("", "0.0", ".".join(version.split(".")[:2])):
        raise SystemExit(
            f"torchtune {installed} is installed here, and the job is for {version}: write "
            f'engine: {{name: torchtune, version: "{installed}"}}, or install the other'
        )
    # Recipes lie beside the package and are not modules: importing them is refused.
    return Path(spec.origin).parent.parent / "recipes" / f"{recipe}.py"


def main(arguments: list[str]) -> None:
    """Run a recipe of the installed torchtune."""
    recipe, config, base, place, resume, *rest = arguments
    options = dict(option.split("=", 1) for option in rest)
    kind = "steps" if "steps" in options else "epochs"
    output, rank, length = Path(place), int(os.environ.get("RANK", "0")), f"{kind}={options[kind]}"
    script = recipe_script(recipe, options["version"])
    if has_finished(output, length):
        sys.stderr.write(f"this run has ended already ({length}): nothing is left to do\n")
        return
    checkpoint = choose_checkpoint(output, resume, rank)
    keys = overrides(recipe, Path(base), checkpoint, options["version"])
    if "profile_ranks" in options:
        keys += set_profiled_ranks(options["profile_ranks"])
    sys.argv = [str(script), "--config", config, *keys]
    spec = importlib.util.spec_from_file_location("torchtune_recipe", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # Whole passes are torchtune's own unit.
    if kind == "steps" or not float(options["epochs"]).is_integer():
        set_length(getattr(module, RECIPE_CLASSES[recipe]), length)
    try:
        module.recipe_main()
    except SystemExit as ending:  # what reads the configuration ends the process when the recipe returns
        if ending.code:
            raise
    if rank == 0:
        newest = next(iter(saved_weights(output)), None)
        text = json.dumps({"length": length, "checkpoint": newest.name if newest is not None else None})
        new = output / f".{FINISHED}"
        new.write_text(text + "\n")
        new.rename(output / FINISHED)


if __name__ == "__main__":
    main(sys.argv[1:])
