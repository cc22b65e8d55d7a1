"""Every preset has the sizes that were published: its weights are counted and compared, to the last one."""

import difflib

import pytest

from trainshed.catalog import architecture, model_entry, model_preset, preset_names
from trainshed.errors import InputError, RecipeError
from trainshed.recipe import ModelConfig, load_recipe

ONE_PER_FAMILY = [
    "tiny",
    "tiny-moe",
    "gpt2",
    "gpt-175b",
    "llama3.1-405b",
    "llama3.2-1b",
    "mistral-7b",
    "mixtral-8x22b",
    "deepseek-v3",
    "moonlight-16b-a3b",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "qwen3-235b-a22b",
    "olmo2-7b",
    "olmo3-32b",
    "gemma2-9b",
    "gemma3-1b",
    "gemma3-27b",
    "phi4",
    "phi4-mini",
    "minitron-8b",
    "gpt-oss-20b",
    "gpt-oss-120b",
    "llama4-scout",
    "llama4-maverick",
]
PROMISED = {
    "gpt": ("125m", "375m", "857m", "1.3b", "13b", "30b", "175b"),
    "gpt2": ("medium", "large", "xl"),
    "llama2": ("7b", "13b", "70b"),
    "llama3": ("8b", "70b"),
    "llama3.1": ("8b", "70b", "405b"),
    "llama3.2": ("1b", "3b"),
    "llama3.3": ("70b",),
    "mistral": ("7b",),
    "mixtral": ("8x7b", "8x22b"),
    "qwen2.5": ("0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"),
    "qwen3": ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b"),
    "olmo2": ("1b", "7b", "13b", "32b"),
    "olmo3": ("7b", "32b"),
    "gemma2": ("2b", "9b", "27b"),
    "gemma3": ("270m", "1b", "4b", "12b", "27b"),
    "phi4": ("mini",),
    "minitron": ("4b", "8b"),
    "nemotron4": ("15b", "340b"),
    "deepseek": ("v3",),
    "moonlight": ("16b-a3b",),
    "gpt-oss": ("20b", "120b"),
    "llama4": ("scout", "maverick"),
}


def count_weights(config: ModelConfig) -> int:
    query, key = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.hidden * (query + 2 * key) + query * config.hidden
    attention += config.qkv_bias * (query + 2 * key) + config.output_bias * config.hidden
    attention += config.qk_norm * (query + key if config.family.startswith("olmo") else 2 * config.head_dim)
    if config.family == "gpt_oss":
        attention += config.heads
    if (mla := config.mla) is not None:
        per_head, rank = mla.nope_dim + mla.rope_dim, mla.query_rank
        queries = config.heads * per_head * (rank or config.hidden) + (config.hidden + 1) * (rank or 0)
        keys = config.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank
        keys += mla.kv_rank * config.heads * (mla.nope_dim + mla.value_dim)
        attention = queries + keys + config.heads * mla.value_dim * config.hidden
    norm = config.hidden * (2 if config.norm == "layer" else 1)
    inputs = 2 if config.gated else 1
    first = 0
    dense = 0 if config.moe is None else config.moe.dense_first + (config.layers // 2 if config.moe.every == 2 else 0)
    if config.moe is not None:
        if dense:
            assert config.ffn is not None
            first = dense * (inputs + 1) * config.hidden * config.ffn
        width = config.moe.experts * config.moe.ffn + config.moe.shared_ffn
        block = (inputs + 1) * config.hidden * width + config.hidden * config.moe.experts
        if config.family == "gpt_oss":
            block += config.moe.experts * (1 + inputs * config.moe.ffn + config.hidden)
    else:
        assert config.ffn is not None
        block = (inputs + 1) * config.hidden * config.ffn
        block += config.mlp_bias * (inputs * config.ffn + config.hidden)
    embedding = config.vocab_size * config.hidden * (1 if config.tied_embeddings else 2)
    if config.positions == "learned":
        embedding += config.max_positions * config.hidden
    norms = 4 if config.family.startswith("gemma") else 2
    return embedding + config.layers * (attention + norms * norm) + (config.layers - dense) * block + first + norm


def hugging_face_config(config: ModelConfig) -> object:
    """The same architecture in transformers' words: an oracle that shares no code with ours."""
    import transformers as hf

    if config.family == "gpt2":
        return hf.GPT2Config(
            n_layer=config.layers, n_embd=config.hidden, n_head=config.heads, n_inner=config.ffn,
            vocab_size=config.vocab_size, n_positions=config.max_positions, tie_word_embeddings=config.tied_embeddings,
        )  # fmt: skip
    common = {
        "num_hidden_layers": config.layers, "hidden_size": config.hidden, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions, "tie_word_embeddings": config.tied_embeddings,
    }  # fmt: skip
    if config.moe is None:
        common["intermediate_size"] = config.ffn
    match config.family:
        case "llama":
            return hf.LlamaConfig(**common)
        case "mistral":
            return hf.MistralConfig(**common)
        case "qwen2":
            return hf.Qwen2Config(**{key: value for key, value in common.items() if key != "head_dim"})
        case "qwen3":
            return hf.Qwen3Config(**common)
        case "olmo2":
            return hf.Olmo2Config(**common)
        case "olmo3":
            return hf.Olmo3Config(**common)
        case "gemma2":
            return hf.Gemma2Config(**common)
        case "gemma3_text":
            return hf.Gemma3TextConfig(**common)
        case "phi3":
            return hf.Phi3Config(**common)
        case "nemotron":
            return hf.NemotronConfig(**common)
    assert config.moe is not None
    experts = {"num_experts_per_tok": config.moe.top_k}
    if (mla := config.mla) is not None:
        return hf.DeepseekV3Config(
            **{key: value for key, value in common.items() if key != "head_dim"}, **experts,
            intermediate_size=config.ffn, moe_intermediate_size=config.moe.ffn, n_routed_experts=config.moe.experts,
            n_shared_experts=config.moe.shared_ffn // config.moe.ffn, first_k_dense_replace=config.moe.dense_first,
            q_lora_rank=mla.query_rank, kv_lora_rank=mla.kv_rank, qk_nope_head_dim=mla.nope_dim,
            qk_rope_head_dim=mla.rope_dim, v_head_dim=mla.value_dim,
        )  # fmt: skip
    if config.family == "llama4_text":
        return hf.Llama4TextConfig(
            **common, **experts, intermediate_size=config.moe.ffn, intermediate_size_mlp=config.ffn or 16384,
            num_local_experts=config.moe.experts, interleave_moe_layer_step=config.moe.every,
        )  # fmt: skip
    if config.family == "gpt_oss":
        return hf.GptOssConfig(
            **common, **experts, intermediate_size=config.moe.ffn, num_local_experts=config.moe.experts
        )
    if config.family == "mixtral":
        return hf.MixtralConfig(
            **common, **experts, intermediate_size=config.moe.ffn, num_local_experts=config.moe.experts
        )
    return hf.Qwen3MoeConfig(**common, **experts, moe_intermediate_size=config.moe.ffn, num_experts=config.moe.experts)


def test_the_catalog_has_every_size_we_promised() -> None:
    wanted = {"tiny", "gpt2", "phi4", *(f"{family}-{size}" for family, sizes in PROMISED.items() for size in sizes)}
    assert wanted - set(preset_names()) == set()


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_exactly_the_published_number_of_weights(name: str) -> None:
    entry = model_entry(name)
    assert count_weights(entry.config) == entry.parameters
    assert entry.source


@pytest.mark.parametrize("name", ONE_PER_FAMILY)
def test_transformers_counts_the_same_weights(name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: the weights are not counted by transformers")
    hf = pytest.importorskip("transformers", reason="transformers is not installed: it does not count the weights")
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hugging_face_config(model_preset(name)))
    assert sum(weight.numel() for weight in model.parameters()) == model_entry(name).parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-125m", 0.125),
        ("gpt-375m", 0.064),
        ("gpt-857m", 0.36),
        ("gpt-1.3b", 1.3),
        ("gpt-13b", 12.8),
        ("gpt-30b", 30.0),
        ("gpt-175b", 174.6),
    ],
)
def test_the_sizes_of_the_azure_recipe_are_what_they_are_and_not_what_they_are_called(
    name: str, billions: float
) -> None:
    assert model_entry(name).parameters / 1e9 == pytest.approx(billions, rel=0.013)


def test_llama_31_stretches_its_positions() -> None:
    config = model_preset("llama3.1-8b")
    assert config.rope is not None
    assert config.rope.scaling is not None
    assert (config.rope.base, config.rope.scaling.kind, config.rope.scaling.factor) == (500000.0, "llama3", 8.0)


@pytest.mark.parametrize(
    ("wrong", "near"), [("llama-3.1-8b", "llama3.1-8b"), ("Qwen3_8B", "qwen3-8b"), ("gpt2-xxl", "gpt2-xl")]
)
def test_a_misspelt_preset_gets_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(InputError) as caught:
        model_preset(wrong)
    assert caught.value.what == f"there is no model preset `{wrong}`"
    assert caught.value.hint is not None
    assert near in caught.value.hint


def test_a_preset_like_nothing_known_lists_them_all() -> None:
    assert not difflib.get_close_matches("zzzzzz", preset_names(), cutoff=0.5)
    with pytest.raises(InputError, match="known presets: tiny"):
        model_preset("zzzzzz")


def test_a_recipes_preset_becomes_its_architecture() -> None:
    assert architecture(load_recipe("quickstart")) == model_preset("tiny")
    written_out = load_recipe("quickstart", ["model={from: hf://org/name}", "tokenizer=hf://org/name"])
    assert architecture(written_out) is None


def test_an_unknown_preset_is_named_with_its_line() -> None:
    with pytest.raises(RecipeError) as caught:
        architecture(load_recipe("quickstart", ["model.preset=tinny"]))
    assert caught.value.where == "command line: model.preset=…"
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean tiny")


def test_a_preset_too_small_for_its_recipe_is_refused_with_the_line() -> None:
    with pytest.raises(RecipeError) as caught:
        architecture(load_recipe("quickstart", ["tokenizer.train.vocab_size=9000"]))
    assert caught.value.what == "9000 is more than the 8192 rows of the model's embedding"
    assert caught.value.where == "command line: tokenizer.train.vocab_size=…"
