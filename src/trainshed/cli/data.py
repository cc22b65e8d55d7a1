"""The verbs of `trainshed data`: text into token files, and a look inside."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.data.chat.tokenize import ChatSettings


def fetch(
    src: str,
    dst: str,
    *,
    include: Annotated[list[str] | None, Parameter(negative="")] = None,
    exclude: Annotated[list[str] | None, Parameter(negative="")] = None,
    limit: int | None = None,
    task: str | None = None,
    workers: int = 16,
    output: Annotated[Output, Parameter(name=["--output", "-o"])] = "text",
) -> int:
    """Copy a corpus into a store: parallel, checksummed, and moving only what is missing when run again.

    The copy is complete when DST/.trainshed/manifest.json is there; killed at any moment, the same command goes on
    where it stopped.

    Parameters
    ----------
    src
        A file, folder or glob in any store (hf://datasets/org/name[@revision], s3://…, gs://…, az://…, a path), one
        URL, or @FILE: a text file, local or remote, with one URL per line.
    dst
        The folder to copy into, local or in a bucket.
    include
        Copy only what matches this glob; may be repeated. A glob without a slash matches file names.
    exclude
        Leave out what matches this glob; may be repeated.
    limit
        Copy only the first N files, in the order of their paths.
    task
        Copy only part i of N (i from 0): for Slurm arrays and Kubernetes indexed jobs.
    workers
        How many files to copy at a time.
    output
        Report as text or json.
    """
    from trainshed.cli.console import parse_task, report_copy, reporter
    from trainshed.storage import copy_tree

    result = copy_tree(
        src,
        dst,
        include=include or (),
        exclude=exclude or (),
        limit=limit,
        task=parse_task(task) if task else None,
        workers=workers,
        reporter=reporter(),
    )
    report_copy(result, "trainshed.data.fetch/1", output)
    return 0


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
    split: str | None = None,
    rows: Literal["text", "chat", "instruct", "alpaca", "preference"] = "text",
    sequence_length: int | None = None,
    template: str | None = None,
    columns: Annotated[list[str] | None, Parameter(consume_multiple=True, negative="")] = None,
    system: str | None = None,
    train_on: Literal["answers", "last", "all"] | None = None,
    thinking: Literal["keep", "drop"] | None = None,
    on_too_long: Literal["truncate", "drop", "stop"] | None = None,
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    output_format: Annotated[Output, Parameter(name="-o")] = "text",
) -> int:
    """Turn text into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.manifest.json`, readable by Megatron.

    Rows of conversations become tokens by a chat template, and `PREFIX.learned` says which of them are learned.

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
        The format of the files, if their names do not say it; json is one array, jsonl one object a line.
    documents
        Plain text: one document per file, per line, or between blank lines.
    encoder
        Which library encodes; auto takes the fast one where it is proven equal.
    split
        The part of the rows to read, as `datasets` writes it: train, train[:95%], train[10:200], train[:10%]+test.
    rows
        What a row holds: text, a conversation (chat: OpenAI's messages or ShareGPT's conversations), prompt and answer
        (instruct, alpaca), or a prompt with a better and a worse answer (preference).
    sequence_length
        Conversations: the longest in tokens; of preference, a pair together.
    template
        Conversations: the chat template, by name (chatml, gemma, llama3, mistral, plain, qwen) or as a .jinja file
        (default: the tokenizer's own).
    columns
        Conversations: what the file calls our columns, as NAME=THEIRS (messages=dialogue role=speaker).
    system
        Conversations: the system prompt of those that have none.
    train_on
        Conversations: which tokens are learned: of all answers (default), of the last, or all.
    thinking
        Conversations: keep or drop the thinking in answers; without it, data that has some is an error.
    on_too_long
        Conversations longer than --sequence-length: truncate them (default), drop them, or stop.
    overwrite
        Make shards anew that exist and were made with another tokenizer or other options.
    output_format
        Report as text or json.
    """
    from trainshed.cli.console import format_amount, parse_task, print_report, reporter
    from trainshed.data.text.corpus import assign_shards, find_inputs
    from trainshed.data.tokenize.workers import default_workers, prestart_workers
    from trainshed.errors import InputError

    if eod is not None and no_eod:
        raise InputError("--eod and --no-eod contradict each other", hint="write one of them")
    chat_flags = {
        "--sequence-length": sequence_length,
        "--template": template,
        "--columns": columns,
        "--system": system,
        "--train-on": train_on,
        "--thinking": thinking,
        "--on-too-long": on_too_long,
    }
    _check_chat_flags(rows, chat_flags, {"--eod": eod, "--no-eod": no_eod, "--bos": bos})
    renamed = _parse_columns(rows, columns or [])
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
    from trainshed.data.chat.conversation import row_columns

    pieces = find_inputs(
        inputs,
        key=key,
        format=format,
        documents="blank_line" if documents == "blank-line" else documents,
        columns=row_columns(rows, renamed) if rows != "text" else None,
        split=split,
    )
    workers = workers or default_workers(pieces)
    prestart_workers(workers, chat=rows != "text")
    from trainshed.data.prepare import ShardJob, TokenizeConfig
    from trainshed.data.prepare import prepare as prepare_shards
    from trainshed.data.tokenize.tokenizer import load_tokenizer
    from trainshed.data.tokens.manifest import combine_manifests, describe_conversations, write_set_manifest
    from trainshed.data.tokens.token_files import refuse_other_shards, shard_name

    loaded = load_tokenizer(tokenizer)
    chat: ChatSettings | None = None
    if rows != "text":
        from trainshed.data.chat.template import find_template
        from trainshed.data.chat.tokenize import ChatSettings, check_markers

        assert sequence_length is not None
        chat = ChatSettings(
            sample_format=rows,
            template=find_template(template, loaded),
            sequence_length=sequence_length,
            columns=tuple(sorted(renamed.items())),
            system=system,
            train_on=train_on or "answers",
            thinking=thinking,
            on_too_long=on_too_long or "truncate",
        )
        check_markers(chat, loaded, report)
    how = TokenizeConfig(
        tokenizer=loaded,
        eod=None if no_eod or chat is not None else loaded.end_of_document(eod),
        bos=loaded.beginning_of_document() if bos else None,
        on_bad_line=on_bad_line,
        encoder=encoder,
        chat=chat,
    )
    report.note(
        f"tokenizer: {loaded.address}, {loaded.vocab_size:,} tokens stored as {how.dtype}; "
        + (
            f"chat template: {chat.template.name}"
            if chat is not None
            else (f"documents end with {how.eod.text} ({how.eod.id})" if how.eod else "documents end with no token")
            + (f" and begin with {how.bos.text} ({how.bos.id})" if how.bos else "")
        )
    )
    refuse_other_shards(output, shards)
    jobs = [
        ShardJob(shard_name(output, number, shards), tuple(assigned))
        for number, assigned in enumerate(assign_shards(pieces, shards))
        if part is None or number % part[1] == part[0]
    ]
    done = prepare_shards(jobs, how, workers=workers, overwrite=overwrite, reporter=report)
    whole = write_set_manifest(output, shards)
    total = combine_manifests(done.manifests)
    if total.counts.documents == 0:
        report.warn(f"no documents: {len(pieces)} files hold none")
    for example in total.counts.bad_line_examples[:5]:
        report.warn(f"skipped {example}")
    data: dict[str, Any] = {
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
    if total.counts.chat is not None:
        data["chat"] = asdict(total.counts.chat)
        amounts = describe_conversations(total.counts)
    else:
        amounts = (
            f"{total.counts.documents:,} documents, {total.counts.tokens:,} tokens "
            f"from {format_amount(total.counts.text_bytes, 'B')} of text"
            + (f", {total.counts.bad_lines:,} bad lines skipped" if total.counts.bad_lines else "")
        )
    text = (
        f"{output}: {amounts}"
        + (f"; {done.made} of {shards} shards made, {done.reused} already there" if shards > 1 or done.reused else "")
        + ("" if whole else "; other tasks have shards to make")
    )
    print_report(data, output_format, text)
    return 0


def _check_chat_flags(rows: str, chat_flags: dict[str, Any], text_flags: dict[str, Any]) -> None:
    """Refuse flags that are not read with such rows."""
    from trainshed.errors import InputError

    unread, needed = (chat_flags, "--rows chat") if rows == "text" else (text_flags, "--rows text")
    for flag, value in unread.items():
        if value:
            raise InputError(f"{flag} is read with {needed} only", hint=f"leave {flag} out")
    if rows != "text" and chat_flags["--sequence-length"] is None:
        raise InputError(
            f"--rows {rows} needs --sequence-length, the longest conversation in tokens",
            hint="write for example --sequence-length 4096",
        )


def _parse_columns(rows: str, columns: list[str]) -> dict[str, str]:
    from trainshed.errors import InputError
    from trainshed.recipe.data import SAMPLE_COLUMNS

    renamed = {}
    for column in columns:
        ours, mark, theirs = column.partition("=")
        if not mark or not theirs or ours not in SAMPLE_COLUMNS[rows]:
            raise InputError(
                f"--columns {column} is not understood",
                hint=f"write NAME=THEIRS; names of {rows} rows are {', '.join(SAMPLE_COLUMNS[rows])}",
            )
        renamed[ours] = theirs
    return renamed


def verify(
    prefix: str, *, tokenizer: str | None = None, output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """Prove token files: structure, bounds, token range, end-of-document tokens, and the hashes of their manifest.

    Finds truncation and single flipped bits. Exit code 1 if anything is wrong.

    Parameters
    ----------
    prefix
        PREFIX of PREFIX.bin and PREFIX.idx, or of a set of shards.
    tokenizer
        Check the token range against this tokenizer (default: what the manifest says).
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.data.tokenize.tokenizer import load_tokenizer
    from trainshed.data.tokens.verify import verify_tokens as verify_files

    verdicts = verify_files(prefix, tokenizer=load_tokenizer(tokenizer) if tokenizer else None, reporter=reporter())
    passed = all(verdict.passed for verdict in verdicts)
    data = {
        "schema": "trainshed.data.tokens.verify/1",
        "prefix": prefix,
        "passed": passed,
        "shards": [
            {
                "prefix": verdict.prefix,
                "passed": verdict.passed,
                "documents": verdict.documents,
                "tokens": verdict.tokens,
                "checked": verdict.checked,
                "problems": verdict.problems,
            }
            for verdict in verdicts
        ],
    }
    lines = []
    for verdict in verdicts:
        word = "proven" if verdict.passed else "WRONG"
        lines.append(f"{word}  {verdict.prefix}: {verdict.documents:,} documents, {verdict.tokens:,} tokens")
        lines.append(f"        checked: {', '.join(verdict.checked) or 'nothing could be'}")
        if "manifest" not in verdict.checked:
            lines.append("        no manifest: the bytes were not compared with those that were made")
        lines += [f"        {problem}" for problem in verdict.problems]
    print_report(data, output, "\n".join(lines))
    return 0 if passed else 1


def merge(
    *prefixes: str,
    output: Annotated[str, Parameter(name="--output")],
    overwrite: Annotated[bool, Parameter(negative="")] = False,
    output_format: Annotated[Output, Parameter(name="-o")] = "text",
) -> int:
    """Concatenate token files, in the order given, into one PREFIX.bin and PREFIX.idx.

    The bytes are those of preparing everything into one file. Memory does not grow with the files; killed
    at any moment, the same command can be run again.

    Parameters
    ----------
    prefixes
        PREFIX of PREFIX.bin and PREFIX.idx, or of a set of shards (all of them, in order).
    output
        The PREFIX to write to.
    overwrite
        Replace the output if it exists.
    output_format
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.data.tokens.merge import merge_tokens as merge_files

    header = merge_files(prefixes, output, overwrite=overwrite, reporter=reporter())
    data = {
        "schema": "trainshed.data.tokens.merge/1",
        "prefix": output,
        "inputs": list(prefixes),
        "documents": header.documents,
        "sequences": header.sequences,
        "dtype": str(header.dtype),
    }
    print_report(data, output_format, f"{output}: {header.documents:,} documents, stored as {header.dtype}")
    return 0
