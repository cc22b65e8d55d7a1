"""Run by the kill tests: prepares a corpus in small blocks with a mark behind each, and says who its workers are.

With a number of blocks as its last argument it stops behind them, says so, and waits to be killed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.runs import preparing
from trainshed.data.text import reader
from trainshed.data.tokenize import workers
from trainshed.data.tokenize.tokenizer import load_tokenizer
from trainshed.data.tokens import shard_writer


class Loud(preparing.Notes):
    """Tells what it hears at once: the test reads it."""

    blocks = 0
    stall_after = 0

    def note(self, text: str) -> None:
        sys.stdout.write(f"note {text}\n")
        sys.stdout.flush()

    def describe(self, text: str) -> None:
        self.blocks += 1
        if self.blocks == self.stall_after:
            self.note("waiting")
            time.sleep(600)


class Pool(workers.WorkerPool):
    """Tells the process ids of its workers."""

    def __enter__(self) -> workers.WorkerPool:
        pool = super().__enter__()
        pids = [str(worker.process.pid) for worker in self.processes]
        sys.stdout.write(f"workers {' '.join(pids)}\n")
        sys.stdout.flush()
        return pool


if __name__ == "__main__":
    corpus, tokenizer, output, shards, stall_after = sys.argv[1:]
    Loud.stall_after = int(stall_after)
    shard_writer.JOURNAL_SECONDS = 0
    workers.MAX_THREAD_WORKERS = 1  # two workers are threads by default; here it is processes that are killed
    reader.BLOCK_BYTES = reader.READ_BYTES = 20_000
    preparing.prepare.__globals__["WorkerPool"] = Pool
    preparing.prepare_text(corpus, load_tokenizer(tokenizer), output, shards=int(shards), workers=2, reporter=Loud())
