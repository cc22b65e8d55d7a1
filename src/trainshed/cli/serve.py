"""`trainshed serve` and `trainshed generate`: a checkpoint served over HTTP, or tried at once in the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from trainshed.cli.completion import ClusterName, RunName
from trainshed.cli.console import Output
from trainshed.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from trainshed.reporting import Reporter
    from trainshed.serve.http.server_state import ServedModel
    from trainshed.serve.loading import LoadedModel
    from trainshed.serve.request import SamplingParams
    from trainshed.serve.tokenizer import ChatTokenizer


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """How a model is loaded, for every verb that asks one.

    Parameters
    ----------
    tokenizer
        A folder with the tokenizer (default: the one beside the weights, else that of their run).
    base
        The weights that a LoRA adapter belongs to (default: what the adapter says).
    dtype
        What to compute in (default: as stored on a GPU, fp32 on a CPU).
    device
        cpu, cuda or cuda:N (default: a GPU if there is one).
    vocab_size
        The true vocabulary of a Megatron checkpoint whose args do not say it.
    eager
        On a GPU, make each step kernel by kernel rather than as a CUDA graph.
    ignore_verdict
        Take weights although the proof of their conversion failed.
    on
        The cluster whose store is searched for the run.
    """

    tokenizer: str | None = None
    base: str | None = None
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    device: str | None = None
    vocab_size: int | None = None
    eager: Annotated[bool, Parameter(negative="")] = False
    ignore_verdict: Annotated[bool, Parameter(negative="")] = False
    on: ClusterName = "local"

    def load(
        self, checkpoint: str, reporter: Reporter, *, name: str | None = None, adapters: Mapping[str, str] | None = None
    ) -> tuple[LoadedModel, ChatTokenizer]:
        """Load what somebody calls `checkpoint`, and adapters by name; `name` is what requests call it.

        Raises `MissingExtra` where the parts for it are not installed.
        """
        from trainshed import api

        model = api.load_model(
            checkpoint,
            on=self.on,
            name=name,
            dtype=self.dtype,
            device=self.device,
            tokenizer=self.tokenizer,
            base=self.base,
            adapters=adapters,
            vocab_size=self.vocab_size,
            ignore_verdict=self.ignore_verdict,
            reporter=reporter,
        )
        if model.tokenizer is None:
            from trainshed.serve.loading import no_tokenizer

            raise no_tokenizer(model.address, model.format)
        return model, model.tokenizer


DEFAULT_MODEL_OPTIONS = ModelOptions()


def serve(
    checkpoint: RunName,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    adapter: tuple[str, ...] = (),
    max_length: int | None = None,
    max_sequences: int | None = None,
    max_questions: int = 256,
    model: ModelOptions = DEFAULT_MODEL_OPTIONS,
    grace: float = 30.0,
    api_key_env: str | None = None,
) -> int:
    """Serve a checkpoint over HTTP, as OpenAI's API and as Megatron's server, with a page to try it.

    Ends with SIGTERM or Ctrl-C, once running answers are whole.

    Parameters
    ----------
    checkpoint
        A folder for transformers, a run (its name, name/id, folder or recipe file: the best checkpoint where its
        recipe keeps one, else the newest), one of its checkpoints, a Megatron checkpoint, a LoRA adapter; a path, or
        an address in any store (hf://org/name[@revision], s3://…).
    host
        The address to listen at; 0.0.0.0 for everybody who can reach this machine.
    port
        The port to listen at; 0 for any that is free.
    name
        What requests call the model (default: the name of its run, else of its folder).
    adapter
        NAME=ADDRESS of a LoRA adapter over these weights (PEFT's folder, a LoRA run or its checkpoint); may be
        written several times. Requests choose by the name, which they write as their model.
    max_length
        The most tokens of a prompt and its answer together (default: the model's own length).
    max_sequences
        How many questions are answered side by side, others wait (default: what the memory has room for).
    max_questions
        How many questions may be answered or wait at once; more are refused.
    model
        How it is loaded.
    grace
        How many seconds running answers may still take after SIGTERM.
    api_key_env
        The environment variable that holds the key which every question must bring.
    """
    try:
        from trainshed.serve.http.server import ServerSettings, serve_http
    except ModuleNotFoundError as error:
        raise _missing_extra(error) from None
    from trainshed.cli.console import reporter

    if max_questions < 1:
        raise InputError(f"--max-questions {max_questions} answers nobody", hint="write 1 or more")
    adapters = _named_adapters(adapter)
    settings = ServerSettings(host, port, _checked_seconds("--grace", grace), max_questions, read_api_key(api_key_env))
    shown = reporter()
    if settings.api_key is None and host not in ("127.0.0.1", "localhost", "::1"):
        shown.warn(f"everybody who can reach {host} may ask: --api-key-env wants a key of them")

    def load(progress: Reporter) -> ServedModel:
        # Here: PyTorch takes seconds to load, and the port must answer before.
        from trainshed.serve.http.server_state import ServedModel

        loaded, words = model.load(checkpoint, progress, name=name, adapters=adapters)
        generator = loaded.generator(
            max_sequences=max_sequences, max_length=max_length, eager=model.eager, reporter=progress
        )
        own = {} if loaded.adapters is None else loaded.adapters.tokenizers
        return ServedModel(loaded.name, generator, words, {other: brought or words for other, brought in own.items()})

    return serve_http(load, settings, shown)


def _missing_extra(error: ModuleNotFoundError) -> Exception:
    ours = (error.name or "").partition(".")[0] in ("starlette", "uvicorn")
    return MissingExtra.named("serve", "`trainshed serve`") if ours else error


def _named_adapters(written: tuple[str, ...]) -> dict[str, str]:
    """Read NAME=ADDRESS of each adapter."""
    adapters: dict[str, str] = {}
    for text in written:
        name, separator, address = text.partition("=")
        if not (name and separator and address):
            raise InputError(f"--adapter {text} is not a name and address", hint="write --adapter NAME=ADDRESS")
        if name in adapters:
            raise InputError(f"two adapters are called `{name}`", hint="give each a name of its own")
        adapters[name] = address
    return adapters


def read_api_key(variable: str | None) -> str | None:
    """Return the key in the variable that `--api-key-env` names; None where it names none."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"--api-key-env {variable}: this variable is not set", hint=f"export {variable}=…")
    return key


def _checked_seconds(option: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise InputError(f"{option} {value} is not a time", hint="write seconds, 0 or more")
    return value


def generate(
    checkpoint: RunName,
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
    adapter: str | None = None,
    model: ModelOptions = DEFAULT_MODEL_OPTIONS,
    output: Annotated[Output, Parameter(name=["-o", "--output"])] = "text",
) -> int:
    """Let a model continue a text, or answer in a chat: on a GPU if there is one, else on the CPU.

    The text appears as it comes. Without --prompt and --file, the prompt is read from stdin.

    Parameters
    ----------
    checkpoint
        A folder for transformers, a run (its name, name/id, folder or recipe file: the best checkpoint where its
        recipe keeps one, else the newest), one of its checkpoints, a Megatron checkpoint, a LoRA adapter; a path, or
        an address in any store (hf://org/name[@revision], s3://…).
    prompt
        The text to continue.
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
    adapter
        A LoRA adapter over these weights: PEFT's folder, a LoRA run or its checkpoint.
    model
        How it is loaded.
    output
        Report as text or json.
    """
    from trainshed.cli.console import print_report, reporter
    from trainshed.serve.request import SamplingParams
    from trainshed.signals import import_torch

    if max_tokens == 0:
        raise InputError("--max-tokens 0 is an answer of no tokens", hint="write 1 or more")
    text = _read_prompt(prompt, file)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_end,
    )
    sampling.check()
    report = reporter()
    if adapter is not None and model.base is not None:
        raise InputError("--base and --adapter both name weights besides CHECKPOINT", hint="leave --base out")
    # An adapter alone is merged into its base, which is then what CHECKPOINT names.
    loading = model if adapter is None else replace(model, base=checkpoint)
    import_torch()
    loaded, _ = loading.load(adapter or checkpoint, report)
    tokens = loaded.encode(text, chat=chat)
    data = _generate(loaded, tokens, sampling, eager=model.eager, streams=output == "text", report=report)
    data = {"schema": "trainshed.generate/1", "model": loaded.address, "prompt": text, **data}
    if output == "json":
        print_report(data, output, "")
    else:
        count = f"{data['tokens']} token{'s' if data['tokens'] != 1 else ''}"
        report.note(f"{count}, {data['tokens_per_second']:.1f} a second; ended by {data['finish_reason']}")
    return 0


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    import sys

    from trainshed.errors import NoSuchName

    if prompt is not None and file is not None:
        raise InputError("--prompt and --file both say the prompt", hint="keep one of them")
    if prompt is None and file is None and sys.stdin.isatty():
        raise InputError("there is no prompt", hint="write --prompt TEXT, --file FILE, or pipe a text in")
    try:
        text = prompt
        if text is None:
            text = sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise NoSuchName("there is no such file", where=str(file), hint="name a file with the prompt") from None
    except UnicodeDecodeError:
        raise InputError("the prompt is not UTF-8", where=str(file or "stdin"), hint="save it as UTF-8") from None
    if not text:
        raise InputError("the prompt is empty", where=None if file is None else str(file), hint="write --prompt TEXT")
    return text


def _generate(
    model: LoadedModel, tokens: list[int], sampling: SamplingParams, *, eager: bool, streams: bool, report: Any
) -> dict[str, Any]:
    """Ask the model and gather its answer, writing it to stdout as it comes if it `streams`."""
    import sys

    from trainshed.serve.generate import generate_text

    text, shown = "", 0

    def show(piece: str) -> None:
        nonlocal text, shown
        text += piece
        # Nobody sees blank lines: they wait for the first word.
        if streams and text.strip():
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)

    answer = generate_text(model, tokens, sampling, eager=eager, on_text=show)
    if streams:
        sys.stdout.write("\n" if shown else f"{text!r}\n")
        sys.stdout.flush()
    if streams and answer.tokens and not shown:
        report.note(
            "the model says nothing but white space, shown above as Python writes it: it may be trained too little, or "
            "--temperature 1 draws something else"
        )
    return {
        "text": answer.text,
        "tokens": len(answer.tokens),
        "prompt_tokens": answer.prompt_tokens,
        "finish_reason": answer.finish_reason,
        "tokens_per_second": answer.tokens_per_second,
    }
