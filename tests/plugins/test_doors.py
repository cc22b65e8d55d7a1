"""Plugins by every door: `run`, `plan`, `verify`, `render`, `submit`, the worker on a node, and Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import orjson
import pytest

from support.runs.job_files import write_files
from support.runs.plugged_ranks import EXAMPLES, write_plugged
from support.runs.small_runs import events
from support.terminal import at_a_terminal
from trainshed.cli import run_cli
from trainshed.cli.console import reporter
from trainshed.errors import InputError
from trainshed.launch.packaging import pack_code
from trainshed.recipe import load_cluster, load_recipe, run_id
from trainshed.workflow import check_runnable, find_start, note_other_runs, prepare_run, run
from trainshed.workflow.submit import build_job

PAGE = EXAMPLES.parent / "plugins.md"
SIZES = "layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, vocab_size: 280, max_positions: 32, ffn: 24"
RECIPE = f"""
name: plugged
plugins: [sgd_optimizer, csv_exporter, record_format]
model: {{config: {{family: llama, {SIZES}, rope: {{base: 10000.0}}}}, init: random}}
tokenizer: {{train: {{vocab_size: 280}}}}
data: {{sequence_length: 16, train: [{{path: CORPUS, format: records}}]}}
train: {{steps: 3, global_batch: 4, precision: fp32, optimizer: {{name: sgd, lr: 1.0e-2}}}}
layout: {{dp: 1, micro_batch: 2}}
observe: {{exporters: [csv], tensorboard: false, dllogger: false}}
export: {{}}
"""
SHELL = """
name: own
target: shell
plugins: [shell_target]
target_options: {nice: 1}
machine: cpu
store: STORE
python: PYTHON
preflight: false
"""
SLURM = """
name: slurm
target: slurm
machine: cpu
store: /shared
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with three plugins beside it, and another folder to stand in."""
    folder = tmp_path / "recipe"
    folder.mkdir()
    for plugin in ("sgd_optimizer", "csv_exporter", "record_format", "shell_target"):
        shutil.copy(EXAMPLES / f"{plugin}.py", folder)
    corpus = tmp_path / "corpus.rec"
    count = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    corpus.write_text("\n---\n".join(" ".join(count[(n * k) % 10] for k in range(1, 30)) for n in range(200)))
    (folder / "recipe.yaml").write_text(RECIPE.replace("CORPUS", str(corpus)))
    shell = SHELL.replace("STORE", str(tmp_path / "shared")).replace("PYTHON", sys.executable)
    (folder / "own.yaml").write_text(shell)
    (folder / "slurm.yaml").write_text(SLURM)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return folder / "recipe.yaml"


def test_run_carries_a_recipe_with_plugins_through_every_stage(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", str(recipe)]) == 0
    noted = capsys.readouterr().err
    (folder,) = Path("store/runs/plugged").iterdir()
    sources = {source.name: source.sha256 for source in load_recipe(recipe).plugin_sources}
    for name, sha256 in sources.items():
        assert f"plugin {name}: {recipe.parent / name}.py, sha256 {sha256[:12]}" in noted
        assert (folder / f"{name}.py").read_bytes() == (EXAMPLES / f"{name}.py").read_bytes()
    (start,) = events(folder, "start")
    assert start["plugins"] == sources
    assert len((folder / "losses.csv").read_text().splitlines()) == 4
    assert (folder / "export" / "config.json").is_file()


def test_another_reader_makes_other_tokens_and_another_run(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = prepare_run(load_recipe(recipe))
    tokens = set(Path("store/artefacts/tokens").iterdir())
    assert prepare_run(load_recipe(recipe)).id == first.id
    assert set(Path("store/artefacts/tokens").iterdir()) == tokens
    reader = recipe.parent / "record_format.py"
    reader.write_text(reader.read_text().replace('b"---"', 'b"--"'))
    loaded = load_recipe(recipe)
    other = find_start(loaded, load_cluster())
    note_other_runs(other, reporter())
    assert "differs in plugins.record_format (" in capsys.readouterr().err
    second = prepare_run(loaded)
    assert second.id != first.id
    assert set(Path("store/artefacts/tokens").iterdir()) > tokens
    assert second.sources[0].documents == 1
    assert first.sources[0].documents == 200


def test_python_runs_a_recipe_with_plugins(recipe: Path) -> None:
    trained = run(load_recipe(recipe, ["train.steps=2", "export=null"]))
    assert trained.steps_done == 2
    assert (trained.prepared.folder / "losses.csv").is_file()


@pytest.mark.full
def test_a_target_of_a_plugin_runs_the_stages_with_the_code_that_travels(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = str(recipe.parent / "own.yaml")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_cli(["submit", str(recipe), "--on", cluster, "--yes"]) == 0, capsys.readouterr().err
    (folder,) = (tmp_path / "shared" / "runs" / "plugged").iterdir()
    assert folder.name == run_id(load_recipe(recipe))
    assert len((folder / "losses.csv").read_text().splitlines()) == 4
    (start,) = events(folder, "start")
    assert set(start["plugins"]) == {"sgd_optimizer", "csv_exporter", "record_format"}
    assert orjson.loads((folder / "job" / "job.json").read_bytes())["plugins"] == start["plugins"]
    # What was recorded is enough to ask for it later, from anywhere.
    shutil.rmtree(recipe.parent)
    capsys.readouterr()
    assert run_cli(["status", "plugged", "-o", "json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["state"] == "done"


def test_render_prints_the_scripts_of_a_target_of_a_plugin(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["render", str(recipe), "--on", str(recipe.parent / "own.yaml")]) == 0
    text = capsys.readouterr().out
    assert text.count("#!/bin/bash\n# The stage ") == 3
    assert 'exec bash "$files"/train.node.sh' in text


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("cluster.target_options={nise: 1}", "unexpected keyword argument 'nise'"),
        ("cluster.target=shall", "`shall` is not one of local, slurm, kubernetes, ray, shell"),
        ("cluster.image=x", "`image` is not read by the target shell"),
        ("cluster.target=slurm", "`plugins` is not read on Slurm: it is for a target that a plugin registers"),
        ("cluster.plugins=null", "`shell` is not one of local, slurm, kubernetes, ray"),
        ("serve={gpus: 0}", "the target shell runs stages that end, and a server does not"),
        ("elastic={min_nodes: 1}", "the target shell starts a job with a fixed number of nodes"),
        ("engine.image=x@sha256:0", "the target shell chooses no image"),
    ],
)
def test_what_a_target_of_a_plugin_does_not_take_is_refused(
    recipe: Path, change: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["render", str(recipe), change, "--on", str(recipe.parent / "own.yaml")]) == 2
    assert what in capsys.readouterr().err.replace("\n", " ")


def test_several_nodes_are_refused_by_a_target_that_has_one(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["submit", str(recipe), "layout={dp: 2}", "--nodes", "2", "--on", str(recipe.parent / "own.yaml")]
    assert run_cli([*words, "--yes"]) == 2
    assert "a job of 2 nodes, and the target shell runs a stage on one" in capsys.readouterr().err.replace("\n", " ")


def test_a_terminal_that_is_closed_at_the_question_sends_nothing(recipe: Path, tmp_path: Path) -> None:
    end_of_file = b"\x04"
    code, shown = at_a_terminal(["submit", str(recipe), "--on", str(recipe.parent / "own.yaml")], end_of_file)
    assert code == 1
    assert "to own? [Y/n]" in shown
    assert "nothing was sent" in shown
    assert not (tmp_path / "shared").exists()
    assert run_cli(["status", "plugged"]) == 2


def test_plan_and_render_know_the_names_of_plugins(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", str(recipe), "--on", "slurm-h100", "layout=auto", "train.precision=bf16"]) == 0
    assert "planned as AdamW: what the optimizer `sgd` of a plugin takes is not known" in capsys.readouterr().out
    assert run_cli(["render", str(recipe), "--on", str(recipe.parent / "slurm.yaml"), "--out", "out"]) == 0
    assert "travels with the code" in capsys.readouterr().err.replace("\n", " ")
    (archive,) = Path("out/store/code").glob("*/*.tar.xz")
    with tarfile.open(archive) as packed:
        assert {"sgd_optimizer.py", "csv_exporter.py", "record_format.py"} < set(packed.getnames())


def test_examples_are_loaded_without_torch_on_a_machine_that_only_plans(recipe: Path) -> None:
    for example in EXAMPLES.glob("*.py"):
        shutil.copy(example, recipe.parent)
    names = ",".join(example.stem for example in EXAMPLES.glob("*.py"))
    check = (
        "import sys; from trainshed.recipe import load_recipe; "
        f"load_recipe({str(recipe)!r}, ['plugins=[{names}]']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_code_without_plugins_is_packed_as_before() -> None:
    with tarfile.open(fileobj=BytesIO(pack_code().data)) as packed:
        assert {name.partition("/")[0] for name in packed.getnames()} == {"trainshed"}


@pytest.mark.full
def test_verify_checks_a_layout_with_a_registered_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_plugged(tmp_path, "smooth_loss")
    words = ["verify", str(file), "train.loss={name: smooth, options: {z: 0.01}}", "--layout", "tp=2", "--steps", "2"]
    assert run_cli([*words, "-o", "json"]) == 0
    assert orjson.loads(capsys.readouterr().out)["verdict"] == "equal"


def test_a_loss_that_needs_the_whole_vocabulary_is_refused_where_tp_cuts_it(tmp_path: Path) -> None:
    file = write_plugged(tmp_path, "smooth_loss")
    plugin = tmp_path / "smooth_loss.py"
    text = plugin.read_text()
    plugin.write_text(text.replace("    def __init__", "    vocabulary_parallel = False\n\n    def __init__"))
    with pytest.raises(InputError, match="the loss smooth needs whole rows of logits, and tp: 2 shares"):
        run(load_recipe(file, ["train.loss=smooth", "layout={tp: 2}", f"store={tmp_path}"]))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("engine=megatron", "train.optimizer.name"),
        ("engine=nemo", "observe.exporters.csv"),
        ("engine=torchtune", "data.train.0.format"),
    ],
)
def test_a_foreign_engine_refuses_what_it_cannot_use(recipe: Path, change: str, key: str) -> None:
    loaded = load_recipe(recipe, [change])
    with pytest.raises(InputError, match=rf"{key}\): `\w+` is the [a-z ]+ of a plugin, which \w+ does not know"):
        check_runnable(loaded, load_cluster(recipe.parent / "slurm.yaml"))


def test_plugins_can_be_locked_by_whoever_runs_a_cluster(recipe: Path) -> None:
    cluster = load_cluster(recipe.parent / "slurm.yaml", ["locked=[plugins]"])
    with pytest.raises(InputError, match="`plugins` is locked by whoever runs this cluster"):
        build_job(load_recipe(recipe), cluster)


def test_a_node_with_another_plugin_of_the_same_name_stops(recipe: Path, tmp_path: Path) -> None:
    from trainshed.workflow.stages import run_stage

    job = build_job(load_recipe(recipe), load_cluster(recipe.parent / "slurm.yaml"), offline=True)
    folder = tmp_path / "job"
    folder.mkdir()
    write_files(folder, job.files)
    for source in load_recipe(recipe).plugin_sources:
        shutil.copy(source.place, folder)
    (folder / "csv_exporter.py").write_text((folder / "csv_exporter.py").read_text() + "\n")
    with pytest.raises(InputError, match="the plugin `csv_exporter` is another one on this node"):
        run_stage("prepare", folder)


def test_a_family_of_a_plugin_is_trained_exported_and_read_again(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(EXAMPLES / "tern_family.py", recipe.parent)
    keys = ["plugins=[tern_family]", "observe.exporters=null", "train.optimizer.name=adamw"]
    keys.append(f"data.train=[{{path: {tmp_path / 'corpus.rec'}, format: text, documents: line}}]")
    assert run_cli(["run", str(recipe), *keys, "model.config.family=tern"]) == 0, capsys.readouterr().err
    (folder,) = Path("store/runs/plugged").iterdir()
    config = orjson.loads((folder / "export" / "config.json").read_bytes())
    assert (config["model_type"], config["depth"], config["width"]) == ("tern", 2, 16)
    from safetensors import safe_open

    with safe_open(folder / "export" / "model.safetensors", "pt") as weights:
        assert "model.blocks.1.self_attn.q_proj.bias" in weights.keys()  # noqa: SIM118
    exported = (folder / "export").absolute()
    based = [f"model={{from: {exported}}}", f"tokenizer={exported}", "name=again", "export=null"]
    assert run_cli(["run", str(recipe), *keys, *based]) == 0, capsys.readouterr().err
    # A command that reads weights and no recipe is told by the environment.
    capsys.readouterr()
    question = ["generate", str(exported), "--prompt", "one two", "--max-tokens", "2"]
    monkeypatch.setenv("TRAINSHED_PLUGINS", "tern_family")
    monkeypatch.chdir(recipe.parent)
    assert run_cli(question) == 0, capsys.readouterr().err


def test_a_serving_engine_of_a_plugin_is_a_script_of_the_job(recipe: Path) -> None:
    shutil.copy(EXAMPLES / "sglang_server.py", recipe.parent)
    changes = ["plugins=[sglang_server]", "data=synthetic", "train.optimizer.name=adamw", "observe.exporters=null"]
    changes += ["layout=auto", "serve={engine: sglang, gpus: 2, max_length: 16, args: {mem-fraction-static: 0.8}}"]
    changes += ["tokenizer=/models/x"]
    cluster = load_cluster("slurm-h100", ["store=/shared"])
    job = build_job(load_recipe(recipe, changes), cluster, offline=True, despite_memory=True)
    (line,) = [line for line in job.files["serve.sh"].splitlines() if line.startswith("exec ")]
    assert line.startswith(f"exec python3 -m sglang.launch_server --model-path {job.run}/export --host 0.0.0.0 ")
    assert line.endswith('--context-length 16 --mem-fraction-static=0.8 --port "${TRAINSHED_PORT:-8000}"')
    serving = job.stage("serve").serving
    assert serving is not None
    assert serving.ready == "/health_generate"
    with pytest.raises(InputError, match="sglang knows no keys"):
        build_job(
            load_recipe(recipe, [*changes, "serve.api_key=KEY"]),
            load_cluster("slurm-h100", ["store=/shared", "secrets={KEY: {env: KEY}}"]),
            offline=True,
            despite_memory=True,
        )


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.stem)
def test_the_page_shows_the_examples_that_are_tested(file: Path) -> None:
    assert f"```python\n{file.read_text()}```" in PAGE.read_text()


def test_a_fault_of_a_plugin_is_said_with_its_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recipe.parent / "shell_target.py"
    target.write_text(target.read_text().replace("self.nice = nice", "self.nice = 1 // 0"))
    assert run_cli(["render", str(recipe), "--on", str(recipe.parent / "own.yaml")]) == 1
    noted = capsys.readouterr().err
    assert "the plugin failed: ZeroDivisionError" in noted
    assert "shell_target.py:15" in noted
