"""`trainshed data verify`: prove token files."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from trainshed.cli.console import Output


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
    from trainshed.data.encode.tokenizer import load_tokenizer
    from trainshed.data.tokens.verify import verify as verify_files

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
