"""The command line: one module per noun. A module is imported only when one of its verbs is used.

`--help` stays light: nothing heavier than cyclopts is imported here, and verbs import what they need inside
their functions.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnusedCliTokensError

from trainshed import __version__
from trainshed.cli.examples import examples_text
from trainshed.errors import TrainshedError
from trainshed.redaction import redacted
from trainshed.reporting import on_long_wait

VERBS = {
    "run": ("trainshed.cli.run:run", "Run all stages of a recipe, and skip what is already done and proven."),
    "plan": ("trainshed.cli.plan:app", "Choose the layout of a training; predict its memory, time and cost."),
    "sweep": ("trainshed.cli.sweep:sweep", "Run one recipe with many settings, and compare the runs in one table."),
    "scaling": ("trainshed.cli.scaling:scaling", "Fit a scaling law to runs of several sizes, with its error."),
    "submit": ("trainshed.cli.submit:submit", "Send a recipe's job to a cluster."),
    "render": ("trainshed.cli.submit:render", "Print what submit would send, byte for byte."),
    "status": ("trainshed.cli.runs:status", "Show the state of a run and the reason for it."),
    "watch": ("trainshed.cli.watch:watch", "Follow a run live in the terminal."),
    "logs": ("trainshed.cli.runs:logs", "Print the log of a run."),
    "metrics": ("trainshed.cli.metrics:metrics", "Show step time, throughput, MFU and goodput of a run or a log."),
    "cancel": ("trainshed.cli.runs:cancel", "Stop a run; everything it has stored is kept."),
    "ls": ("trainshed.cli.runs:ls", "List the runs in the local store, and those submitted from this machine."),
    "dash": ("trainshed.cli.dash:dash", "Show the runs as a web page, or save them as one HTML file."),
    "rm": ("trainshed.cli.remove:rm", "Remove a run."),
    "clean": ("trainshed.cli.remove:clean", "List or remove artefacts that no run uses."),
    "open": ("trainshed.cli.open:open_page", "Open a tunnel to a run's server, TensorBoard or dashboard."),
    "stacks": ("trainshed.cli.stacks:stacks", "Show the Python stack of every rank, grouped."),
    "exec": ("trainshed.cli.open:exec_in", "Open a shell where a rank of a running job is."),
    "storage": ("trainshed.cli.cluster:storage_app", "Create and check the volume that a cluster's jobs share."),
    "image": ("trainshed.cli.cluster:image_app", "Build the image or the environment that jobs run in."),
    "train": ("trainshed.cli.run:train", "Run only the train stage, on this machine."),
    "serve": ("trainshed.cli.serve:serve", "Serve a checkpoint over HTTP, with OpenAI's API."),
    "verify": ("trainshed.cli.verify:verify", "Compare a layout with one process, on a shrunk model."),
    "generate": ("trainshed.cli.serve:generate", "Generate text from a checkpoint: continue a prompt, or chat."),
    "eval": ("trainshed.cli.eval:evaluate", "Score a checkpoint: perplexity, lm-eval tasks, questions."),
    "checkpoints": ("trainshed.cli.checkpoints:checkpoints", "List, verify and prune the checkpoints of a run."),
    "import": ("trainshed.cli.recipes:import_file", "Turn a NeMo, torchtune or Megatron-LM config into a recipe."),
    "doctor": ("trainshed.cli.cluster:doctor", "Check what this machine or a cluster has, lacks or has wrong."),
    "export-figures": (
        "trainshed.cli.export_figures:export_figures",
        "Export a run's metrics to TensorBoard, DLLogger, W&B, MLflow or trackio.",
    ),
    "grafana": ("trainshed.cli.export_figures:grafana", "Print a Grafana dashboard for the Prometheus metrics."),
    "schema": ("trainshed.cli.recipes:schema", "Print the JSON schema of recipes, for editors."),
    "recipes": ("trainshed.cli.recipes:app", "List the shipped recipes, copy one, check one."),
    "clusters": ("trainshed.cli.clusters:app", "List the cluster files, copy one, check one."),
    "init": ("trainshed.cli.init:app", "Write a first recipe or cluster file, from four questions or from flags."),
    "man": ("trainshed.cli.manual:man", "Print the manual page of all commands."),
}
DATA_VERBS = {
    "fetch": ("trainshed.cli.data:fetch", "Copy a corpus from the Hub, HTTP or any store to a store."),
    "prepare": ("trainshed.cli.data:prepare", "Turn text into Megatron-compatible token files."),
    "inspect": (
        "trainshed.cli.data_inspect:inspect",
        "Show what is inside token files, and which tokens are trained on.",
    ),
    "verify": ("trainshed.cli.data:verify", "Prove token files against their manifest and tokenizer."),
    "merge": ("trainshed.cli.data:merge", "Concatenate shards into one pair of files."),
    "blend": ("trainshed.cli.data_order:blend", "Show how much of each source a recipe's run will see."),
    "batch": ("trainshed.cli.data_order:batch", "Show what one training step will see."),
}
MODEL_VERBS = {
    "fetch": ("trainshed.cli.model:fetch", "Copy a model from the Hub or any store to a store."),
    "convert": (
        "trainshed.cli.model:convert",
        "Convert weights between hf, megatron and native, and prove the result.",
    ),
    "compare": ("trainshed.cli.model:compare", "Compare two models: tensors, architecture, logits."),
    "inspect": ("trainshed.cli.model:inspect", "Show what a checkpoint holds, and what was proven about it."),
    "merge": ("trainshed.cli.model:merge", "Merge a LoRA adapter into the weights it was trained on."),
}

_COMPLETION = "Let bash, zsh, fish or PowerShell complete commands, options and names."


def build_app() -> App:
    """Assemble the verbs; none of their modules is imported yet."""
    app = App(
        name="trainshed",
        help="One recipe carries a language model from raw text to a served model.",
        version=__version__,
        version_flags=["--version"],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
        # A list has no flag that empties it, and what is off unless it is written needs no default beside it.
        default_parameter=Parameter(negative_iterable=(), show_default=_shown_default),
    )
    data = App(name="data", help="Turn text into tokens, and inspect them.")
    for name, (target, summary) in VERBS.items():
        # A noun with verbs of its own says them in its module.
        epilogue = {} if target.endswith("app") else {"help_epilogue": examples_text(name)}
        app.command(target, name=name, help=summary, **epilogue)
    for name, (target, summary) in DATA_VERBS.items():
        data.command(target, name=name, help=summary, help_epilogue=examples_text(f"data {name}"))
    app.command(data)
    model = App(name="model", help="Fetch, convert, compare and inspect weights.")
    for name, (target, summary) in MODEL_VERBS.items():
        model.command(target, name=name, help=summary, help_epilogue=examples_text(f"model {name}"))
    app.command(model)
    app.command("trainshed.cli.completion:install", name="--install-completion", help=_COMPLETION)
    app.command("trainshed.cli.node:worker", name="worker", show=False)
    app.command("trainshed.cli.node:agent", name="agent", show=False)
    app.command("trainshed.cli.node:ray_driver", name="ray-driver", show=False)
    app.command("trainshed.cli.node:app", name="kubernetes", show=False)
    return app


def _shown_default(value: object) -> str | None:
    return None if value is None or value is False or value == () else str(value)


def run_cli(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code: 0 done, 1 the work failed, 2 the input is wrong."""
    debug = "--debug" in arguments
    on_long_wait(_tell_wait)
    _allow_any_encoding()
    tokens = [token for token in arguments if token != "--debug"]
    try:
        if os.environ.get("TRAINSHED_PLUGINS"):
            from trainshed.plugins import load_environment_plugins

            load_environment_plugins()
        result = build_app()(tokens, exit_on_error=False, print_error=False)
    except TrainshedError as error:
        return _fail(error, tokens, debug)
    except CycloptsError as error:
        from trainshed.errors import InputError

        command = " ".join(["trainshed", *(error.command_chain or ())])
        what = _missing_argument(error) or _unused_words(error) or str(error)
        return _fail(InputError(what, hint=f"{command} --help shows what it takes"), tokens, debug)
    except KeyboardInterrupt:
        resumed = tuple(tokens[:1]) in _RESUMED or tuple(tokens[:2]) in _RESUMED
        sys.stderr.write(f"stopped by Ctrl-C{'; the same command goes on where it was' if resumed else ''}\n")
        return 130
    except Exception as error:
        if _is_broken_pipe(error) and _reader_left():
            return 0
        return _fail(_windows_error(error) or _system_error(error) or _internal_error(error), tokens, debug)
    return result if isinstance(result, int) else 0


def _missing_argument(error: CycloptsError) -> str | None:
    """Say what is missing by the name that the help gives it; None where an option has no value, and otherwise."""
    if not isinstance(error, MissingArgumentError) or (argument := error.argument) is None:
        return None
    if argument.tokens or error.unused_tokens or error.keyword is not None:
        return None
    if not argument.field_info.is_positional:
        return f"{argument.name} is missing"
    return f"{argument.name.lstrip('-').replace('-', '_').upper()} is missing"


def _unused_words(error: CycloptsError) -> str | None:
    """Say which words a command does not take; None for any other error."""
    if not isinstance(error, UnusedCliTokensError) or not error.unused_tokens:
        return None
    words = ", ".join(f"`{word}`" for word in error.unused_tokens)
    verb = "is" if len(error.unused_tokens) == 1 else "are"
    return f"{words} {verb} more than `{' '.join(['trainshed', *(error.command_chain or ())])}` takes"


_RESUMED = {
    ("run",),
    ("train",),
    ("data", "fetch"),
    ("data", "prepare"),
    ("model", "convert"),
    ("model", "fetch"),
    ("sweep",),
    ("eval",),
}
"""Commands that find what an interrupted one has left."""
_PLAIN = str.maketrans({"…": "...", "→": "->", "✓": "ok"} | dict(zip("×·•–│█▓▒░━▶▸−µ", "x.*-|#%~-=>>-u", strict=True)))


def _allow_any_encoding() -> None:
    """Write what a terminal or pipe cannot show in plain letters: a report must not fail for a typographic sign.

    Python writes UTF-8 in the C locale too. There signs become plain letters, and all other text stays as it is: an
    answer of a model must not be lost because a container has no locale.
    """
    import codecs

    def in_plain_letters(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        plain = error.object[error.start : error.end].translate(_PLAIN)
        return plain.encode("ascii", "replace").decode("ascii"), error.end

    def signs_in_plain_letters(error: UnicodeError) -> tuple[str | bytes, int]:
        assert isinstance(error, UnicodeEncodeError)
        plain = error.object[error.start : error.end].translate(_PLAIN)
        return (plain if plain.isascii() else plain.encode()), error.end

    codecs.register_error("trainshed", in_plain_letters)
    codecs.register_error("trainshed-signs", signs_in_plain_letters)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_unicode(stream):
            stream.reconfigure(errors="trainshed")
        elif isinstance(stream, io.TextIOWrapper) and is_plain_locale():
            stream.reconfigure(encoding="ascii", errors="trainshed-signs")


def is_plain_locale() -> bool:
    """Whether the environment asks for the C locale, whose terminals may not read UTF-8."""
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    return locale in ("C", "POSIX")


def _is_unicode(stream: io.TextIOWrapper) -> bool:
    return stream.encoding.lower().replace("-", "").startswith("utf")


def wants_json(tokens: Sequence[str]) -> bool:
    """Whether a command line asks for JSON, also one that cannot be parsed."""
    # Two verbs write to `--output`, and take only `-o` for the report.
    names = ("-o",) if list(tokens[:2]) in (["data", "prepare"], ["data", "merge"]) else ("-o", "--output")
    own = list(tokens[: tokens.index("--")] if "--" in tokens else tokens)
    pairs = zip(own, [*own[1:], ""], strict=True)
    return any(
        (name in names and value == "json") or name in {f"{flag}=json" for flag in names} for name, value in pairs
    )


def _windows_error(error: Exception) -> TrainshedError | None:
    """Say what Windows lacks; None for any other error, and on any other system."""
    from trainshed.this_machine import ON_WINDOWS, not_on_windows

    is_missing = isinstance(error, AttributeError) and getattr(error.obj, "__name__", None) in ("os", "signal")
    return (
        not_on_windows(f"Windows has no {getattr(error.obj, '__name__', error.obj)}.{error.name}")
        if ON_WINDOWS and is_missing
        else None
    )


def _system_error(error: Exception) -> TrainshedError | None:
    """Say what the operating system refused; None where the fault may be ours."""
    import errno

    from trainshed.errors import AccessDenied, NoSpace, StorageError

    if not isinstance(error, OSError) or error.errno is None:
        return None
    what = (error.strerror or str(error)).lower()
    where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
    elsewhere = "or write elsewhere (`cluster.store=PATH` for what a run makes)"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return AccessDenied(what, where=where, hint=f"check who may write and read there, {elsewhere}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return NoSpace(what, where=where, hint=f"free some space, {elsewhere}; then run the same command again")
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.ELOOP):
        hint = "look at what is there: a file stands where a folder is needed, or the other way round"
        if where is not None and os.path.islink(where) and not os.path.exists(where):
            hint = f"it is a link to {os.readlink(where)}, which is not there: is that disk mounted?"
        return StorageError(what, where=where, hint=hint)
    if error.errno in (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENOTCONN, errno.EMFILE, errno.ENFILE):
        return StorageError(what, where=where, hint="look at the disk or mount, then run the same command again")
    return None


def _internal_error(error: Exception) -> TrainshedError:
    """Return the error of a plugin that failed, or of Trainshed itself."""
    from trainshed.plugins import fault_place

    if (place := fault_place(error)) is not None:
        return TrainshedError(
            f"the plugin failed: {type(error).__name__}: {error}",
            where=place,
            hint="--debug prints the whole traceback",
        )
    hint = "this is a fault of Trainshed: run it again with --debug and report what it prints"
    return TrainshedError(f"{type(error).__name__}: {error}", hint=hint)


def _tell_wait(text: str) -> None:
    from trainshed.cli.console import tell_wait

    tell_wait(text)


def _is_broken_pipe(error: Exception) -> bool:
    """Whether a write found its pipe closed, which Windows calls an invalid argument."""
    import errno

    from trainshed.this_machine import ON_WINDOWS

    is_invalid = isinstance(error, OSError) and error.errno == errno.EINVAL and error.filename is None
    return isinstance(error, BrokenPipeError) or (ON_WINDOWS and is_invalid)


def _reader_left() -> bool:
    """Whether the reader of our report (head, less) has gone: that is not our failure."""
    import select

    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file at all
        return False
    if not hasattr(select, "poll"):  # Windows cannot ask a pipe; what failed was a write to one
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        return True
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    left = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if left:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # Python writes what is buffered once more when it ends
    return left


def _fail(error: TrainshedError, tokens: Sequence[str], debug: bool) -> int:
    from trainshed.cli.console import print_error, print_error_report

    if debug:
        import traceback

        # What libraries say of a request often holds its whole URL.
        sys.stderr.write(redacted(traceback.format_exc()))
    if wants_json(tokens):
        print_error_report(error)
    print_error(error)
    return error.exit_code
