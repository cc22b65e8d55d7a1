"""`trainshed model merge`: a LoRA adapter into the weights it was trained on."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output


def merge(
    base: str,
    adapter: str,
    out: str,
    *,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Merge a PEFT LoRA adapter into Hugging Face weights: the weights that PEFT's own merge_and_unload gives.

    Goes through the base shard by shard, in the memory of one tensor. OUT appears when it is complete; killed at any
    moment, the same command goes on where it stopped.

    Parameters
    ----------
    base
        The folder of the base model, as transformers saves it.
    adapter
        The folder with adapter_config.json and adapter_model.safetensors.
    out
        The folder to make.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.formats import local_folder
    from trainshed.cli.console import human, print_report, reporter
    from trainshed.errors import MissingExtra

    try:
        from trainshed.checkpoints.lora.merge import merge as merge_adapter
    except ImportError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise MissingExtra.named("train", "merging adapters") from None
    made = merge_adapter(local_folder(base), local_folder(adapter), local_folder(out), reporter=reporter())
    lines = [
        f"{made.family}: {made.changed} of {made.tensors} tensors changed (rank {made.rank}), {made.files} files, "
        f"{human(made.bytes, 'B')}",
        f"base     {made.base}",
        f"adapter  {made.adapter}",
        f"to       {made.target}",
    ]
    print_report({"schema": "trainshed.model.merge/1", **made.to_plain()}, output, "\n".join(lines))
    return 0
