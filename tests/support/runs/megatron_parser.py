"""Megatron-LM's own parser and validator over many lists of arguments, in one process; see `megatron_lm.py`.

    python megatron_parser.py <tasks.json >answers.json

Each task is {"world_size": N, "arguments": [...], "environment": {...}}; each answer is null where they are accepted,
or the error.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys


def answer(task: dict) -> str | None:
    """Return what the program says against arguments, None where it takes them."""
    from megatron.training import arguments

    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO"):
        os.environ.pop(name, None)
    os.environ.update(task["environment"] | {"WORLD_SIZE": str(task["world_size"]), "RANK": "0"})
    sys.argv = ["pretrain_gpt.py", *task["arguments"]]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            args = arguments.parse_args()
            arguments.validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
            # What its layers do not take is refused here, and by no other check. For fp8 it asks Transformer Engine,
            # for uneven stages the other ranks: neither is here.
            alone = args.fp8 is None and not getattr(args, "pipeline_model_parallel_layout", None)
            if args.multi_latent_attention and alone:
                arguments.core_transformer_config_from_args(args)
    except SystemExit:
        return (said.getvalue().strip().splitlines() or ["it ends"])[-1]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def main() -> None:
    """Answer all tasks."""
    from megatron.core import utils

    # Transformer Engine is not here, and in the images it is a current one.
    utils.is_te_min_version = lambda *_, **__: True
    tasks = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = [answer(task) for task in tasks]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
