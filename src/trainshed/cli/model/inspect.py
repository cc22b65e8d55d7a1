"""`trainshed model inspect`: what a folder of weights is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.checkpoints.inspection import Inspection

SHOWN_FILES = 12


def inspect(
    path: str, *, on: str = "local", output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text"
) -> int:
    """Show what weights are: format, family, parameters of each part, dtype, vocabulary, layout, files, verdict.

    Looks at headers and manifests; only Megatron's checkpoints need torch for that.

    Parameters
    ----------
    path
        A folder for transformers, a Megatron checkpoint, a run (its name, name/id, folder or recipe file: the latest
        checkpoint) or one of its checkpoints.
    on
        The cluster file whose store is looked through for the name of a run.
    output
        Report as text or json.
    """
    from trainshed.checkpoints.inspection import inspect_weights
    from trainshed.cli.asked_model import checkpoint_address
    from trainshed.cli.console import print_report

    found = inspect_weights(checkpoint_address(path, on))
    print_report({"schema": "trainshed.model.inspect/1", **found.to_plain()}, output, _text(found))
    return 0


def _text(found: Inspection) -> str:
    from trainshed.cli.console import human

    config = found.config
    lines = [
        f"{found.address}  ({found.format}, {human(found.bytes, 'B')} in {len(found.files)} files)",
        f"  family      {config.family}: {config.layers} layers, hidden {config.hidden:,}, {config.heads} heads "
        f"({config.kv_heads} for keys and values)",
        f"  dtype       {', '.join(found.dtypes)}",
        f"  vocabulary  {_vocabulary(found)}",
        f"  parameters  {found.parameters:>18,}",
    ]
    for part, count in found.parts.items():
        tied = " (and head: they are one)" if part == "embedding" and config.tied_embeddings else ""
        lines.append(f"    {part:<10}{count:>18,}  {count / found.parameters:>6.1%}{tied}")
    if found.step is not None:
        lines.append(f"  step        {found.step:,}")
    if found.layout is not None:
        lines.append(f"  layout      {', '.join(f'{key} {size}' for key, size in found.layout.items())}")
    lines.append("  files")
    lines += [f"    {human(file.bytes, 'B'):>10}  {file.path}" for file in found.files[:SHOWN_FILES]]
    if len(found.files) > SHOWN_FILES:
        lines.append(f"    and {len(found.files) - SHOWN_FILES} more")
    if found.verdict is None:
        lines.append("  verdict     none: these weights were not converted here")
    else:
        lines.append(f"  verdict     {'passed' if found.verdict.passed else 'FAILED'}")
        lines += [f"    {line}" for line in found.verdict.words()]
    return "\n".join(lines)


def _vocabulary(found: Inspection) -> str:
    rows = f"{found.config.vocab_size:,}"
    if found.padded_vocab_size != found.config.vocab_size:
        rows += f", padded to {found.padded_vocab_size:,} rows"
    return rows if found.tokens is None else f"{rows}; the tokenizer knows {found.tokens:,} tokens"
