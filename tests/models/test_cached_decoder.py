"""The decoder with a memory says what the decoder that trains says, however the tokens come to it."""

from __future__ import annotations

import pytest
import torch

from support.models.one_process import token_rows
from support.models.tiny_models import MEGATRON_LATENT, VARIANTS, tiny_config
from support.runs.small_generators import fresh_chunk
from trainshed.catalog import model_preset
from trainshed.models.cached_decoder import (
    CachedDecoder,
    PerSequenceAttention,
    SequenceSpan,
    put_gates_first,
)
from trainshed.models.collectives import ParallelAxes
from trainshed.models.decoder import DecoderStage
from trainshed.models.latent_attention import MultiHeadLatentAttention
from trainshed.recipe import ModelConfig

LENGTH = 30


def trained_states(chunk: DecoderStage, tokens: torch.Tensor) -> torch.Tensor:
    """One pass of training's own forward: [B, S, H]."""
    rest = chunk.config.max_positions - tokens.shape[1]
    with torch.no_grad():
        # Its tables are as long as the model: what is put behind changes nothing before it.
        return chunk(torch.nn.functional.pad(tokens, (0, rest))).transpose(0, 1)[:, : tokens.shape[1]]


def states(decoder: CachedDecoder, tokens: torch.Tensor, cuts: list[list[int]], begins: list[int]) -> torch.Tensor:
    """Read rows of tokens [B, S] part by part, all rows in each step, row b's keys from place `begins[b]` on."""
    found = torch.empty(*tokens.shape, decoder.config.hidden)
    done = [0] * len(tokens)
    for step in range(max(map(len, cuts))):
        spans, new, positions, rows = [], [], [], []
        for row, cut in enumerate(cuts):
            if step < len(cut):
                count = cut[step]
                spans.append(SequenceSpan(len(new), count, begins[row], done[row] + count))
                new += tokens[row, done[row] : done[row] + count].tolist()
                positions += range(done[row], done[row] + count)
                rows += [row] * count
                done[row] += count
        at = torch.tensor(positions)
        places = at + torch.tensor([begins[row] for row in rows])
        with torch.inference_mode():
            # What `trained_states` computes is as long as the model.
            table_rows = torch.tensor(decoder.table_rows(positions, decoder.config.max_positions))
            out = decoder.hidden(torch.tensor(new), at, places, PerSequenceAttention(spans), table_rows=table_rows)
        found[torch.tensor(rows), at] = out
    return found


# Those for Megatron differ from other latent ones by their lengths: whole rows of scores would fill the memory.
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant not in MEGATRON_LATENT])
def test_token_by_token_in_parts_and_whole_are_what_training_computes(variant: str) -> None:
    config = tiny_config(variant)
    chunk = fresh_chunk(config)
    tokens = token_rows(config, 3, LENGTH)
    expected = trained_states(chunk, tokens)
    cuts = [[1] * LENGTH, [7, 1, 1, 12, 9], [LENGTH]]
    found = states(CachedDecoder(chunk, 200), tokens, cuts, begins=[100, 3, 50])
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("variant", ["deepseek_v3", "deepseek-plain"])
def test_latents_are_expanded_where_that_takes_fewer_products(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways compute the same, also side by side in one step and after tokens that are cached already."""
    config = tiny_config(variant)
    chunk = fresh_chunk(config)
    tokens = token_rows(config, 2, LENGTH)
    expected = trained_states(chunk, tokens)
    cuts = [[11, 1, 18], [1, 11, 11, 7]]
    expanded: list[int] = []
    original = MultiHeadLatentAttention.expanded_attention

    def counting(module: MultiHeadLatentAttention, query: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
        expanded.append(len(query))
        return original(module, query, compressed)

    monkeypatch.setattr(MultiHeadLatentAttention, "expanded_attention", counting)
    for least, lengths in ((11, [11, 18, 11, 11]), (1000, []), (0, [11, 1, 18, 1, 11, 11, 7])):
        expanded.clear()
        monkeypatch.setattr(MultiHeadLatentAttention, "expands", lambda _, queries, keys, n=least: queries >= n)
        found = states(CachedDecoder(chunk, 200), tokens, cuts, begins=[100, 3])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
        assert sorted(expanded) == sorted(lengths * config.layers)


def test_deepseek_v3_expands_its_latents_in_prefill_alone() -> None:
    config = model_preset("deepseek-v3")
    with torch.device("meta"):
        module = MultiHeadLatentAttention(config, ParallelAxes())
    assert not module.expands(1, 100_000)
    # 512 · (128 + 128) products for each key and head, and 2 · 512 + 64 - 192 - 128 = 768 saved for each query.
    assert not module.expands(170, 4096)
    assert module.expands(171, 4096)
    assert not module.expands(2048, 100_000)  # keys and values of 128 heads: 4.1e9 numbers


def test_nobody_sees_what_lies_beside_their_own_run() -> None:
    config = tiny_config("llama")
    chunk = fresh_chunk(config)
    decoder = CachedDecoder(chunk, 200)
    decoder.keys.fill_(torch.nan)
    decoder.values.fill_(torch.nan)
    tokens = token_rows(config, 2, LENGTH)
    found = states(decoder, tokens, [[5, 25], [1] * LENGTH], begins=[60, 90])
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("llama"),
        tiny_config("gpt2"),
        tiny_config("qwen3_moe", moe={"experts": 4, "top_k": 2, "ffn": 24, "shared_ffn": 16}),
    ],
    ids=["gated", "plain", "experts"],
)
def test_gates_put_first_change_no_number(config: ModelConfig) -> None:
    chunk = fresh_chunk(config)
    tokens = token_rows(config, 2, LENGTH)
    before = trained_states(chunk, tokens)
    put_gates_first(chunk)
    put_gates_first(chunk)
    # Columns of a product may be summed in another order where they stand elsewhere.
    torch.testing.assert_close(trained_states(chunk, tokens), before, rtol=1e-5, atol=1e-5)


def test_tokens_apart_get_what_they_get_together() -> None:
    config = tiny_config("mixtral")
    decoder = CachedDecoder(fresh_chunk(config), 8)
    tokens, at = torch.tensor([5, 9, 0, 0]), torch.zeros(4, dtype=torch.int64)
    spans = [SequenceSpan(0, 1, 0, 1), SequenceSpan(1, 1, 1, 1)]
    with torch.inference_mode():
        together = decoder.hidden(tokens, at, torch.arange(4), PerSequenceAttention(spans))
        apart = decoder.hidden(tokens, at, torch.arange(4), PerSequenceAttention(spans), one_by_one=2)
    torch.testing.assert_close(apart[:2], together[:2], rtol=0, atol=1e-5)
