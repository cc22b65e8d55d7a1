"""Megatron-core itself: its GPTModel with our files computes what transformers computes, and we read what it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.models.megatron_folders import LLAMA3, assert_equal, written
from support.models.mtp_models import both_logits, save_with_mtp
from support.models.tiny_models import MEGATRON_VARIANTS, hf_model, save_tiny_hf
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.megatron.legacy import MegatronLegacyWriter
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights, MegatronDistWriter
from trainshed.errors import InputError

DRIVER = Path(__file__).parent / "mcore_driver.py"
# Scaled positions and one embedding; experts; biases, learned positions and LayerNorm; latent attention, groups of
# experts and YaRN.
SAMPLE = ("llama3", "mixtral", "gpt2", "deepseek-megatron")


def drive(folder: Path, *arguments: str, rank: int = 0, world_size: int = 1) -> subprocess.Popen[str]:
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(DRIVER), str(folder), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(*processes: subprocess.Popen[str]) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=500)
            assert process.returncode == 0, output[-4000:]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def prove(folder: Path, variants: tuple[str, ...]) -> None:
    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.save(tokens, folder / "tokens.pt")
    for variant in variants:
        case = folder / variant
        config = save_tiny_hf(variant, case / "hf", **(LLAMA3 if variant == "llama3" else {}))
        with HfWeights(case / "hf") as source:
            written(MegatronDistWriter(config, dtype=torch.float32, spec="local"), source, case / "dist")
            written(MegatronLegacyWriter(config, dtype=torch.float32, spec="local"), source, case / "legacy")
    finish(drive(folder, "1", "1", "1", *variants))
    for variant in variants:
        case = folder / variant
        with torch.no_grad():
            wanted = hf_model(case / "hf")(tokens).logits
        for form in ("dist", "legacy"):
            logits = torch.load(case / f"{form}.pt")
            assert logits.shape[-1] == 128
            torch.testing.assert_close(logits[..., :96], wanted, atol=1e-4, rtol=0, msg=f"{variant} {form}")
        with HfWeights(case / "hf") as source, MegatronDistWeights(case / "saved") as saved:
            assert saved.folder.name == "iter_0000007"
            assert_equal(source, saved)


def test_megatron_core_computes_with_our_files_what_transformers_computes(tmp_path: Path) -> None:
    prove(tmp_path, SAMPLE)


@pytest.mark.full
def test_megatron_core_agrees_on_every_family(tmp_path: Path) -> None:
    prove(tmp_path, tuple(variant for variant in MEGATRON_VARIANTS if variant not in SAMPLE))


@pytest.mark.parametrize("dense_first", [0, 1])
def test_a_layer_for_multi_token_prediction_computes_what_transformers_layers_do(
    dense_first: int, tmp_path: Path
) -> None:
    case = tmp_path / "mtp"
    config, theirs, extra = save_with_mtp(case / "hf", "deepseek-megatron", dense_first=dense_first)
    rows = torch.randint(96, (2, 25), generator=torch.Generator().manual_seed(0))
    torch.save(rows[:, :-1].clone(), tmp_path / "tokens.pt")
    with HfWeights(case / "hf") as source:
        assert source.config == config
        assert source.config.mtp_layers == 1
        written(MegatronDistWriter(config, dtype=torch.float32, spec="local"), source, case / "dist")
        with pytest.raises(InputError, match=r"`mtp_layers: 1`: .* in torch_dist only"):
            MegatronLegacyWriter(config, dtype=torch.float32)
    finish(drive(tmp_path, "1", "1", "1", "mtp"))
    with torch.no_grad():
        logits, further = both_logits(theirs, extra, rows)
    torch.testing.assert_close(torch.load(case / "dist.pt")[..., :96], logits.float(), atol=1e-4, rtol=0)
    # Of the last token, what comes after it is not known there.
    got = torch.load(case / "further.pt")[:, :-1, :96]
    torch.testing.assert_close(got, further[:, :-1].float(), atol=1e-4, rtol=0)
    with HfWeights(case / "hf") as source, MegatronDistWeights(case / "saved") as saved:
        assert_equal(source, saved)


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "tp", "pp", "ep"),
    [("qwen3", 2, 1, 1), ("gpt2", 1, 2, 1), ("mixtral", 1, 1, 2), ("moonlight-megatron", 1, 1, 2)],
)
def test_ranks_of_megatron_core_hold_what_we_write_for_them(
    variant: str, tp: int, pp: int, ep: int, tmp_path: Path
) -> None:
    case = tmp_path / variant
    config = save_tiny_hf(variant, case / "hf")
    writer = MegatronLegacyWriter(config, dtype=torch.float32, tp=tp, pp=pp, ep=ep, spec="local", vocab_divisible_by=64)
    with HfWeights(case / "hf") as source:
        written(MegatronDistWriter(config, dtype=torch.float32, spec="local"), source, case / "dist")
        release = written(writer, source, case / "legacy") / "release"
    finish(*(drive(tmp_path, str(tp), str(pp), str(ep), variant, rank=rank, world_size=2) for rank in range(2)))
    for rank, folder in enumerate(sorted(release.iterdir())):
        ours = torch.load(folder / "model_optim_rng.pt", weights_only=False)["model"]
        theirs = {name: each for name, each in torch.load(case / f"rank{rank}.pt").items() if each is not None}
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
