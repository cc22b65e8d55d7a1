"""`export` of a real run: as GGUF, in fp8, and onto the Hub; and what every door refuses before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest

from support.recipes.text_recipes import write_script, write_small_recipe
from support.servers.hub_server import COMMIT, TOKEN, Fault, HubServer, running
from trainshed.checkpoints.prove.verdict import read_verdict
from trainshed.cli import run_cli
from trainshed.errors import AccessDenied, InputError, RecipeError, StorageError
from trainshed.recipe import load_cluster, load_recipe
from trainshed.storage import LocalStore
from trainshed.workflow import check_trainable
from trainshed.workflow.prepare import open_run
from trainshed.workflow.stages import export_run
from trainshed.workflow.submit import build_job

# Of huggingface_hub's own uploads with the version of httpx beside it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@dataclass(frozen=True)
class TrainedFolder:
    """A run that has trained, in its folder; the recipe lies beside the store."""

    home: Path
    recipe: Path
    run: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedFolder:
    """One small run whose weights are exported in several ways."""
    home = tmp_path_factory.mktemp("exports")
    write_script(home)
    recipe = write_small_recipe(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert run_cli(["run", str(recipe), "export={format: gguf, dtype: q8_0}"]) == 0
    return TrainedFolder(home, recipe, next((home / "store/runs/small").iterdir()))


def export(trained: TrainedFolder, *overrides: str) -> str:
    recipe = load_recipe(str(trained.recipe), overrides)
    prepared = open_run(recipe, load_cluster("local", [f"store={trained.home}/store"]), id=trained.run.name)
    return export_run(prepared.recipe, trained.run, tokenizer=prepared.tokenizer)


def test_a_run_ends_with_a_gguf_file_that_is_proven(trained: TrainedFolder) -> None:
    folder = trained.run / "export"
    verdict = read_verdict(folder)
    assert verdict is not None
    assert verdict.passed
    assert verdict.quantization is not None
    reader = gguf.GGUFReader(folder / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("tokenizer.ggml.pre").contents() == "gpt-2"
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 280


def test_a_run_is_exported_in_fp8_and_still_serves_here(trained: TrainedFolder, tmp_path: Path) -> None:
    target = export(trained, f"export={{dtype: fp8, to: {tmp_path}/fp8}}")
    verdict = read_verdict(Path(target))
    assert verdict is not None
    assert verdict.passed
    config = json.loads((Path(target) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    asked = ["generate", target, "--prompt", "one two", "--max-tokens", "2", "--device", "cpu"]
    assert run_cli(asked) == 0


@pytest.fixture
def hub(no_cloud: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub that takes uploads as Git LFS does, from whoever has the token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_an_export_is_published_with_its_card_and_its_verdict(
    trained: TrainedFolder, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ("export={format: gguf, dtype: q8_0, to: 'hf://org/small'}",)
    assert export(trained, *wanted) == f"hf://org/small@{COMMIT}"
    files = hub.repos["org/small"]
    assert sorted(files) == ["README.md", "manifest.json", "model.gguf", "verdict.json"]
    assert files["model.gguf"] == (trained.run / "export/model.gguf").read_bytes()
    assert hub.private == {"org/small"}
    card = files["README.md"].decode()
    assert "the script numbers.py" in card
    assert "3 steps" in card
    assert "equal bit by bit" in card
    assert "global_batch: 2" in card
    assert TOKEN not in card
    # Once more: nothing is sent.
    assert export(trained, *wanted) == f"hf://org/small@{COMMIT}"
    assert len(hub.commits) == 1
    # Weights of somebody else are not mixed with ours.
    hub.repos["org/taken"] = {"model.safetensors": b"another model"}
    with pytest.raises(InputError, match="the repository has other weights already"):
        export(trained, wanted[0].replace("org/small", "org/taken"))
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    with pytest.raises(AccessDenied, match="may not write there"):
        export(trained, wanted[0].replace("org/small", "org/new"))


def test_an_upload_that_was_cut_goes_on_without_sending_large_files_again(
    trained: TrainedFolder, hub: HubServer
) -> None:
    wanted = ("export={format: gguf, dtype: q8_0, to: 'hf://org/cut'}",)
    hub.faults["/api/models/org/cut/commit/main"] = Fault(times=1, status=400)
    with pytest.raises(StorageError, match="the Hub refused the upload"):
        export(trained, *wanted)
    assert hub.count("PUT /upload/") == 1
    assert export(trained, *wanted) == f"hf://org/cut@{COMMIT}"
    assert hub.count("PUT /upload/") == 1


def test_bytes_that_arrive_otherwise_are_noticed(
    trained: TrainedFolder, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(dict[str, bytes]):
        def __getitem__(self, oid: str) -> bytes:
            return super().__getitem__(oid)[:-1] + b"?"

    hub.uploaded = Damaged()
    with pytest.raises(StorageError, match=r"other bytes than were sent: model\.gguf"):
        export(trained, "export={format: gguf, dtype: q8_0, to: 'hf://org/damaged'}")


GEMMA = (
    "model={config: {family: gemma2, layers: 2, hidden: 16, heads: 4, kv_heads: 2, head_dim: 4, ffn: 24, "
    "vocab_size: 280, max_positions: 32, rope: {base: 10000.0}}, init: random}"
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([GEMMA, "export={format: gguf}"], "gemma2 is not written as GGUF"),
        (["export={format: hf, dtype: q8_0}"], "hf is not written in q8_0"),
        (["export={format: gguf, dtype: fp8}"], "gguf is not written in fp8"),
        (["export={format: megatron, dtype: fp16}"], "megatron is not written in fp16"),
        (["export={to: 'hf://org/name@main'}"], "weights are published as a model of the Hub"),
        (["export={to: 'hf://datasets/org/name'}"], "weights are published as a model of the Hub"),
        (
            ["export={format: gguf}", "tokenizer=null", "data={synthetic: true, sequence_length: 32}"],
            "carries its token",
        ),
    ],
)
def test_every_door_refuses_it_before_anything_is_trained(tmp_path: Path, overrides: list[str], words: str) -> None:
    write_script(tmp_path)
    file = str(write_small_recipe(tmp_path))
    elsewhere = load_cluster("slurm-h100", ["machine=cpu", f"store={tmp_path}/store"])
    with pytest.raises(RecipeError, match=words):
        check_trainable(load_recipe(file, overrides), load_cluster())
    with pytest.raises(RecipeError, match=words):
        build_job(load_recipe(file, overrides), elsewhere, nodes=1)


def test_publishing_needs_a_token_by_reference(tmp_path: Path, no_cloud: None) -> None:
    write_script(tmp_path)
    file = str(write_small_recipe(tmp_path))
    recipe = load_recipe(file, ["export={to: 'hf://org/name'}"])
    with pytest.raises(InputError, match="needs a token"):
        check_trainable(recipe, load_cluster())
    elsewhere = load_cluster("slurm-h100", ["machine=cpu", f"store={tmp_path}/store"])
    with pytest.raises(RecipeError, match="have no token to publish with"):
        build_job(recipe, elsewhere, nodes=1)
    assert LocalStore(tmp_path).head("store") is None
