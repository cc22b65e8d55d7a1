"""Build what Megatron-LM's ranks would otherwise build while GPUs wait: the cached order of the samples.

A job file: it runs in the engine's image, before GPUs are asked for, and needs megatron.core and nothing of
Trainshed but the job file `prove_image.py`. It makes the same datasets as pretrain_gpt.py with the same settings, so
that training only reads.

    python3 build_index.py index.json
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any


def main(file: str) -> None:
    """Build the index that a settings file asks for."""
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    check_start(asked)
    if asked["data"] is None:
        return
    blends = json.loads(Path(asked["data"]).read_text(encoding="utf-8"))
    if asked["data_args"] is not None:
        write_data_args(blends["train"], Path(asked["data_args"]))
    sys.path.insert(0, str(Path(asked["program"]).parent))
    build(asked, blends)


def check_start(asked: dict[str, Any]) -> None:
    """Stop before GPUs are asked for where the program is missing, or checkpoints are not as `resume` wants them."""
    if not Path(asked["program"]).is_file():
        sys.exit(f"no {asked['program']} in this image: write the path of its pretrain_gpt.py")
    latest = Path(asked["checkpoints"]) / "latest_checkpointed_iteration.txt"
    if asked["resume"] == "must" and not latest.is_file():
        sys.exit(f"checkpoint.resume is must, and there is no checkpoint in {latest.parent}")
    if asked["resume"] == "fresh" and latest.is_file():
        sys.exit(f"checkpoint.resume is fresh, and there is a checkpoint in {latest.parent}")


def write_data_args(blend: list[Any], file: Path) -> None:
    """Write a blend as --data-args-path wants it: words with blanks between them."""
    words = [str(each) for each in blend]
    broken = [word for word in words if len(word.split()) != 1]
    if broken:
        sys.exit(f"Megatron cannot read a path with a blank in it: {broken[0]!r}")
    partial = file.with_suffix(".partial")
    partial.write_text("\n".join(words) + "\n", encoding="utf-8")
    os.replace(partial, file)


def build(asked: dict[str, Any], blends: dict[str, Any]) -> None:
    """Build the datasets as `train_valid_test_datasets_provider` of pretrain_gpt.py does."""
    import torch
    from prove_image import hide_what_needs_a_driver  # pyrefly: ignore - it lies beside this file in a job

    hide_what_needs_a_driver()
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        from megatron.core.datasets.utils import compile_helpers

        compile_helpers()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    shared_out = asked["data_args"] is not None
    wanted: dict[str, Any] = {
        **asked["config"],
        "blend": get_blend_from_list([str(each) for each in blends["train"]]) if shared_out else None,
        "blend_per_split": None if shared_out else [get_blend_from_list(_words(blends[each])) for each in _SPLITS],
        "tokenizer": tokenizer(asked["tokenizer"]),
    }
    has = {field.name for field in dataclasses.fields(GPTDatasetConfig)}
    config = GPTDatasetConfig(**{name: value for name, value in wanted.items() if name in has})
    with tempfile.TemporaryDirectory() as folder:
        # A blend asks for a process group in 0.16, though it is alone.
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        BlendedMegatronDatasetBuilder(GPTDataset, asked["samples"], lambda: True, config).build()
        torch.distributed.destroy_process_group()


_SPLITS = ("train", "valid", "test")


def _words(blend: list[Any] | str | None) -> list[str] | None:
    if blend is None:
        return None
    return blend.split() if isinstance(blend, str) else [str(each) for each in blend]


def tokenizer(arguments: dict[str, Any]) -> Any:
    """Return the tokenizer of the run: its name is a part of what the cache is found by."""
    for module in _TOKENIZER_MODULES:
        try:
            build_tokenizer = importlib.import_module(module).build_tokenizer
        except ModuleNotFoundError as error:
            if not module.startswith(str(error.name)):
                raise
        else:
            # Older ones ask whether they are the rank that says what it does.
            return build_tokenizer(Namespace(rank=0, **arguments))
    sys.exit(f"this image's Megatron-LM has no tokenizers: none of {', '.join(_TOKENIZER_MODULES)}")


# Since 0.17; of 0.15 and 0.16; before.
_TOKENIZER_MODULES = (
    "megatron.core.tokenizers.utils.build_tokenizer",
    "megatron.core.tokenizers.text.utils.build_tokenizer",
    "megatron.training.tokenizer",
)


if __name__ == "__main__":
    main(sys.argv[1])
