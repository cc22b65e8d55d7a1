"""`trainshed generate`: try a checkpoint at once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from trainshed.cli.asked_model import DEFAULTS, ModelOptions
from trainshed.cli.console import Output

if TYPE_CHECKING:
    from trainshed.serve.asking import Sampling
    from trainshed.serve.loading import LoadedModel


def generate(
    checkpoint: str,
    *,
    prompt: str | None = None,
    file: Path | None = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    max_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    ignore_end: Annotated[bool, Parameter(negative="")] = False,
    model: ModelOptions = DEFAULTS,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Let a model go on with a text, or answer in a chat: on a GPU where there is one, else on the CPU.

    The text appears as it comes. Without --prompt and --file, the prompt is read from stdin.

    Parameters
    ----------
    checkpoint
        A folder for transformers, a run (its name, name/id, folder or recipe file: the newest checkpoint), one of
        its checkpoints, a Megatron checkpoint, a LoRA adapter; a path, or an address in any store
        (hf://org/name[@revision], s3://…).
    prompt
        The text to go on with.
    file
        A file with it.
    chat
        Take the prompt as what a user says in a chat, written as the tokenizer's chat template has it.
    max_tokens
        The longest answer, in tokens.
    temperature
        0 (the default) always takes the likeliest token; 1 draws by the model's own probabilities.
    top_p
        Draw only from the likeliest tokens that together have this share.
    top_k
        Draw only from this many of the likeliest tokens; 0: from all.
    seed
        The same seed gives the same answer (default: another one each time).
    stop
        A text that ends the answer; may be written several times.
    ignore_end
        Go on after the model's own end token.
    model
        How it is loaded.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.serve.asking import Sampling

    text = _prompt(prompt, file)
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        ignore_end=ignore_end,
    )
    sampling.check()
    report = reporter()
    loaded, words = model.load(checkpoint, report)
    tokens = words.chat([{"role": "user", "content": text}]) if chat else words.encode(text)
    data = _answered(loaded, tokens, sampling, eager=model.eager, streams=output == "text", report=report)
    data = {"schema": "trainshed.generate/1", "model": loaded.address, "prompt": text, **data}
    if output == "json":
        print_report(data, output, "")
    else:
        report.note(
            f"{data['tokens']} tokens, {data['tokens_per_second']:.1f} a second; ended by {data['finish_reason']}"
        )
    return 0


def _prompt(prompt: str | None, file: Path | None) -> str:
    import sys

    from trainshed.errors import InputError, NotFound

    if prompt is not None and file is not None:
        raise InputError("--prompt and --file both say the prompt", hint="keep one of them")
    if prompt is None and file is None and sys.stdin.isatty():
        raise InputError("there is no prompt", hint="write --prompt TEXT, --file FILE, or pipe a text in")
    try:
        text = prompt if prompt is not None else file.read_text() if file is not None else sys.stdin.read()
    except FileNotFoundError:
        raise NotFound("there is no such file", where=str(file), hint="name a file with the prompt") from None
    except UnicodeDecodeError:
        raise InputError("the prompt is not UTF-8", where=str(file or "stdin"), hint="save it as UTF-8") from None
    if not text:
        raise InputError("the prompt is empty", where=None if file is None else str(file), hint="write --prompt TEXT")
    return text


def _answered(
    model: LoadedModel, tokens: list[int], sampling: Sampling, *, eager: bool, streams: bool, report: Any
) -> dict[str, Any]:
    """Ask the model and gather its answer, writing it to stdout as it comes if it `streams`."""
    import queue
    import sys
    import time

    from trainshed.errors import TrainshedError
    from trainshed.serve.asking import Ended, Event, Failed, Piece, PromptRead

    # Of the cache only what this one answer can need is taken.
    length = min(model.config.max_positions, len(tokens) + max(sampling.max_tokens or 0, 1))
    generator = model.generator(max_sequences=1, max_length=length, eager=eager)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    pieces: list[Piece] = []
    text, shown, began = "", 0, time.perf_counter()
    try:
        generator.submit(tokens, sampling, events.put)
        while True:
            event = events.get()
            if isinstance(event, Failed):
                raise TrainshedError(f"the model could not go on: {event.why}")
            if isinstance(event, PromptRead):
                began = time.perf_counter()
                continue
            text += event.text
            # Nobody sees blank lines: they wait for the first word.
            if streams and text.strip():
                sys.stdout.write(text[shown:])
                sys.stdout.flush()
                shown = len(text)
            if isinstance(event, Ended):
                break
            pieces.append(event)
        seconds = time.perf_counter() - began
    finally:
        generator.close()
    if streams:
        sys.stdout.write("\n" if shown else f"{text!r}\n")
        sys.stdout.flush()
    if streams and pieces and not shown:
        report.note(
            "the model says nothing but white space, shown above as Python writes it: it may be trained too little, or "
            "--temperature 1 draws something else"
        )
    return {
        "text": text,
        "tokens": len(pieces),
        "prompt_tokens": len(tokens),
        "finish_reason": event.reason,
        "tokens_per_second": len(pieces) / max(seconds, 1e-9),
    }
