"""The fast peer: the whole file through gigatoken at once, then written: how preprocess_data_fast.py works.

It imports megatron-core for the index, as the original does; `data_prepare.py --megatron DIR` runs the original itself.
"""

from __future__ import annotations

import argparse
import warnings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    import gigatoken
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    tokenizer = gigatoken.Tokenizer(f"{arguments.tokenizer}/tokenizer.json")
    encoded = tokenizer.encode_files(gigatoken.JsonlFileSource([arguments.input], "text"))
    builder = IndexedDatasetBuilder(f"{arguments.output}.bin", dtype=np.uint16)
    for document in encoded:
        ids = np.append(np.asarray(document), 0).astype(np.int32) if len(document) else np.empty(0, np.int32)
        builder.add_document(torch.from_numpy(ids), [len(ids)] if len(ids) else [])
    builder.finalize(f"{arguments.output}.idx")


if __name__ == "__main__":
    main()
