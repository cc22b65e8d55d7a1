"""Run as a program, with megatron-core 0.16.1: the CPU stage, then the datasets as pretrain_gpt.py makes them.

    python mcore_datasets.py build_index.py index.json arguments.json

Prints the files of the index cache, with their times, after the stage and after the training's own datasets; and the
first samples of each split.
"""

from __future__ import annotations

import json
import runpy
import sys
import warnings
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")


def parser() -> ArgumentParser:
    """Megatron-LM's parser, as far as its data is concerned; defaults are those of arguments.py at core_v0.16.1."""
    built = ArgumentParser(allow_abbrev=False)
    for option in ("seed", "seq-length", "train-iters", "global-batch-size", "eval-interval", "eval-iters"):
        built.add_argument(f"--{option}", type=int)
    for option in ("per-split-data-args-path", "data-args-path", "data-cache-path", "split", "tokenizer-type"):
        built.add_argument(f"--{option}")
    built.add_argument("--tokenizer-model")
    built.add_argument("--tokenizer-hf-use-fast", action="store_true")
    return built


def datasets(args: Namespace) -> Any:
    """`core_gpt_dataset_config_from_args` and `train_valid_test_datasets_provider` of pretrain_gpt.py."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer

    blend, per_split = None, None
    if args.data_args_path is not None:
        blend = get_blend_from_list(Path(args.data_args_path).read_text().split())
    else:
        listed = json.loads(Path(args.per_split_data_args_path).read_text())
        per_split = [get_blend_from_list(listed[split]) for split in ("train", "valid", "test")]
    tokenizer = build_tokenizer(
        Namespace(
            tokenizer_type=args.tokenizer_type,
            tokenizer_model=args.tokenizer_model,
            tokenizer_metadata=None,
            tokenizer_special_tokens=None,
            tokenizer_hf_use_fast=args.tokenizer_hf_use_fast,
            tokenizer_hf_include_special_tokens=False,
            trust_remote_code=False,
            vocab_file=None,
            merge_file=None,
        )
    )
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    evaluations = (args.train_iters // args.eval_interval + 1) * args.eval_iters
    samples = [each * args.global_batch_size for each in (args.train_iters, evaluations, args.eval_iters)]
    return BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, config).build()


def cache(folder: str) -> dict[str, int]:
    """The files of the cache and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def main(script: str, asked: str, words: str) -> None:
    args, _ = parser().parse_known_args(json.loads(Path(words).read_text()))
    sys.argv, sys.path[0] = [script, asked], str(Path(script).parent)  # as `python3 SCRIPT` has them
    runpy.run_path(script, run_name="__main__")
    after_stage = cache(args.data_cache_path)

    import tempfile

    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        built = datasets(args)
        lengths = [None if each is None else len(each) for each in built]
        first = built[0][0]["tokens"].tolist()
        torch.distributed.destroy_process_group()
    found = {"stage": after_stage, "training": cache(args.data_cache_path), "lengths": lengths, "first": first}
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
