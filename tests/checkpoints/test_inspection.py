"""What weights are, by their headers alone: parts, dtypes, vocabulary, files, verdict; for most without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.models.tiny_models import VARIANTS, save_tiny_hf, tiny_config
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat
from trainshed.checkpoints.inspection import PARTS, inspect_weights, model_part
from trainshed.errors import NotFound
from trainshed.models.parameters import parameter_count, parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_every_family_belongs_to_a_part(variant: str) -> None:
    assert {model_part(each) for each in parameters(tiny_config(variant))} <= set(PARTS)


def test_a_hugging_face_folder_is_told_by_its_headers(tmp_path: Path) -> None:
    config = save_tiny_hf("qwen3_moe", tmp_path, seed=1, shard_bytes=50_000)
    found = inspect_weights(str(tmp_path))
    assert (found.format, found.config, found.dtypes) == ("hf", config, ("float32",))
    assert found.parameters == parameter_count(config)
    assert set(found.parts) == {"embedding", "attention", "router", "experts", "norms", "head"}
    assert found.parts["experts"] == 3 * 4 * (2 * 24 * 32 + 32 * 24)
    assert found.parts["norms"] == 3 * (2 * 32 + 2 * 16) + 32
    assert (found.padded_vocab_size, found.tokens, found.layout, found.verdict) == (96, None, None, None)
    assert "model.safetensors.index.json" in {file.path for file in found.files}
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert found.to_plain()["family"] == "qwen3_moe"


def test_a_native_checkpoint_is_told_by_its_manifest_and_neither_needs_torch(tmp_path: Path) -> None:
    config = save_tiny_hf("llama3", tmp_path / "hf", seed=1)
    convert_weights(str(tmp_path / "hf"), str(tmp_path / "native"), TargetFormat("native"), dtype="bf16")
    found = inspect_weights(str(tmp_path / "native"))
    assert (found.format, found.config, found.dtypes, found.step) == ("native", config, ("bfloat16",), 0)
    assert found.verdict is not None
    assert found.verdict.passed
    assert found.parts == inspect_weights(str(tmp_path / "hf")).parts
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['safetensors'] = None\n"
        "from trainshed.checkpoints.inspection import inspect_weights\n"
        f"for name in ('hf', 'native'): print(inspect_weights({str(tmp_path)!r} + '/' + name).format)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["hf", "native"], done.stderr


def test_megatrons_legacy_files_tell_their_layout_and_their_padding(tmp_path: Path) -> None:
    config = save_tiny_hf("llama", tmp_path / "hf", seed=1)
    convert_weights(
        str(tmp_path / "hf"), str(tmp_path / "legacy"), TargetFormat("megatron", "torch", tp=2, pp=2), logits=False
    )
    found = inspect_weights(str(tmp_path / "legacy"))
    assert (found.format, found.config) == ("megatron-torch", config)
    assert found.layout is not None
    assert [found.layout[key] for key in ("tp", "pp", "vp", "ep")] == [2, 2, 1, 1]
    assert (found.config.vocab_size, found.padded_vocab_size) == (96, 256)
    convert_weights(str(tmp_path / "hf"), str(tmp_path / "dist"), TargetFormat("megatron"), logits=False)
    assert inspect_weights(str(tmp_path / "dist")).layout is None


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there are no weights"):
        inspect_weights(str(tmp_path))
