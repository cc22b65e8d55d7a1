"""`data.document_mask` in the words of megatron-core: three flags that say together what the recipe says in one key.

`reset_position_ids`, `reset_attention_mask` and `eod_mask_loss` are read by megatron-core's GPT dataset, in Megatron-LM
and in NeMo. The mask that the second one makes is a tensor, and TransformerEngine's attention is causal whatever
tensor it is given: documents see each other and nothing says so (NVIDIA/Megatron-LM issue 2357). So an adapter renders
the flags only where attention is known to read what they make, and refuses the key elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainshed.engines.importing import ConfigImport
from trainshed.engines.key_table import OMIT, KeyRow
from trainshed.engines.launch import EngineTask
from trainshed.recipe.section import Problem

DOCUMENT_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
DOCUMENT_MASK_KEY = ("data", "document_mask")
MASK_IGNORED = (
    "TransformerEngine's attention ignores the mask that reset_attention_mask makes, so that documents see each other "
    "(Megatron-LM issue 2357)"
)


def _never(config: Any) -> bool:
    return False


def document_mask_row(
    prefix: str = "", *, reads_mask: Callable[[Any], bool], marks_boundaries: Callable[[Any], bool] = _never
) -> KeyRow:
    """Return the row of the three flags.

    Of an import, `reads_mask` tells whether its attention reads the mask that they make, and `marks_boundaries`
    whether it is told where documents begin in another way, which stands for the first two flags.
    """
    keys = tuple(f"{prefix}{flag}" for flag in DOCUMENT_FLAGS)

    def read(config: ConfigImport) -> Any:
        boundaries = marks_boundaries(config)
        given = [key for key in keys if config.get(key)]
        if given == list(keys) or (boundaries and keys[-1] in given):
            if not boundaries and not reads_mask(config):
                config.add_mistake(
                    keys[1], MASK_IGNORED, "engine: torch, which keeps them apart by data.document_mask: true"
                )
            return True
        if given or boundaries:
            named = ", ".join(key.rpartition(".")[2] for key in given) or "boundaries of documents"
            config.ask(
                f"{named} without the rest of {', '.join(DOCUMENT_FLAGS)}: a recipe keeps documents apart in "
                "attention, positions and loss, or in none of them; data.document_mask: true is all three"
            )
            config.drop("a recipe has all three as data.document_mask, or none", *given)
        return OMIT

    return KeyRow(keys, "data.document_mask", lambda task: dict.fromkeys(keys, task.recipe.document_mask), read)


def document_problems(task: EngineTask) -> Iterator[Problem]:
    """Yield why megatron-core's dataset could not find the documents of a task that keeps them apart."""
    recipe = task.recipe
    if not recipe.document_mask:
        return
    if recipe.data.synthetic:
        yield Problem(DOCUMENT_MASK_KEY, "synthetic data has no documents", "delete it")
    elif recipe.tokenizer is None:
        yield Problem(
            DOCUMENT_MASK_KEY,
            "Megatron finds documents by the token at their end, which only a tokenizer tells",
            "write `tokenizer`, or engine: torch",
        )
    elif recipe.data.eod is not True:
        yield Problem(
            DOCUMENT_MASK_KEY,
            f"Megatron finds documents by the tokenizer's own end of text, and `data.eod` is {recipe.data.eod}",
            "write `data.eod: true`, or engine: torch",
        )
    if task.layout.cp > 1:
        yield Problem(
            DOCUMENT_MASK_KEY,
            f"Megatron keeps no documents apart that cp: {task.layout.cp} cuts",
            "write `layout.cp: 1`, or engine: torch",
        )
