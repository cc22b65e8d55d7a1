"""vLLM's command, and which of its flags a recipe may write."""

from __future__ import annotations

import shlex

import pytest

from support.recipes.small_recipes import recipe_text
from trainshed.errors import RecipeError
from trainshed.launch.vllm import vllm_command, vllm_flags
from trainshed.recipe import Recipe, parse_recipe


def recipe_of(*overrides: str) -> Recipe:
    served = ("serve={engine: vllm, gpus: 2}", "export={format: hf}", "tokenizer=hf://org/tiny")
    return parse_recipe(recipe_text("dense"), [*served, *overrides])


def command(*overrides: str) -> str:
    return shlex.join(vllm_command(recipe_of(*overrides), "/runs/x/export", drain_seconds=90))


def test_what_the_recipe_says_becomes_flags() -> None:
    assert command("serve.max_length=32", "serve.max_sequences=8") == (
        "vllm serve /runs/x/export --served-model-name proof --host 0.0.0.0 --tensor-parallel-size 2 "
        "--shutdown-timeout 90 --max-model-len 32 --max-num-seqs 8"
    )


def test_adapters_are_served_by_name() -> None:
    adapters = "serve.adapters={one: /shared/one, org/two: 'hf://org/two'}"
    assert command(adapters, "serve.args={max_lora_rank: 64}").removeprefix(command()).strip() == (
        "--enable-lora --max-loras 2 --lora-modules one=/shared/one org/two=org/two --max-lora-rank=64"
    )


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("{gpu_memory_utilization: 0.85}", "--gpu-memory-utilization=0.85"),
        ("{enforce-eager: true}", "--enforce-eager"),
        ("{--enable-prefix-caching: false}", "--no-enable-prefix-caching"),
        ("{cudagraph_capture_sizes: [1, 2]}", "--cudagraph-capture-sizes 1 2"),
        ("{kv_cache_dtype: -x}", "--kv-cache-dtype=-x"),
        (
            "{speculative_config: '{\"num_speculative_tokens\": 2}'}",
            "'--speculative-config={\"num_speculative_tokens\": 2}'",
        ),
        ("{seed: null}", ""),
    ],
)
def test_flags_are_written_as_vllm_reads_them(args: str, words: str) -> None:
    assert command(f"serve.args={args}").removeprefix(command()).strip() == words


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        ("{enforce_eger: true}", "`--enforce-eger` is none of the flags of vLLM", "did you mean enforce-eager?"),
        ("{tensor_parallel_size: 4}", "is set by Trainshed", "write `serve.gpus`"),
        ("{max_model_len: 4}", "is set by Trainshed", "write `serve.max_length`"),
        ("{enable_lora: true}", "is set by Trainshed", "write `serve.adapters`"),
        ("{trust_remote_code: true}", "never run", "delete it"),
        ("{seed: one}", "`one` is not what --seed takes", "write a whole number"),
        ("{seed: true}", "is not what --seed takes", "write a whole number"),
        ("{dtype: bf16}", "`bf16` is not what --dtype takes", "write one of auto, half, float16, bfloat16"),
        ("{enforce_eager: 1}", "is not what --enforce-eager takes", "write true or false"),
        ("{speculative_config: '{'}", "is not what --speculative-config takes", "write JSON in quotes"),
    ],
)
def test_flags_that_vllm_would_refuse_are_refused_first(args: str, what: str, hint: str) -> None:
    with pytest.raises(RecipeError) as caught:
        command(f"serve.args={args}")
    assert what in caught.value.what
    assert hint in (caught.value.hint or "")
    assert "serve.args" in (caught.value.where or "")


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(RecipeError, match="2 problems"):
        command("serve.args={seed: one, nothing: 1}")


def test_every_known_flag_has_a_value_that_it_takes() -> None:
    samples = {"switch": True, "int": 1, "float": 0.5, "text": "x", "json": "{}", "ints": [1]}
    for flag in vllm_flags().values():
        assert flag.to_arguments(flag.choices[0] if flag.choices else samples[flag.kind]), flag
        assert flag.to_arguments(None) is None
