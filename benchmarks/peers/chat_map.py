"""Conversations to tokens as trl does it: `datasets.map` over `apply_chat_template`, which says what is learned.

One row at a time, as `SFTTrainer` maps them, or with --batched many rows in one call.
"""

from __future__ import annotations

import argparse
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batched", action="store_true")
    arguments = parser.parse_args()
    from datasets import disable_progress_bars, load_dataset
    from transformers import AutoTokenizer

    disable_progress_bars()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.tokenizer)

    def tokenize(rows: dict[str, Any]) -> dict[str, Any]:
        result = tokenizer.apply_chat_template(rows["messages"], return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": result["input_ids"], "assistant_masks": result["assistant_masks"]}

    rows = load_dataset("json", data_files=arguments.input, split="train", cache_dir=f"{arguments.output}-cache")
    mapped = rows.map(
        tokenize,
        batched=arguments.batched,
        num_proc=arguments.workers,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
    )
    mapped.save_to_disk(arguments.output)
    print(len(mapped))


if __name__ == "__main__":
    main()
