"""Text to tokens: our whole command beside its peers, on the same text, tokenizer and cores, in one run.

    python benchmarks/data_prepare.py [--megabytes 150] [--repeat 3] [--megatron DIR] [--memory]

Every tool is a command of its own, imports and all. `--megatron DIR` adds Megatron-LM's own preprocess_data.py and
preprocess_data_fast.py from a checkout; `--memory` shows peak memory over 0.2, 1 and 4 GB of text.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import time
from pathlib import Path

import numpy as np

from corpus import byte_level_bpe, gather
from measure import Measured, measure, table

PEERS = Path(__file__).parent / "peers"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("store/bench"), help="where text and output are kept")
    parser.add_argument("--megabytes", type=float, default=150)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    corpus = gather(arguments.folder / f"text-{arguments.megabytes:g}.jsonl", arguments.megabytes)
    tokenizer = byte_level_bpe(corpus, arguments.folder / "tokenizer")
    compressed = _compress(corpus)
    print(f"{arguments.megabytes:g} MB of text ({corpus.stat().st_size / 1e6:.0f} MB of JSONL), 32k byte-level BPE")
    speed(arguments, corpus, compressed, tokenizer)
    profile(compressed, tokenizer)
    if arguments.memory:
        memory(arguments, tokenizer)


def _compress(corpus: Path) -> Path:
    import zstandard

    target = corpus.with_suffix(".jsonl.zst")
    if not target.exists():
        with corpus.open("rb") as source, target.open("wb") as sink:
            zstandard.ZstdCompressor(level=3).copy_stream(source, sink)
    return target


def _ours(source: Path, tokenizer: Path, output: Path, workers: int) -> list[str]:
    command = [sys.executable, "-m", "trainshed", "data", "prepare", "--input", str(source)]
    return [*command, "--tokenizer", str(tokenizer), "--output", str(output), "--workers", str(workers)]


def _peer(name: str, source: Path, tokenizer: Path, output: Path, *more: str) -> list[str]:
    command = [sys.executable, str(PEERS / f"{name}.py"), "--input", str(source), "--tokenizer", str(tokenizer)]
    return [*command, "--output", str(output), *more]


def speed(arguments: argparse.Namespace, corpus: Path, compressed: Path, tokenizer: Path) -> None:
    """Whole commands, best of a few rounds; every round runs all of them, so that noise meets all alike."""
    out = arguments.folder / "out"
    workers = ("--workers", str(arguments.workers))
    commands = {
        "trainshed, .jsonl.zst": _ours(compressed, tokenizer, out / "zst", arguments.workers),
        "trainshed, .jsonl": _ours(corpus, tokenizer, out / "ours", arguments.workers),
        "trainshed, .jsonl, 1 worker": _ours(corpus, tokenizer, out / "one", 1),
        "whole file in gigatoken (preprocess_data_fast's way)": _peer(
            "in_memory_gigatoken", corpus, tokenizer, out / "memory"
        ),
        "per-document loop (preprocess_data's way)": _peer("document_loop", corpus, tokenizer, out / "loop", *workers),
    }
    if importlib.util.find_spec("datatrove"):
        halves = _halves(corpus, arguments.folder / "halves", arguments.workers)
        commands["datatrove DocumentTokenizer"] = _peer(
            "datatrove_tokenize", halves, tokenizer, out / "datatrove", *workers
        )
    if arguments.megatron:
        common = ["--input", str(corpus), "--tokenizer-type", "HuggingFaceTokenizer", "--append-eod"]
        common += ["--tokenizer-model", str(tokenizer)]
        for name, extra in (("preprocess_data_fast", ["--use-gigatoken"]), ("preprocess_data", list(workers))):
            script = str(arguments.megatron / "tools" / f"{name}.py")
            commands[f"Megatron-LM {name}.py"] = [
                *(sys.executable, script, *common, *extra),
                *("--output-prefix", str(out / name)),
            ]
    best: dict[str, Measured] = {}
    for _ in range(arguments.repeat):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True) if name == next(iter(commands)) else None
            out.mkdir(exist_ok=True)
            measured = measure(command)
            if name not in best or measured.seconds < best[name].seconds:
                best[name] = measured
    _same_bytes(out)
    ours = best["trainshed, .jsonl.zst"].seconds
    rows = [
        [
            name,
            f"{m.seconds:.2f}",
            f"{arguments.megabytes / m.seconds:.1f}",
            f"{m.seconds / ours:.1f}x",
            f"{m.peak_mib:.0f}",
        ]
        for name, m in best.items()
    ]
    columns = ["whole command", "seconds", "text MB/s", "ours is faster by", "peak MiB"]
    table(f"Best of {arguments.repeat}, {arguments.workers} workers", columns, rows)


def _same_bytes(out: Path) -> None:
    """Speed counts only if the result is the same."""
    expected = {ending: (out / f"loop.{ending}").read_bytes() for ending in ("bin", "idx")}
    for name in ("zst", "ours", "one", "memory"):
        for ending, data in expected.items():
            if (out / f"{name}.{ending}").read_bytes() != data:
                sys.exit(f"{name}.{ending} differs from megatron-core's")
    print("  .bin and .idx of all are the same bytes as megatron-core's builder writes")


def _halves(corpus: Path, folder: Path, parts: int) -> Path:
    if not folder.exists():
        folder.mkdir()
        lines = corpus.read_bytes().splitlines(keepends=True)
        for part in range(parts):
            chosen = lines[len(lines) * part // parts : len(lines) * (part + 1) // parts]
            (folder / f"part-{part}.jsonl").write_bytes(b"".join(chosen))
    return folder


def profile(compressed: Path, tokenizer: Path) -> None:
    """Where the CPU time of the work goes, phase by phase on one core."""
    import hashlib

    from trainshed.data.text.corpus import find_inputs
    from trainshed.data.text.reader import InputReader, extract_documents
    from trainshed.data.tokenize.tokenizer import load_tokenizer
    from trainshed.data.tokenize.workers import BlockTokenizer, BlockTokenizerConfig
    from trainshed.storage import open_store

    (piece,) = find_inputs([str(compressed)])
    worker = BlockTokenizer(BlockTokenizerConfig(load_tokenizer(str(tokenizer)), 0, None, "uint16"))
    worker.encoder.encode(["warm"])
    spent = dict.fromkeys(("read, hash, inflate, cut", "parse JSON", "encode", "EOD, dtype", "hash, write"), 0.0)
    blocks = iter(InputReader(piece, *open_store(piece.address)).blocks())
    digest = hashlib.sha256()
    with open("/dev/null", "wb") as sink:
        while True:
            times = [time.perf_counter()]
            block = next(blocks, None)
            times.append(time.perf_counter())
            if block is None:
                break
            documents, _ = extract_documents(block, "text")
            times.append(time.perf_counter())
            encoded = worker.encoder.encode(documents)
            times.append(time.perf_counter())
            data, _ = worker.add_special_tokens(encoded)
            times.append(time.perf_counter())
            digest.update(data)
            sink.write(data)
            times.append(time.perf_counter())
            for name, seconds in zip(spent, np.diff(times), strict=True):
                spent[name] += float(seconds)
    total = sum(spent.values())
    rows = [[name, f"{seconds:.2f}", f"{seconds / total:.0%}"] for name, seconds in spent.items()]
    table("Where the work goes (one core, .jsonl.zst, start-up left out)", ["phase", "seconds", "share"], rows)


def memory(arguments: argparse.Namespace, tokenizer: Path) -> None:
    """Peak memory against the size of the corpus; swapped letters keep the words of every gigabyte new."""
    rows = []
    for megabytes in (200, 1000, 4000):
        corpus = gather(arguments.folder / f"text-{megabytes}.jsonl", megabytes)
        out = arguments.folder / "out" / f"memory-{megabytes}"
        measured = measure(_ours(corpus, tokenizer, out, arguments.workers))
        rows.append([f"{megabytes / 1000:g} GB", f"{measured.peak_mib:.0f}", f"{megabytes / measured.seconds:.1f}"])
        corpus.unlink()
        for ending in ("bin", "idx", "manifest.json"):
            Path(f"{out}.{ending}").unlink()
    table("Memory of the whole process tree", ["text", "peak MiB", "text MB/s"], rows)


if __name__ == "__main__":
    main()
