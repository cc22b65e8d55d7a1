"""megatron-core asked about Megatron's checkpoints: it agrees with transformers, sees what we do not, says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models.megatron_folders import LLAMA3
from support.models.tiny_models import MEGATRON_VARIANTS, save_tiny_hf
from trainshed.checkpoints.convert.convert import convert_weights
from trainshed.checkpoints.formats import TargetFormat, open_weights
from trainshed.checkpoints.hf.weights import HfWeights
from trainshed.checkpoints.megatron import weights
from trainshed.checkpoints.megatron.torch_dist import MegatronDistWeights
from trainshed.checkpoints.megatron.weights import MegatronWeights
from trainshed.checkpoints.prove import megatron_oracle
from trainshed.checkpoints.prove.compare import compare_weights
from trainshed.checkpoints.prove.layerwise import TransformersOracle
from trainshed.checkpoints.prove.logits import (
    OUR_DECODER,
    ComparedLogits,
    LogitsComparison,
    PromptBatch,
    compare_logits,
)
from trainshed.checkpoints.prove.megatron_oracle import MegatronOracle
from trainshed.cli import run_cli
from trainshed.errors import TrainshedError
from trainshed.models.megatron_tensors import megatron_row_mappings

DIST, LEGACY = TargetFormat("megatron"), TargetFormat("megatron", "torch")
# Cut in every way there is; mixtral's experts are spelled as its own layers have them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpt2": {"pp": 2},
    "qwen2": {"tp": 2, "pp": 2},
    "qwen3_moe": {"tp": 2, "ep": 2},
    "mixtral": {"spec": "local"},
}
SAMPLE = [("llama3", DIST), ("qwen3_moe", replace(LEGACY, **LAYOUTS["qwen3_moe"]))]
REST = [
    (variant, to)
    for variant in MEGATRON_VARIANTS
    for to in (DIST, replace(LEGACY, **LAYOUTS.get(variant, {})))
    if (variant, to) not in SAMPLE
]
BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "megatron":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from trainshed.cli import run_cli

sys.exit(run_cli(sys.argv[1:]))
"""


def pair(folder: Path, to: TargetFormat, variant: str = "llama", **changes: Any) -> tuple[Path, Path]:
    """A model as transformers saves it, and converted for Megatron."""
    save_tiny_hf(variant, folder / "hf", seed=1, **changes)
    convert_weights(str(folder / "hf"), str(folder / "megatron"), to, logits=False)
    return folder / "hf", folder / "megatron"


def opened(folder: Path) -> MegatronWeights:
    weights = open_weights(folder)
    assert isinstance(weights, MegatronWeights)
    return weights


def asked(hf: Path, megatron: Path) -> LogitsComparison:
    with HfWeights(hf) as one, open_weights(megatron) as two:
        answers = compare_logits(one, two, PromptBatch.probe(96))
    assert isinstance(answers, ComparedLogits)
    return answers.comparison


def change(file: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file of torch.save holds."""
    document = torch.load(file, weights_only=False)
    edit(document)
    torch.save(document, file)


def change_args(megatron: Path, **values: Any) -> None:
    """Change the arguments in a torch_dist checkpoint, and nothing of its tensors."""
    change(megatron / "release" / "common.pt", lambda document: vars(document["args"]).update(values))


def test_compare_asks_transformers_of_one_side_and_megatron_core_of_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, megatron = pair(tmp_path, DIST)
    assert run_cli(["model", "compare", str(hf), str(megatron), "--logits", "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["logits"]
    assert [name.split()[0] for name in found["computed_by"]] == ["transformers", "megatron-core"]
    assert found["cosine"] == pytest.approx(1, abs=1e-8)
    assert 0 < found["max_error"] <= 1e-4, "two implementations never agree to the last bit"
    assert found["greedy_equal"] == found["tokens"] == 128


def test_a_conversion_from_megatron_is_judged_by_megatron_core_on_what_was_rounded(tmp_path: Path) -> None:
    _, megatron = pair(tmp_path, LEGACY)
    verdict = convert_weights(str(megatron), str(tmp_path / "back"), TargetFormat("hf"), dtype="bf16").verdict
    assert verdict.passed
    assert verdict.tensors.dtype == "bfloat16"
    assert [name.split()[0] for name in verdict.logits["computed_by"]] == ["megatron-core", "transformers"]
    assert verdict.versions["megatron-core"] == verdict.logits["computed_by"][0].split()[1]


@pytest.mark.parametrize(
    ("variant", "to"),
    [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.full) for each in REST)],
    ids=lambda value: value.name if isinstance(value, TargetFormat) else value,
)
def test_megatron_core_agrees_with_transformers_after_every_layer(
    variant: str, to: TargetFormat, tmp_path: Path
) -> None:
    hf, megatron = pair(tmp_path, to, variant, **(LLAMA3 if variant == "llama3" else {}))
    tokens, layers = PromptBatch.probe(96).ids, []
    with HfWeights(hf) as source, opened(megatron) as weights:
        with closing(MegatronOracle(weights, tokens)) as oracle:
            assert oracle.refusal is None
            assert ("put together by our reader" in oracle.name) == (to.tp * to.pp > 1)
            found = list(oracle.states(layers.append))
        wanted = list(TransformersOracle(source).states(tokens))
    assert [state.name for state in found] == [state.name for state in wanted]
    assert layers == [1] * (len(wanted) - 2)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.values, theirs.values, rtol=0, atol=1e-4, msg=ours.name)


def test_a_mistake_that_writer_and_reader_share_is_seen_by_megatron_core_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, megatron = pair(tmp_path, LEGACY)

    def swap(document: dict[str, Any]) -> None:
        for name, tensor in document["model"].items():
            if name.endswith("linear_fc1.weight"):
                document["model"][name] = torch.cat(tensor.chunk(2)[::-1])

    change(megatron / "release" / "mp_rank_00" / "model_optim_rng.pt", swap)
    # A reader that takes up for gate, as the writer of this file did.
    wrong = {0: 1, 1: 0}

    def swapped(parameter: Any) -> Any:
        found = megatron_row_mappings(parameter)
        return found if len(found) == 1 else tuple(replace(each, start=wrong[each.start]) for each in found)

    monkeypatch.setattr(weights, "megatron_row_mappings", swapped)
    with HfWeights(hf) as one, open_weights(megatron) as two:
        assert compare_weights(one, two).equal, "our reader undoes what our writer did"
    found = asked(hf, megatron)
    assert (found.passed, found.first_diverging) == (False, "layer 0")
    monkeypatch.setattr(megatron_oracle, "is_installed", lambda: False)
    assert asked(hf, megatron).passed, "and so our decoder sees nothing"


@pytest.mark.parametrize("values", [{"rotary_base": 500}, {"softmax_scale": 0.9}], ids=lambda each: next(iter(each)))
def test_another_argument_makes_another_model_of_the_same_tensors_for_megatron_core_alone(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf, megatron = pair(tmp_path, DIST)
    change_args(megatron, **values)
    prompts = PromptBatch.probe(96)
    # The architecture is given, so that only the oracle has its own from the args.
    with HfWeights(hf) as one, MegatronDistWeights(megatron, config=one.config) as two:
        assert compare_weights(one, two).equal
        answers = compare_logits(one, two, prompts)
        assert isinstance(answers, ComparedLogits)
        assert answers.comparison.computed_by[1].startswith("megatron-core ")
        assert (answers.comparison.passed, answers.comparison.first_diverging) == (False, "layer 0")
        monkeypatch.setattr(megatron_oracle, "is_installed", lambda: False)
        answers = compare_logits(one, two, prompts)
        assert isinstance(answers, ComparedLogits)
        assert answers.comparison.passed


def test_how_a_job_computed_does_not_keep_megatron_core_from_answering(tmp_path: Path) -> None:
    hf, megatron = pair(tmp_path, DIST, "mixtral")
    change_args(
        megatron,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        expert_model_parallel_size=8,
        sequence_parallel=True,
        tp_comm_overlap=True,
        cp_comm_type=["p2p"],
        bf16=True,
        params_dtype=torch.bfloat16,
        fp8="hybrid",
        recompute_granularity="full",
        gradient_accumulation_fusion=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type="alltoall",
        moe_permute_fusion=True,
        moe_aux_loss_coeff=0.01,
        cuda_graph_impl="local",
        use_cpu_initialization=None,
    )
    found = asked(hf, megatron)
    assert found.passed
    assert found.computed_by[1].startswith("megatron-core ")


def test_without_megatron_core_our_decoder_answers_and_the_reason_is_printed(tmp_path: Path) -> None:
    hf, megatron = pair(tmp_path, DIST)
    command = [sys.executable, "-c", BLOCKED, "model", "compare", str(hf), str(megatron), "--logits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"against {OUR_DECODER} (megatron-core is not installed))" in done.stdout


@pytest.mark.parametrize(
    ("variant", "values", "said"),
    [
        (
            "llama",
            {"layernorm_zero_centered_gamma": True},
            "megatron-core was not asked: norm weights stored less one need Transformer Engine layers",
        ),
        (
            "mixtral",
            {"moe_expert_capacity_factor": 1.5},
            "was not asked: `moe_expert_capacity_factor: 1.5` drops tokens",
        ),
        pytest.param("llama", {"multi_latent_attention": True}, "` is only in ", marks=pytest.mark.full),
        pytest.param(
            "llama",
            {"attention_output_gate": True},
            "linear_qkv.weight` is [96, 32] in its model, [64, 32] in the files",
            marks=pytest.mark.full,
        ),
    ],
    ids=["norms", "option", "layers", "shapes"],
)
def test_what_megatron_core_has_no_layers_for_is_told_by_name(
    variant: str, values: dict[str, Any], said: str, tmp_path: Path
) -> None:
    hf, megatron = pair(tmp_path, DIST, variant)
    with open_weights(hf) as source:
        config = source.config
    change_args(megatron, **values)
    with (
        MegatronDistWeights(megatron, config=config) as weights,
        closing(MegatronOracle(weights, PromptBatch.probe(96).ids)) as oracle,
    ):
        assert oracle.refusal is not None
        assert said in f"{oracle.name} {oracle.refusal}"


def test_a_process_that_dies_on_the_way_is_an_error_and_one_that_is_closed_is_gone(tmp_path: Path) -> None:
    _, megatron = pair(tmp_path, DIST, layers=8)
    with opened(megatron) as weights:
        oracle = MegatronOracle(weights, PromptBatch.probe(96).ids)
        process = oracle._process
        assert process is not None
        # Its answer is larger than what a pipe holds, so it is in the middle of it.
        process.kill()
        with pytest.raises(TrainshedError, match="ended before its answer did") as caught:
            list(oracle.states())
        assert caught.value.where == str(weights.folder)
        oracle.close()
        assert process.returncode is not None
