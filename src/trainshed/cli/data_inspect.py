"""`trainshed data inspect`: a look into token files, and into conversations with what is learned of them."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from rich.text import Text

    from trainshed.data.chat.inspect import ChatInspection, ShownConversation
    from trainshed.data.tokenize.tokenizer import Tokenizer
    from trainshed.data.tokens.inspect import TokenInspection

_HISTOGRAM_CELLS = 40


def inspect(
    target: str,
    *overrides: str,
    tokenizer: str | None = None,
    samples: int = 3,
    rows: int = 1000,
    on: ClusterName = "local",
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Show what token files hold: counts, document lengths, special tokens, and some of the text.

    Of conversations it shows which tokens are learned: green on a terminal, between ⟦ and ⟧ elsewhere. Given a recipe
    of conversations, it tokenizes the first rows of each source; nothing is made or changed.

    Parameters
    ----------
    target
        PREFIX of PREFIX.bin and PREFIX.idx, or of a set of shards; or a recipe (a .yaml file, or a shipped one).
    overrides
        Of a recipe, keys to change, as key.sub=value (data.template=chatml).
    tokenizer
        Decode samples with this tokenizer (default: where the manifest says it was found).
    samples
        How many documents to show the beginning of.
    rows
        Of a recipe, how many rows of each source to read.
    on
        Of a recipe, the cluster file that says how stores are reached.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.data.chat.inspect import inspect_conversations, is_chat
    from trainshed.data.tokens.inspect import inspect_tokens as inspect_files
    from trainshed.errors import InputError

    if _is_recipe(target):
        return _inspect_recipe(target, overrides, samples, rows, on, output)
    if overrides:
        raise InputError(f"{overrides[0]}: token files have no keys to change", hint="leave it out, or name a recipe")
    report = reporter()
    loaded = _load_tokenizer(target, tokenizer)
    if is_chat(target):
        inspection = inspect_conversations(target, loaded, samples=samples, reporter=report)
        _print_chat([inspection], output)
        return 0
    tokens = inspect_files(target, tokenizer=loaded, samples=samples, reporter=report)
    data = {"schema": "trainshed.data.tokens.inspect/1", **asdict(tokens)}
    data["histogram"] = {str(bucket): count for bucket, count in tokens.histogram.items()}
    print_report(data, output, _inspection_text(tokens))
    return 0


def _is_recipe(target: str) -> bool:
    from trainshed.recipe.load import YAML_SUFFIXES, shipped_recipes

    return target.endswith(tuple(YAML_SUFFIXES)) or ("/" not in target and target in shipped_recipes())


def _load_tokenizer(prefix: str, address: str | None) -> Tokenizer | None:
    """Return the tokenizer to decode with; None, with a warning, where the one of the manifest cannot be read."""
    from trainshed.cli.console import reporter
    from trainshed.data.tokenize.tokenizer import load_tokenizer
    from trainshed.data.tokens.manifest import read_token_manifest
    from trainshed.data.tokens.token_files import shard_prefixes
    from trainshed.errors import TrainshedError

    if address:
        return load_tokenizer(address)
    manifest = read_token_manifest(shard_prefixes(prefix)[0])
    if manifest is None:
        return None
    try:
        return load_tokenizer(manifest.tokenizer)
    except TrainshedError as error:
        reporter().warn(f"cannot decode: {error.what} ({manifest.tokenizer}); write --tokenizer")
        return None


def _inspect_recipe(target: str, overrides: tuple[str, ...], samples: int, rows: int, on: str, output: Output) -> int:
    from trainshed.cli.console import reporter
    from trainshed.recipe import load_cluster, load_recipe, split_overrides
    from trainshed.workflow.prepare import inspect_recipe

    for_recipe, for_cluster = split_overrides(overrides)
    recipe = load_recipe(target, for_recipe)
    _print_chat(
        inspect_recipe(recipe, load_cluster(on, for_cluster), rows=rows, samples=samples, reporter=reporter()), output
    )
    return 0


def _print_chat(inspections: list[ChatInspection], output: Output) -> None:
    from trainshed.cli.console import print_report

    if output == "text" and sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=True)
        for inspection in inspections:
            console.print(_chat_text(inspection))
        return
    data = {"schema": "trainshed.data.chat.inspect/1", "sources": [_plain(inspection) for inspection in inspections]}
    text = "\n\n".join(_chat_text(inspection, marks=True).plain for inspection in inspections)
    print_report(data, output, text)


def _plain(inspection: ChatInspection) -> dict[str, Any]:
    return asdict(inspection) | {
        "histogram": {str(bucket): count for bucket, count in inspection.histogram.items()},
        "learned_share": inspection.learned_share,
        "warnings": inspection.warnings(),
    }


def _chat_text(inspection: ChatInspection, *, marks: bool = False) -> Text:
    """Write an inspection; with `marks`, learned tokens are between marks, as colours would be lost."""
    from rich.text import Text

    text = Text("\n".join(_chat_figures(inspection)))
    for warning in inspection.warnings():
        text.append(f"\n  ! {warning}", style="yellow")
    if inspection.bad_lines:
        text.append(f"\n  ! {inspection.bad_lines:,} rows give no conversation", style="red")
        for example in inspection.bad_line_examples[:5]:
            text.append(f"\n      {example}")
    text.append("\n\n  tokens a conversation\n" + "\n".join(_histogram(inspection.histogram)))
    for conversation in inspection.samples:
        text.append_text(_conversation_text(conversation, marks=marks))
    return text


def _chat_figures(inspection: ChatInspection) -> list[str]:
    learned = f"{inspection.learned_tokens:,}"
    lines = [
        inspection.source + (f"  (template: {inspection.template})" if inspection.template else ""),
        f"  sequences   {inspection.sequences:>15,}",
        f"  tokens      {inspection.tokens:>15,}   shortest {inspection.shortest:,}, longest {inspection.longest:,}",
        f"  learned     {learned:>15}   {inspection.learned_share:.1%} of the tokens",
    ]
    if inspection.sequence_length is not None and inspection.packing_efficiency is not None:
        share = f"{inspection.packing_efficiency:.1%}"
        lines.append(f"  packed      {share:>15}   of rows of {inspection.sequence_length:,} tokens, estimated")
    if inspection.roles:
        lines.append("  roles       " + ", ".join(f"{role} {count:,}" for role, count in inspection.roles.items()))
    if inspection.begin_with_bos is not None:
        lines.append(f"  BOS         {inspection.begin_with_bos:>15,}   begin with it, {inspection.double_bos:,} twice")
    if inspection.counts.truncated:
        lines.append(f"  truncated   {inspection.counts.truncated:>15,}")
    return lines


def _conversation_text(conversation: ShownConversation, *, marks: bool) -> Text:
    from rich.text import Text

    head = (
        f"\n\n  conversation {conversation.number:,} ({conversation.tokens:,} tokens, {conversation.learned:,} learned)"
    )
    text, was_learned, shown = Text(f"{head}\n"), False, 0
    for run in conversation.runs:
        if marks and run.learned != was_learned:
            text.append("⟦" if run.learned else "⟧")
        style = "green" if run.learned else "dim"
        text.append(run.text.replace("\n", "⏎\n"), style=f"{style} bold reverse" if run.special else style)
        was_learned, shown = run.learned, shown + run.tokens
    if marks and was_learned:
        text.append("⟧")
    if shown < conversation.tokens:
        text.append(f"\n  … {conversation.tokens - shown:,} more tokens")
    return text


def _inspection_text(inspection: TokenInspection) -> str:
    from trainshed.cli.console import format_amount

    files = "file" if inspection.shards == 1 else "shards"
    size = format_amount(inspection.file_bytes, "B")
    lines = [
        f"{inspection.prefix}  ({inspection.shards} {files}, {inspection.dtype}, {size})",
        f"  documents   {inspection.documents:>15,}"
        + (f"   ({inspection.empty_documents:,} empty)" if inspection.empty_documents else ""),
        f"  tokens      {inspection.tokens:>15,}   largest id {inspection.largest_id:,}",
    ]
    if inspection.bytes_per_token is not None:
        lines.append(f"  bytes/token {inspection.bytes_per_token:>15.2f}")
    if inspection.eod:
        inside = f", {inspection.eod_inside_documents:,} inside documents" if inspection.eod_inside_documents else ""
        lines.append(
            f"  EOD         {inspection.eod_count:>15,}   {inspection.eod['text']} ({inspection.eod['id']}){inside}"
        )
    if inspection.bos:
        lines.append(f"  BOS         {inspection.bos_count:>15,}   {inspection.bos['text']} ({inspection.bos['id']})")
    lines.append(
        f"  length      {inspection.mean_length:>15,.1f}   tokens a document, shortest {inspection.shortest:,}, "
        f"longest {inspection.longest:,}"
    )
    lines += ["", "  tokens a document", *_histogram(inspection.histogram)]
    for sample in inspection.samples:
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
        eighths = round(count / most * _HISTOGRAM_CELLS * 8)
        bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
        if count and not bar:
            bar = "▏"
        lines.append(f"    {2**bucket:>10,} – {2 ** (bucket + 1) - 1:<10,} {count:>12,}  {bar}".rstrip())
    return lines
