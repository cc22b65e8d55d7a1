"""What a shell offers at TAB: `--install-completion`, and the names that an argument can take.

cyclopts writes the script from the commands. It offers files for `Path` arguments only, and most of ours are names or
addresses (`str`): where nothing else fits, the script offers files too. Names are looked up at TAB time, by the types
at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from cyclopts import Parameter

from trainshed.errors import InputError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

Shell = Literal["bash", "zsh", "fish", "powershell"]


def install(*, shell: Shell | None = None, to: Path | None = None) -> None:
    """Let a shell complete commands, options, and the names of recipes, clusters and runs.

    Writes a script for your shell. For bash, zsh and PowerShell it also adds the lines that load the script to
    ~/.bashrc, ~/.zshrc or the profile.

    Parameters
    ----------
    shell
        The shell; if left out, the one that runs this command.
    to
        Write the script to this file, and change no other file.
    """
    from cyclopts.completion.detect import ShellDetectionError, detect_shell
    from cyclopts.completion.install import add_to_rc_file, get_default_completion_path

    from trainshed.cli.console import print_report

    if shell is None:
        try:
            shell = detect_shell()
        except ShellDetectionError as error:
            raise InputError(
                "cannot tell which shell runs this command", hint=f"write --shell {' or '.join(get_args(Shell))}"
            ) from error
    script = to or get_default_completion_path(shell, "trainshed")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(completion_script(shell), encoding="utf-8")
    lines = [f"wrote {script}"]
    if to is None and shell != "fish":
        if add_to_rc_file(script.absolute(), "trainshed", shell):
            lines.append(f"added the lines that load it to {_STARTUP_FILES[shell]}")
        if shell == "zsh" and _start_zsh_completion():
            lines.append("added the line that starts zsh's completion (compinit) to ~/.zshrc")
    if to is None:
        lines.append(f"start a new {shell} to use it")
    print_report({}, "text", "\n".join(lines))


_STARTUP_FILES = {"bash": "~/.bashrc", "zsh": "~/.zshrc", "powershell": "your profile"}


# An argument with a description and no names to offer is a message to zsh, and a message turns insertion off.
_ZSH_KEEP = '  local insert="$compstate[insert]" list="$compstate[list]"\n'
_ZSH_FILES = """
  if (( compstate[nmatches] == 0 )); then
    compstate[insert]="$insert"
    compstate[list]="$list"
    _files
  fi"""

_FISH_FILES = """
function __fish_trainshed_names_or_files
    set -l names (__fish_trainshed_complete)
    if string match -q -- (commandline -ct)'*' $names
        printf '%s\\n' $names
    else
        __fish_complete_path (commandline -ct)
    end
end
"""


def completion_script(shell: Shell) -> str:
    """Return the script for a shell; where nothing else fits, it offers files."""
    from trainshed.cli import build_app

    script = build_app().generate_completion(shell=shell)
    if shell == "bash":
        return script.replace("complete -F ", "complete -o bashdefault -o default -F ")
    if shell == "zsh":
        before, local, body = script.partition("  local line state\n")
        body, end, _ = body.rpartition("\n}")
        return before + local + _ZSH_KEEP + body + _ZSH_FILES + end + "\n"
    if shell == "fish":
        return script.replace("(__fish_trainshed_complete)'", "(__fish_trainshed_names_or_files)'") + _FISH_FILES
    return script


def _start_zsh_completion() -> bool:
    """Start zsh's completion in ~/.zshrc if nothing there does; a Mac's zsh comes without."""
    import os

    startup = Path.home() / ".zshrc"
    text = startup.read_text(encoding="utf-8", errors="surrogateescape")
    if "compinit" in text or "oh-my-zsh" in text or "ZSH_CUSTOM" in os.environ or "ZSH" in os.environ:
        return False
    with startup.open("a", encoding="utf-8", errors="surrogateescape") as file:
        file.write(("" if text.endswith("\n") else "\n") + "autoload -Uz compinit && compinit\n")
    return True


def _clusters(_: CompletionContext) -> list[str]:
    from trainshed.recipe import known_clusters

    return sorted(known_clusters())


def _recipes(_: CompletionContext) -> list[str]:
    from trainshed.recipe import shipped_recipes

    return [*sorted(str(file) for file in Path().glob("*.yaml")), *sorted(shipped_recipes())]


def _runs(context: CompletionContext) -> list[str]:
    """The names of runs; with their ids after a `/`."""
    from trainshed.recipe import as_cluster
    from trainshed.workflow.known_runs import known_runs

    known, _problem = known_runs(as_cluster())
    return sorted({run.run if "/" in context.incomplete else run.name for run in known})


def _gpus(_: CompletionContext) -> list[str]:
    from trainshed.catalog.gpus import gpu_names

    return gpu_names()


def _machines(_: CompletionContext) -> list[str]:
    from trainshed.catalog.machines import machine_names

    return machine_names()


def _models(_: CompletionContext) -> list[str]:
    from trainshed.catalog.models import preset_names

    return preset_names()


ClusterName = Annotated[str, Parameter(completer=_clusters)]
RecipeName = Annotated[str, Parameter(completer=_recipes)]
RunName = Annotated[str, Parameter(completer=_runs)]
GpuName = Annotated[str, Parameter(completer=_gpus)]
GpuNames = Annotated[tuple[str, ...], Parameter(completer=_gpus)]
MachineName = Annotated[str, Parameter(completer=_machines)]
ModelName = Annotated[str, Parameter(completer=_models)]
