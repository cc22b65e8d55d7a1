"""`trainshed data prepare`: text to token files."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from trainshed.cli.console import Output


def prepare(
    *,
    inputs: Annotated[list[str], Parameter(name=["--input", "-i"], consume_multiple=True, negative="")],
    tokenizer: str,
    output: Annotated[str, Parameter(name="--output")],
    key: str = "text",
    shards: int | None = None,
    task: str | None = None,
    workers: int | None = None,
    eod: Annotated[str | None, Parameter(negative="")] = None,
    no_eod: Annotated[bool, Parameter(negative="")] = False,
    bos: Annotated[bool, Parameter(negative="")] = False,
    on_bad_line: Literal["stop", "skip"] = "stop",
    format: Literal["jsonl", "json", "csv", "tsv", "parquet", "text"] | None = None,
    documents: Literal["file", "line", "blank-line"] = "file",
    encoder: Literal["auto", "gigatoken", "tokenizers"] = "auto",
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    output_format: Annotated[Output, Parameter(name="-o")] = "text",
) -> int:
    """Turn text into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.manifest.json`, readable by Megatron.

    Killed at any moment, the same command goes on where it stopped; run again, it does only what is missing or has
    changed. The bytes do not depend on the number of workers.

    Parameters
    ----------
    inputs
        Files, folders or globs, local or in any store: .jsonl, .csv, .tsv, .txt, .md (also as .gz or .zst), .parquet.
    tokenizer
        A tokenizer folder or tokenizer.json (local or any store), or a Hub id such as org/name.
    output
        The PREFIX to write to, local or in any store.
    key
        The JSON key or the column that holds the text.
    shards
        Write this many pairs of files, PREFIX-00000-of-00072.bin and so on (default 1, or N with --task i/N).
    task
        Do only the shards of task i of N (i from 0): for Slurm arrays and Kubernetes indexed jobs.
    workers
        How many cores to use (default: all; for a few megabytes one). Up to four are threads, more are processes.
    eod
        The token that ends a document (default: the tokenizer's end-of-sequence token).
    no_eod
        Do not end documents with a token: they then run together.
    bos
        Begin each document with the tokenizer's beginning-of-sequence token.
    on_bad_line
        Stop at a line that holds no document, or skip and count it.
    format
        What the files hold, where their names do not tell; json is one array, jsonl one object a line.
    documents
        Plain text: one document per file, per line, or between blank lines.
    encoder
        Which library encodes; auto takes the fast one where it is proven equal.
    overwrite
        Make shards anew that exist and were made with another tokenizer or other options.
    output_format
        Report as text or json.
    """
    from trainshed.cli.console import human, print_report, reporter
    from trainshed.cli.parsing import parse_task
    from trainshed.data.text.corpus import assign_shards, find_pieces
    from trainshed.data.workers.pool import default_workers, prepare_to_start
    from trainshed.errors import InputError

    if eod is not None and no_eod:
        raise InputError("--eod and --no-eod contradict each other", hint="write one of them")
    report = reporter()
    part = parse_task(task) if task else None
    for flag, number in (("--shards", shards), ("--workers", workers)):
        if number is not None and number < 1:
            raise InputError(f"{flag} {number} is less than one", hint=f"write {flag} 1 or more, or leave it out")
    shards = shards or (part[1] if part else 1)
    if part and part[1] > shards:
        raise InputError(
            f"--task {task}: {part[1]} tasks cannot share {shards} shards",
            hint="write --shards with at least as many shards as tasks",
        )
    pieces = find_pieces(
        inputs, key=key, kind=format, documents="blank_line" if documents == "blank-line" else documents
    )
    workers = workers or default_workers(pieces)
    prepare_to_start(workers)
    from trainshed.data.encode.tokenizer import load_tokenizer
    from trainshed.data.prepare import ShardJob, Tokenizing
    from trainshed.data.prepare import prepare as prepare_shards
    from trainshed.data.tokens.manifest import combine, write_set_manifest
    from trainshed.data.tokens.shards import refuse_other_shards, shard_name

    loaded = load_tokenizer(tokenizer)
    how = Tokenizing(
        tokenizer=loaded,
        eod=None if no_eod else loaded.end_of_document(eod),
        bos=loaded.beginning_of_document() if bos else None,
        on_bad_line=on_bad_line,
        encoder=encoder,
    )
    report.note(
        f"tokenizer: {loaded.address}, {loaded.vocab_size:,} tokens stored as {how.dtype}; "
        + (f"documents end with {how.eod.text} ({how.eod.id})" if how.eod else "documents end with no token")
        + (f" and begin with {how.bos.text} ({how.bos.id})" if how.bos else "")
    )
    refuse_other_shards(output, shards)
    jobs = [
        ShardJob(shard_name(output, number, shards), tuple(assigned))
        for number, assigned in enumerate(assign_shards(pieces, shards))
        if part is None or number % part[1] == part[0]
    ]
    done = prepare_shards(jobs, how, workers=workers, overwrite=overwrite, reporter=report)
    whole = write_set_manifest(output, shards)
    total = combine(done.manifests)
    if total.counts.documents == 0:
        report.warn(f"no documents: {len(pieces)} files hold none")
    for example in total.counts.bad_line_examples[:5]:
        report.warn(f"skipped {example}")
    data = {
        "schema": "trainshed.data.prepare/1",
        "prefix": output,
        "shards": shards,
        "made": done.made,
        "reused": done.reused,
        "complete": whole is not None,
        "encoder": total.encoder,
        "documents": total.counts.documents,
        "empty_documents": total.counts.empty_documents,
        "tokens": total.counts.tokens,
        "text_bytes": total.counts.text_bytes,
        "bad_lines": total.counts.bad_lines,
        "files": [file.path for file in total.files],
    }
    text = (
        f"{output}: {total.counts.documents:,} documents, {total.counts.tokens:,} tokens "
        f"from {human(total.counts.text_bytes, 'B')} of text"
        + (f", {total.counts.bad_lines:,} bad lines skipped" if total.counts.bad_lines else "")
        + (f"; {done.made} of {shards} shards made, {done.reused} already there" if shards > 1 or done.reused else "")
        + ("" if whole else "; other tasks have shards to make")
    )
    print_report(data, output_format, text)
    return 0
