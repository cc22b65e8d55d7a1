"""Preference pairs as token ids, and what trl's own DPOTrainer makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainshed.models.loss import IGNORE_INDEX

END = 0
"""The token that ends an answer."""


@dataclass(frozen=True)
class TokenPair:
    """A prompt with a better and a worse answer, as token ids; answers end with `END`, as trl sees to."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    @property
    def documents(self) -> tuple[list[int], list[int]]:
        """Prompt and answer, the better one first."""
        return self.prompt + self.chosen, self.prompt + self.rejected


def random_pairs(count: int, vocab_size: int, *, seed: int = 0) -> list[TokenPair]:
    """Pairs of random tokens with prompts and answers of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(least: int, most: int) -> list[int]:
        length = int(torch.randint(least, most + 1, (), generator=generator))
        return torch.randint(1, vocab_size, (length,), generator=generator).tolist()

    return [TokenPair(tokens(1, 4), [*tokens(0, 5), END], [*tokens(0, 5), END]) for _ in range(count)]


@dataclass(frozen=True)
class PackedPairs:
    """Rows of whole pairs, padded at the end; all are int64 [R, L]."""

    tokens: torch.Tensor
    labels: torch.Tensor
    document_starts: torch.Tensor


def pack_pairs(rows: list[list[TokenPair]], length: int) -> PackedPairs:
    """Lay the pairs of each row one after the other, the better answer before the worse; the padding is a document."""
    packed = PackedPairs(*(torch.full((len(rows), length), fill) for fill in (0, IGNORE_INDEX, 0)))
    for number, pairs in enumerate(rows):
        start = 0
        for pair in pairs:
            for document in pair.documents:
                stop, answer = start + len(document), start + len(pair.prompt)
                packed.tokens[number, start:stop] = torch.tensor(document)
                packed.labels[number, answer - 1 : stop - 1] = packed.tokens[number, answer:stop]
                packed.document_starts[number, start:stop] = start
                start = stop
        assert start <= length, f"{start} tokens in a row of {length}"
        packed.document_starts[number, start:] = start
    return packed


@dataclass(frozen=True)
class TrlBatch:
    """The loss of trl on a batch, with its graph, and the figures that trl logs."""

    loss: torch.Tensor
    figures: dict[str, float]


def trl_dpo(
    model: Any,
    reference: Any,
    pairs: list[TokenPair],
    folder: Path,
    *,
    loss_type: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> TrlBatch:
    """Run trl's DPO loss on transformers models and one batch of pairs."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    words = Tokenizer(WordLevel({f"w{number}": number for number in range(model.config.vocab_size)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token=f"w{END}")
    dataset = Dataset.from_list(
        [
            {"prompt": _text(pair.prompt), "chosen": _text(pair.chosen), "rejected": _text(pair.rejected)}
            for pair in pairs
        ]
    )
    config = DPOConfig(
        str(folder),
        use_cpu=True,
        bf16=False,
        beta=beta,
        label_smoothing=label_smoothing,
        loss_type=[loss_type],
        report_to="none",
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(model, reference, config, train_dataset=dataset, processing_class=tokenizer)
    batch = trainer.data_collator(list(trainer.train_dataset))
    loss = trainer.compute_loss(model, batch)
    logged = trainer._metrics["train" if model.training else "eval"]
    return TrlBatch(loss, {name: values[-1] for name, values in logged.items()})


def _text(tokens: list[int]) -> str:
    return "".join(f" w{token}" for token in tokens)
