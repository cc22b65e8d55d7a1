"""Prove that an image can do what a job will ask of it, before data is prepared and before GPUs are asked for.

    python3 prove_image.py image.json

The first stage of a job whose engine is not ours runs this in the engine's image; our own image is proven by the same
checks at the start of the first stage. `image.json` says what is expected (`launch/image_proof.py` writes it). Every
check is printed, and all of them are kept in the run's folder. Exit code 2: the image, the cluster file or the recipe
is wrong, and a new start would end the same way.

This file is copied into the job as it is: it needs the standard library of Python 3.8, and imports the engine only to
ask its own parser. What cannot be told without a GPU's driver is said, and is not a failure.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple  # noqa: UP035 - Python 3.8


class ImageCheck(NamedTuple):
    """What one check came to: `verdict` is pass, warn, fail or skipped, `hint` what to do."""

    name: str
    verdict: str
    what: str
    hint: str = ""


# What libraries say on a machine without a driver, Triton's ("0 active drivers ([]). There should only be one.") last.
_NO_DRIVER = (
    "libcuda",
    "libnvidia",
    "libamdhip",
    "NVIDIA driver",
    "CUDA driver",
    "No CUDA GPUs",
    "No HIP GPUs",
    "0 active drivers",
)
# What Megatron-LM does without where it is not installed, and does not where its import fails otherwise.
_KERNEL_PACKAGES = ("transformer_engine", "apex", "flash_attn", "mamba_ssm")
_LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib64", "/usr/local/lib", "/lib")
_MARKS = {"pass": "ok", "warn": "warn", "fail": "FAIL", "skipped": "-"}


def main(file: str) -> int:
    """Make every check, print and keep them; returns the exit code."""
    asked = json.loads(Path(file).read_text(encoding="utf-8"))
    checks = list(prove(asked))
    # What is wrong comes last: schedulers show the last line of a job that failed.
    for name, verdict, what, hint in sorted(checks, key=lambda check: check.verdict == "fail"):
        sys.stdout.write(f"{_MARKS[verdict]:<4}  {name:<12}  {what}\n")
        if hint and verdict != "pass":
            sys.stdout.write(f"      {'':<12}  {hint}\n")
    sys.stdout.flush()
    keep(asked, checks)
    return 2 if any(check.verdict == "fail" for check in checks) else 0


def prove(asked: dict[str, Any]) -> Iterator[ImageCheck]:
    """Yield every check, the cheap ones first."""
    yield check_python(asked)
    for mount in asked["mounts"]:
        yield check_mount(mount["path"], mount["read_only"])
    yield check_store(asked["run"])
    yield from check_modules(asked)
    for name, purpose in asked.get("programs", {}).items():
        yield check_command(name, purpose)
    for library in asked["libraries"]:
        yield check_library(library, asked)
    for variable, path in asked.get("files", {}).items():
        yield check_file(variable, path, asked)
    if asked["program"] is not None:
        yield check_program(asked)
    parser = PARSERS.get(asked["parser"] or "")
    if parser is not None:
        yield ask_parser(parser, asked)


def keep(asked: dict[str, Any], checks: list[ImageCheck]) -> None:
    """Leave the result in the run's folder, where that can be written."""
    rows = [{"name": name, "verdict": verdict, "what": what, "hint": hint} for name, verdict, what, hint in checks]
    file = Path(asked["run"]) / asked["verdict"]
    partial = file.with_name(file.name + ".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"schema": "trainshed.image/1", "checks": rows}, indent=1) + "\n")
        os.replace(str(partial), str(file))
    except OSError:
        pass  # a check has said so


def check_python(asked: dict[str, Any]) -> ImageCheck:
    """Hold this Python against the oldest that is wanted."""
    here, wanted = ".".join(map(str, sys.version_info[:3])), tuple(asked["python"])
    if sys.version_info[:2] < wanted:
        oldest = ".".join(map(str, wanted))
        return ImageCheck("python", "fail", f"{here}, and {oldest} or newer is needed", "take a newer image")
    return ImageCheck("python", "pass", here)


def check_mount(path: str, read_only: bool) -> ImageCheck:
    """Tell whether a volume of the cluster file is there, and can be written where it should be."""
    name = f"mount {path}"
    if not os.path.isdir(path):
        return ImageCheck(
            name, "fail", "is not there", "look at `volumes` of the cluster file, and at the claim or bucket"
        )
    if read_only:
        return ImageCheck(name, "pass" if os.access(path, os.R_OK) else "fail", "read only, as the cluster file says")
    problem = write_problem(Path(path))
    if problem is None:
        return ImageCheck(name, "pass", "is there and can be written")
    return ImageCheck(
        name, "fail", problem, "mount it for writing, or write `read_only: true` in `volumes` where that is meant"
    )


def check_store(run: str) -> ImageCheck:
    """Tell whether the run's folder can be made and written."""
    try:
        Path(run).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"{run} cannot be made: {error.strerror}"
        return ImageCheck("store", "fail", what, "look at `store` of the cluster file and at who may write there")
    problem = write_problem(Path(run))
    if problem is None:
        return ImageCheck("store", "pass", f"{run} can be written and read back")
    return ImageCheck(
        "store", "fail", f"{run}: {problem}", "look at `store` of the cluster file and at who may write there"
    )


def write_problem(folder: Path) -> str | None:
    """Return why a file cannot be written into a folder and read back, None where it can."""
    file = folder / (f".trainshed-image-{os.getpid()}")
    try:
        file.write_bytes(b"written")
        same = file.read_bytes() == b"written"
        file.unlink()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    return None if same else "gives back other bytes than were written"


def check_modules(asked: dict[str, Any]) -> Iterator[ImageCheck]:
    """Look for the modules, without loading what they consist of; then hold the engine's version."""
    for folder in reversed(asked["path"]):
        sys.path.insert(0, folder)
    hint = f"take an image that has it (`trainshed image build --engine {asked['engine']}`)"
    for module in asked["modules"]:
        try:
            missing = importlib.util.find_spec(module) is None
        except ModuleNotFoundError:
            missing = True
        except Exception as error:  # a package whose own start fails
            yield without_driver("module", f"{module} cannot be loaded: {first_line(error)}", error, hint)
            continue
        if missing:
            yield ImageCheck("module", "fail", f"there is no {module} in this image", hint)
        else:
            yield ImageCheck("module", "pass", f"{module} {version_of(module)}")
    if asked["package"] is not None and asked["version"] is not None:
        yield check_version(asked["package"], asked["version"], decided=asked["parser"] != "torchtune")


def check_version(package: str, wanted: str, *, decided: bool) -> ImageCheck:
    """Hold the version of the engine against the one that the job was rendered for.

    Another version is a warning where the parser decides whether it fits.
    """
    here = version_of(package)
    numbers = here.split(".")[:2]
    # A source that nobody released calls itself 0.0.0; a commit has no number to compare.
    if not here or numbers == ["0", "0"] or not wanted.replace(".", "").isdigit():
        return ImageCheck("version", "skipped", f"{package} {here or 'of no release'}; the job is for {wanted}")
    if numbers == wanted.split(".")[:2]:
        return ImageCheck("version", "pass", f"{package} {here}")
    what = f"{package} {here}, and the job is for {wanted}"
    hint = f'write `engine.version: "{here}"` if it is known here, or take another image'
    return ImageCheck("version", "warn" if decided else "fail", what, hint)


def version_of(module: str) -> str:
    """Return the version of a module's package; empty where it has none."""
    if module == "megatron.core":
        try:
            spec = importlib.util.find_spec("megatron.core")
            folders = list(spec.submodule_search_locations or []) if spec is not None else []
            values: dict[str, Any] = {}
            exec((Path(folders[0]) / "package_info.py").read_text(encoding="utf-8"), values)
            return str(values["__version__"])
        except Exception:
            return ""
    from importlib import metadata

    for name in (module.partition(".")[0], module.partition(".")[0].replace("_", "-")):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_command(name: str, purpose: str) -> ImageCheck:
    """Look for a program that others than the job itself call (KubeRay starts `ray`): they may have it elsewhere."""
    path = shutil.which(name)
    if path is not None:
        return ImageCheck("command", "pass", path)
    hint = "build the image with `trainshed image build --ray`, or take one that has it"
    return ImageCheck("command", "warn", f"there is no {name} in this image: {purpose}", hint)


def check_library(names: str, asked: dict[str, Any]) -> ImageCheck:
    """Look for a library of the fabric where the loader does; `a|b`: one of them."""
    wanted = names.split("|")
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [*asked["library_path"], *_LIBRARY_FOLDERS]
    folders += [str(path) for folder in _LIBRARY_FOLDERS for path in Path(folder).glob("*-linux-gnu")]
    cached = loader_cache()
    for name in wanted:
        for folder in folders:
            if os.path.exists(os.path.join(folder, name)):
                return ImageCheck("library", "pass", f"{name} in {folder}")
        if name in cached:
            return ImageCheck("library", "pass", name)
    what = f"there is no {' or '.join(wanted)}, which {asked['fabric']} needs"
    hint = "build the image with `trainshed image build --fabric`, or take one that has it"
    # Without an image the nodes with GPUs have libraries of their own.
    return ImageCheck("library", "fail" if asked["image"] else "warn", what, hint)


def check_file(variable: str, path: str, asked: dict[str, Any]) -> ImageCheck:
    """Look for a file that a variable of the fabric names: without it NCCL warns, and is slow."""
    if os.path.isfile(path):
        return ImageCheck("file", "pass", f"{path} ({variable})")
    what = f"there is no {path}, which {variable} names for {asked['fabric']}"
    hint = f"build the image with `trainshed image build --fabric`, or write `environment: {{{variable}: PATH}}`"
    return ImageCheck("file", "fail" if asked["image"] else "warn", what, hint)


def loader_cache() -> str:
    """Return the names that the loader has in its cache; empty where it has none."""
    for program in ("ldconfig", "/sbin/ldconfig"):
        try:
            done = subprocess.run([program, "-p"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
        except OSError:
            continue
        return done.stdout.decode(errors="replace")
    return ""


def check_program(asked: dict[str, Any]) -> ImageCheck:
    """Look for what torchrun is to start."""
    if os.path.isfile(asked["program"]):
        return ImageCheck("program", "pass", asked["program"])
    what = f"there is no {asked['program']} in this image"
    return ImageCheck("program", "fail", what, "write its path as `engine.program`, or take another image")


def ask_parser(parser: Any, asked: dict[str, Any]) -> ImageCheck:
    """Hand every argument to the engine's own parser."""
    os.environ.update(asked["environment"])
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(asked["world_size"])})
    stdout = sys.stdout
    try:
        sys.stdout = sys.stderr  # what engines print while they are loaded
        what = parser(asked)
    except SystemExit as error:
        return ImageCheck(
            "arguments", "fail", f"its parser refuses them (exit code {error.code}): see above", _OTHER_VERSION
        )
    except (ImportError, OSError) as error:
        return without_driver("arguments", f"its parser cannot be loaded: {first_line(error)}", error, _OTHER_IMAGE)
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        return without_driver("arguments", what, error, _OTHER_VERSION)
    finally:
        sys.stdout = stdout
    return ImageCheck("arguments", "pass", what)


_OTHER_VERSION = "`engine.version` must be the version that the image has; `engine.args` only what that version knows"
_OTHER_IMAGE = "take an image whose parts fit together"


def without_driver(name: str, what: str, error: BaseException, hint: str) -> ImageCheck:
    """Return a failure; where a driver is missing, that it cannot be told here."""
    if lacks_driver(error):
        return ImageCheck(name, "skipped", f"cannot be told without a GPU: {first_line(error)}")
    return ImageCheck(name, "fail", what, hint)


def lacks_driver(error: BaseException) -> bool:
    """Tell whether an error says that this machine has no driver of a GPU."""
    return any(word in str(error) for word in _NO_DRIVER)


def hide_what_needs_a_driver() -> list[str]:
    """Let packages whose import fails without a driver seem absent, and return their names.

    Triton 3.2, which came with PyTorch 2.6, asks for the driver where a kernel is only declared: without a GPU nobody
    can import Transformer Engine then, nor Megatron-LM, which expects it to be there or not (verl#904).
    """
    hidden = []
    for name in _KERNEL_PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        except Exception as error:
            if lacks_driver(error):
                sys.modules[name] = None  # type: ignore[assignment]
                hidden.append(name)
    return hidden


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, and the next where it only announces that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def parse_megatron(asked: dict[str, Any]) -> str:
    """Ask Megatron-LM's parser, and its own check of how they fit together."""
    hidden = hide_what_needs_a_driver()
    from megatron.training import arguments  # pyrefly: ignore

    sys.argv = [asked["program"], *asked["arguments"]]
    parsed = arguments.parse_args()
    taken = f"Megatron-LM's parser takes all {len(asked['arguments'])} words"
    if hidden:  # its own check looks for them
        return f"{taken}; whether they fit together cannot be told without a GPU ({', '.join(hidden)})"
    arguments.validate_args(parsed, {"tokenizer_type": "GPT2BPETokenizer"})
    return taken


def parse_hydra(asked: dict[str, Any]) -> str:
    """Read the configuration as OmegaConf does, and the overrides as Hydra does."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # pyrefly: ignore
    from omegaconf import OmegaConf  # pyrefly: ignore

    config = OmegaConf.load(asked["config"])
    overrides = [word for word in asked["arguments"] if not word.startswith("--")]
    OverridesParser.create().parse_overrides(overrides)
    OmegaConf.to_container(config, resolve=True)
    return f"OmegaConf reads {len(config)} sections, Hydra {len(overrides)} overrides"


def parse_torchtune(asked: dict[str, Any]) -> str:
    """Hold every component of the configuration against its own signature, as `tune validate` does."""
    from omegaconf import OmegaConf  # pyrefly: ignore
    from torchtune import config as torchtune_config  # pyrefly: ignore

    config = OmegaConf.load(asked["config"])
    torchtune_config.validate(config)  # pyrefly: ignore
    return f"torchtune knows the components of all {len(config)} keys"


def parse_script(asked: dict[str, Any]) -> str:
    """Look for every name that a script imports, and hold keywords against the signatures of what it calls."""
    tree = ast.parse(Path(asked["program"]).read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("megatron"):
            module = importlib.import_module(node.module)
            names.update({alias.asname or alias.name: getattr(module, alias.name) for alias in node.names})
    calls = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and inspect.isclass(names.get(node.func.id)):
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(names[node.func.id]).bind_partial(**keywords)
            calls += 1
    return f"{len(names)} names imported, {calls} calls fit"


PARSERS = {
    "megatron": parse_megatron,
    "hydra": parse_hydra,
    "torchtune": parse_torchtune,
    "script": parse_script,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
