"""What several tests of the data room share: the oracle, and small token files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from support.models import made_tokenizers
from support.runs.preparing import MadeTokenizer, TokenizerFolder, WriteTokens
from trainshed.data.tokenize.tokenizer import Tokenizer, load_tokenizer
from trainshed.data.tokens.indexed_dataset import write_index


@pytest.fixture(scope="session")
def megatron() -> SimpleNamespace:
    """megatron-core's own dataset classes; importing them costs seconds, so once for all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.datasets import helpers, indexed_dataset
        from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
    return SimpleNamespace(
        torch=torch,
        indexed=indexed_dataset,
        helpers=helpers,
        ramp_up=RampupBatchsizeNumMicroBatchesCalculator,
    )


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Write documents as `tmp_path/NAME.bin/.idx` with our writer and return the prefix."""

    def write(name: str, documents: Sequence[Sequence[int] | np.ndarray], dtype: str = "<u2") -> str:
        prefix = str(tmp_path / name)
        arrays = [np.asarray(document, dtype) for document in documents]
        Path(prefix + ".bin").write_bytes(b"".join(array.tobytes() for array in arrays))
        lengths = np.array([len(array) for array in arrays], "<i4")
        write_index(prefix + ".idx", np.dtype(dtype), lambda: [lengths[:3], lengths[3:]])
        return prefix

    return write


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFolder:
    """The folder of a made tokenizer by the name of its kind, each made when first asked for."""

    @cache
    def folder(kind: str) -> Path:
        made = made_tokenizers.KINDS[kind]()
        return made_tokenizers.save(made, made_tokenizers.CONFIGS[kind], tmp_path_factory.mktemp("tokenizer") / kind)

    return folder


@pytest.fixture(scope="session")
def made_tokenizer(tokenizer_folder: TokenizerFolder) -> MadeTokenizer:
    """A made tokenizer by the name of its kind, read once."""

    @cache
    def made(kind: str) -> Tokenizer:
        return load_tokenizer(str(tokenizer_folder(kind)))

    return made


@pytest.fixture(scope="session")
def tokenizer(made_tokenizer: MadeTokenizer) -> Tokenizer:
    """The made tokenizer for tests that are not about tokenizers."""
    return made_tokenizer("gpt2")
