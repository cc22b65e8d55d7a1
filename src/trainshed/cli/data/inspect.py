"""`trainshed data inspect`: a look inside token files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.data.tokens.inspect import Inspection

BAR = 40


def inspect(
    prefix: str,
    *,
    tokenizer: str | None = None,
    samples: int = 3,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show what token files hold: counts, document lengths, special tokens, and some of the text.

    Parameters
    ----------
    prefix
        PREFIX of PREFIX.bin and PREFIX.idx, or of a set of shards.
    tokenizer
        Decode samples with this tokenizer (default: where the manifest says it was found).
    samples
        How many documents to show the beginning of.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.data.encode.tokenizer import Tokenizer, load_tokenizer
    from trainshed.data.tokens.inspect import inspect as inspect_files
    from trainshed.data.tokens.manifest import read_token_manifest
    from trainshed.data.tokens.shards import shard_prefixes
    from trainshed.errors import TrainshedError

    report = reporter()
    loaded: Tokenizer | None = None
    if tokenizer:
        loaded = load_tokenizer(tokenizer)
    elif manifest := read_token_manifest(shard_prefixes(prefix)[0]):
        try:
            loaded = load_tokenizer(manifest.tokenizer)
        except TrainshedError as error:
            report.warn(f"cannot decode: {error.what} ({manifest.tokenizer}); write --tokenizer")
    found = inspect_files(prefix, tokenizer=loaded, samples=samples, reporter=report)
    data = {"schema": "trainshed.data.tokens.inspect/1", **asdict(found)}
    data["histogram"] = {str(bucket): count for bucket, count in found.histogram.items()}
    print_report(data, output, _text(found))
    return 0


def _text(found: Inspection) -> str:
    from trainshed.cli.console import human

    lines = [
        f"{found.prefix}  ({found.shards} {'file' if found.shards == 1 else 'shards'}, {found.dtype}, "
        f"{human(found.file_bytes, 'B')})",
        f"  documents   {found.documents:>15,}"
        + (f"   ({found.empty_documents:,} empty)" if found.empty_documents else ""),
        f"  tokens      {found.tokens:>15,}   largest id {found.largest_id:,}",
    ]
    if found.bytes_per_token is not None:
        lines.append(f"  bytes/token {found.bytes_per_token:>15.2f}")
    if found.eod:
        inside = f", {found.eod_inside_documents:,} inside documents" if found.eod_inside_documents else ""
        lines.append(f"  EOD         {found.eod_count:>15,}   {found.eod['text']} ({found.eod['id']}){inside}")
    if found.bos:
        lines.append(f"  BOS         {found.bos_count:>15,}   {found.bos['text']} ({found.bos['id']})")
    lines.append(
        f"  length      {found.mean_length:>15,.1f}   tokens a document, shortest {found.shortest:,}, "
        f"longest {found.longest:,}"
    )
    lines += ["", "  tokens a document", *_histogram(found.histogram)]
    for sample in found.samples:
        text = sample.text if sample.text is not None else " ".join(map(str, sample.ids))
        shown = text.replace("\n", "⏎")[:200]
        lines += ["", f"  document {sample.document:,} ({sample.tokens:,} tokens)", f"    {shown}"]
    return "\n".join(lines)


def _histogram(histogram: dict[int, int]) -> list[str]:
    """Bars over powers of two, with eighths of a character."""
    if not histogram:
        return ["    (none)"]
    most = max(histogram.values())
    lines = []
    for bucket in range(min(histogram), max(histogram) + 1):
        count = histogram.get(bucket, 0)
        eighths = round(count / most * BAR * 8)
        bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
        if count and not bar:
            bar = "▏"
        lines.append(f"    {2**bucket:>10,} – {2 ** (bucket + 1) - 1:<10,} {count:>12,}  {bar}".rstrip())
    return lines
