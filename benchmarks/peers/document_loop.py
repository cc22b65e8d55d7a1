"""The peer everybody knows: one document at a time through a process pool, as Megatron-LM's preprocess_data.py works.

JSON line -> tokenizers -> list of ids -> pickled back to the parent -> megatron-core's IndexedDatasetBuilder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import warnings

from tokenizers import Tokenizer

TOKENIZER: Tokenizer


def start(path: str) -> None:
    global TOKENIZER
    TOKENIZER = Tokenizer.from_file(path)


def encode(line: str) -> list[int]:
    ids = TOKENIZER.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return [*ids, 0] if ids else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{arguments.output}.bin", dtype=np.uint16)
    with (
        open(arguments.input, encoding="utf-8") as file,
        multiprocessing.Pool(arguments.workers, start, (f"{arguments.tokenizer}/tokenizer.json",)) as pool,
    ):
        for ids in pool.imap(encode, file, 32):
            builder.add_document(torch.IntTensor(ids), [len(ids)] if ids else [])
    builder.finalize(f"{arguments.output}.idx")


if __name__ == "__main__":
    main()
