"""datatrove: JsonlReader -> DocumentTokenizer, documents in order (no shuffle), one local worker per input file."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    # datatrove shares work by file: the input folder holds one file per worker.
    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(arguments.input),
            DocumentTokenizer(
                arguments.output,
                tokenizer_name_or_path=f"{arguments.tokenizer}/tokenizer.json",
                eos_token="<|endoftext|>",
                shuffle_documents=False,
            ),
        ],
        tasks=len(list(Path(arguments.input).iterdir())),
        workers=arguments.workers,
        logging_dir=f"{arguments.output}/logs",
    ).run()


if __name__ == "__main__":
    main()
