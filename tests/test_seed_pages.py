"""The pages of `docs/seeds/`: every command is run, rendered, or at least parsed with its keys; nothing is left out.

The commands of a page are run one after the other in an empty folder, in this process. `submit` and `run` are rendered
(`--dry-run --offline`). What reads a run finds one of that name in the store there. A command below `# needs …` is
parsed by the real parser, and its recipe and cluster are loaded with the keys that it changes.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.missing_parts import missing_part
from support.page_commands import PageCommand, read_page
from support.runs.observed_runs import whole_run
from trainshed.cli import build_app, run_cli
from trainshed.launch.job import CodeArchive
from trainshed.recipe import load_cluster, load_recipe, split_overrides
from trainshed.workflow import submit

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "seeds").glob("*.md"))
SEEDS = ROOT.parent / "shared" / "seeds"
SOURCES = {
    "minio": "000_e96640c4c491279b.txt",
    "gke": "001_3156682205526e5c.txt",
    "aks": "002_9e41fd948009efb1.txt",
    "eks": "003_8c2d0826a5887dc6.txt",
    "soperator": "004_3b11c8603ed0300c.txt",
}
CODE = CodeArchive("trainshed-0-stub.tar.xz", hashlib.sha256(b"stub").hexdigest(), b"stub", "0")
"""In place of our code, which takes a second to pack and to write into ConfigMaps."""
OTHER_PROGRAMS = {"kubectl", "helm", "gcloud", "az", "aws", "ssh", "curl", "hf", "pip", "bash", "sbatch"}
RENDERED = ("submit", "run")
OFFLINE = (*RENDERED, "render")
READS_A_RUN = ("status", "watch", "logs", "metrics", "checkpoints", "dash")
RECIPE_NAMES = re.compile(r"\b(?:gke|aks|eks|minio|soperator)-(?:llama|gpt)[a-z0-9-]*")


def to_run(command: PageCommand) -> list[str]:
    """The words after `trainshed` as they are run here: nothing is sent, and the Hub is not asked."""
    verb, *rest = command.words[1:]
    if verb == "run" and "--on" in rest:
        return ["render", *rest, "--offline"]
    extra = [*(["--dry-run"] if verb == "submit" else []), *(["--offline"] if verb in OFFLINE else [])]
    return [verb, *rest, *extra]


def check_parsed(words: list[str]) -> None:
    """Hold a command against the real parser, and its recipe and cluster against their schemas."""
    function, bound, *_ = build_app().parse_args(words, exit_on_error=False, print_error=False)
    values: dict[str, Any] = dict(bound.arguments)
    names = inspect.signature(function).parameters
    overrides = values.get("overrides", ())
    for_recipe, for_cluster = split_overrides(overrides)
    if values.get("on"):
        load_cluster(str(values["on"]), for_cluster)
    if "recipe" in names and "recipe" in values:
        load_recipe(str(values["recipe"]), for_recipe)


def write_dllogger(file: Path) -> None:
    """A DLLogger file of 50 steps, each as the source shows its step 36."""
    lines = []
    for step in range(50):
        data = {"reduced_train_loss": 7.97, "global_step": step, "train_step_timing in s": 45.81364059448242}
        line = {"timestamp": str(1728595441.9 + 45 * step), "type": "LOG", "step": step, "data": data}
        lines.append(b"DLLL " + orjson.dumps(line))
    file.write_bytes(b"\n".join(lines) + b"\n")


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cloud: None) -> Path:
    """An empty folder of somebody who reads a page, without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    monkeypatch.setattr(submit, "job_code", lambda *_: CODE)
    return tmp_path


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_command_of_a_page_works(path: Path, reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = read_page(path)
    assert page.stray == [], "a console block holds commands after `$`, and reasons after `# needs`"
    for name, text in page.files.items():
        (reader / name).write_text(text)
    write_dllogger(reader / "dllogger.json")
    for name in sorted(set(RECIPE_NAMES.findall(" ".join(map(str, page.commands))))):
        whole_run(reader / "store", name=name, steps=200)
    failed = []
    for command in page.commands:
        program, *words = command.words
        if program != "trainshed":
            if program not in OTHER_PROGRAMS or command.needs is None:
                failed.append(f"{command}: say what it needs")
        elif command.needs is not None:
            assert words[0] not in RENDERED, f"{command}: it can be rendered here"
            check_parsed(words)
        else:
            code = run_cli(to_run(command))
            printed = capsys.readouterr()
            if code != 0 or not (printed.out + printed.err).strip():
                failed.append(f"{command} → {code}\n{printed.err}")
    assert failed == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "seeds" / "README.md").read_text()
    assert {path.name for path in PAGES} - {"README.md"} <= set(re.findall(r"\b(\w+\.md)\b", index))


@pytest.mark.parametrize("page", SOURCES)
def test_no_step_and_no_parameter_of_the_source_is_left_out(page: str) -> None:
    file = SEEDS / SOURCES[page]
    if not file.exists():
        missing_part(f"the source recipes are not here: {SEEDS}")
    source, ours = file.read_text(), (ROOT / "docs" / "seeds" / f"{page}.md").read_text()
    prose = re.sub(r"```.*?```", "", source, flags=re.DOTALL)
    headings = [
        re.sub(r"^[\d. ]+", "", text.strip()) for text in re.findall(r"^##+ [^\w\n]*(.+)$", prose, re.MULTILINE)
    ]
    parameters = re.findall(r"--set(?:-json|-file)? [\"']?([A-Za-z_.]+)", source)
    named = [text for text in re.findall(r"`([^`\n]+)`", prose) if "/" not in text and " " not in text]
    left_out = {text for text in (*headings, *parameters, *named) if text.strip("<>:") not in ours}
    assert left_out == set()
