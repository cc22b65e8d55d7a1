"""The architecture on Megatron's command line: every fact of it, since `--use-checkpoint-args` restores but a part."""

from __future__ import annotations

from trainshed.checkpoints.megatron.args import architecture_args
from trainshed.engines.foreign import EngineTask
from trainshed.engines.megatron.settings import Settings
from trainshed.errors import InputError
from trainshed.plan.legality.unwise import MEGATRON_VOCABULARY_MULTIPLE
from trainshed.plan.legality.wording import round_up
from trainshed.recipe import MoeLosses

_OF_ROPE = ("rotary_base", "rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor")


def sequence_length(task: EngineTask) -> int:
    """Return the tokens of a sample; synthetic data may leave it to the model."""
    return task.recipe.data.sequence_length or task.config.max_positions


def padded_vocabulary(task: EngineTask) -> int:
    """Return the rows of the embedding, as the planner counts them."""
    return round_up(task.config.vocab_size, MEGATRON_VOCABULARY_MULTIPLE * task.layout.tp)


def put_model(settings: Settings, task: EngineTask) -> None:
    """Decide the architecture."""
    config, recipe = task.config, task.recipe
    try:
        said = architecture_args(config)
    except InputError as error:
        raise InputError(error.what, where=recipe.where("model"), hint="write `engine: torch`") from None
    said["max_position_embeddings"] = max(config.max_positions, sequence_length(task))
    if config.kv_heads == config.heads:
        said["num_query_groups"] = None
    if config.gated:
        said["bias_gelu_fusion"] = None
    if config.rope is None:
        said |= dict.fromkeys(_OF_ROPE)
    if not said["use_rope_scaling"]:
        said["rope_scaling_factor"] = None
    settings.put("model", **said)
    settings.put("train.dropout", attention_dropout=recipe.train.dropout, hidden_dropout=recipe.train.dropout)
    # Said outright: left alone, Megatron makes as many rows as the tokenizer has tokens, and drops the model's others.
    settings.put("model", padded_vocab_size=padded_vocabulary(task))
    settings.choose(make_vocab_size_divisible_by=MEGATRON_VOCABULARY_MULTIPLE, transformer_impl="transformer_engine")
    if config.moe is not None:
        _put_experts(settings, task)


def _put_experts(settings: Settings, task: EngineTask) -> None:
    settings.choose(moe_grouped_gemm=True, moe_token_dispatcher_type="alltoall", moe_router_dtype="fp32")
    # As for our own engine: what the recipe does not write is as the schema defaults it.
    losses = task.recipe.train.moe or MoeLosses()
    settings.put(
        "train.moe",
        # Per sequence, as the recipe means it: it does not change with the layout.
        moe_router_load_balancing_type="seq_aux_loss" if losses.balance_loss else "none",
        moe_aux_loss_coeff=losses.balance_loss or None,
        moe_z_loss_coeff=losses.z_loss or None,
    )
