"""`trainshed serve`: the HTTP API of a checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from trainshed.cli.asked_model import DEFAULTS, ModelOptions
from trainshed.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from trainshed.reporting import Reporter
    from trainshed.serve.http.model import ServedModel


def serve(
    checkpoint: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    max_length: int | None = None,
    max_sequences: int | None = None,
    max_questions: int = 256,
    model: ModelOptions = DEFAULTS,
    grace: float = 30.0,
    api_key_env: str | None = None,
) -> int:
    """Serve a checkpoint over HTTP, as OpenAI's API and as Megatron's server, with a page to try it.

    Ends with SIGTERM or Ctrl-C, once running answers are whole.

    Parameters
    ----------
    checkpoint
        A folder for transformers, a run (its name, name/id, folder or recipe file: the newest checkpoint), one of
        its checkpoints, a Megatron checkpoint, a LoRA adapter; a path, or an address in any store
        (hf://org/name[@revision], s3://…).
    host
        The address to listen at; 0.0.0.0 for everybody who can reach this machine.
    port
        The port to listen at; 0 for any that is free.
    name
        What requests call the model (default: the name of its run, else of its folder).
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
        raise _missing(error) from None
    from trainshed.cli.console import reporter

    if max_questions < 1:
        raise InputError(f"--max-questions {max_questions} answers nobody", hint="write 1 or more")
    settings = ServerSettings(host, port, _seconds("--grace", grace), max_questions, _key(api_key_env))
    shown = reporter()
    if settings.api_key is None and host not in ("127.0.0.1", "localhost", "::1"):
        shown.warn(f"everybody who can reach {host} may ask: --api-key-env wants a key of them")

    def load(progress: Reporter) -> ServedModel:
        # Here: PyTorch takes seconds to load, and the port must answer before.
        from trainshed.serve.http.model import ServedModel

        loaded, words = model.load(checkpoint, progress)
        generator = loaded.generator(
            max_sequences=max_sequences, max_length=max_length, eager=model.eager, reporter=progress
        )
        return ServedModel(name or loaded.name, generator, words)

    return serve_http(load, settings, shown)


def _missing(error: ModuleNotFoundError) -> Exception:
    ours = (error.name or "").partition(".")[0] in ("starlette", "uvicorn")
    return MissingExtra.named("serve", "`trainshed serve`") if ours else error


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise InputError(f"--api-key-env {variable}: this variable is not set", hint=f"export {variable}=…")
    return key


def _seconds(option: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise InputError(f"{option} {value} is no time", hint="write seconds, 0 or more")
    return value
