"""Room in the cache: runs are handed out and come back whole; how much there is is chosen and told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.models.tiny_models import tiny_config
from support.runs.small_generators import Notes
from trainshed.errors import InputError
from trainshed.serve import kv_cache
from trainshed.serve.kv_cache import BlockAllocator, ServingLimits, choose_limits, kv_bytes_per_token

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_latent_attention_keeps_latents_and_rotary_keys_alone() -> None:
    config = tiny_config("deepseek_v3")
    assert kv_bytes_per_token(config, torch.bfloat16) == 3 * (10 + 4) * 2
    whole = 3 * 4 * (10 + 5) * 2
    assert kv_bytes_per_token(config, torch.bfloat16) < whole


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), max_size=40))
def test_runs_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    places, held = BlockAllocator(32), []
    for length, which in steps:
        begin = places.allocate(length)
        if begin is not None:
            held.append(range(begin, begin + length))
        elif held:
            gone = held.pop(which % len(held))
            places.free(gone.start, len(gone))
        taken = [place for run in held for place in run]
        assert len(set(taken)) == len(taken)
        assert not taken or max(taken) < 32
        assert places.free_tokens == 32 - len(taken)
    for run in held:
        places.free(run.start, len(run))
    assert places.allocate(32) == 0


def test_the_first_run_that_is_long_enough_is_taken() -> None:
    places = BlockAllocator(10)
    assert [places.allocate(3), places.allocate(3), places.allocate(3)] == [0, 3, 6]
    places.free(3, 3)
    assert places.allocate(4) is None
    assert [places.allocate(2), places.allocate(1), places.allocate(1), places.allocate(1)] == [3, 5, 9, None]


@pytest.mark.parametrize(
    ("device", "free_tokens", "asked", "chosen"),
    [
        (CPU, 10_000, {}, ServingLimits(8, 64, 512)),
        (CUDA, 10_000, {}, ServingLimits(64, 64, 4096)),
        (CPU, 100, {}, ServingLimits(8, 64, 100)),
        (CPU, 40, {}, ServingLimits(8, 40, 40)),
        (CPU, 100, {"max_sequences": 2, "max_length": 32}, ServingLimits(2, 32, 64)),
        (CPU, 10, {"cache_tokens": 90}, ServingLimits(8, 64, 90)),
    ],
)
def test_what_is_left_open_follows_the_free_memory(
    device: torch.device,
    free_tokens: int,
    asked: dict[str, int],
    chosen: ServingLimits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = tiny_config("llama")
    each = kv_bytes_per_token(config, torch.float32)
    assert each == 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda _: free_tokens * each)
    notes = Notes()
    assert choose_limits(config, torch.float32, device, reporter=notes, **asked) == chosen
    (said,) = notes.said
    assert f"up to {chosen.max_sequences} answers at a time" in said
    assert f"a cache of {chosen.cache_tokens:,} tokens" in said
    assert ("of 64 the model knows" in said) == (chosen.max_length == 40)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"max_length": 65}, "--max-length 65 is longer than the 64 positions this model knows"),
        ({"max_length": 0}, "--max-length 0 is less than one"),
        ({"max_sequences": 0}, "--max-sequences 0 is less than one"),
        ({"max_length": 60}, "memory for the keys and values of 50 tokens (256 bytes each), not of 60"),
    ],
)
def test_room_that_there_is_not_is_refused(asked: dict[str, int], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_free_bytes", lambda _: 50 * 256)
    with pytest.raises(InputError) as refused:
        choose_limits(tiny_config("llama"), torch.float32, CPU, **asked)
    assert said in refused.value.what


def test_a_share_of_what_the_machine_or_its_container_has_left_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kv_cache._free_bytes(CPU) > 1e6, "this machine"
    (tmp_path / "meminfo").write_text("MemTotal: 32000 kB\nMemFree: 100 kB\nMemAvailable:    8000 kB\n")
    monkeypatch.setattr(kv_cache, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(kv_cache, "_CGROUP", tmp_path)
    assert kv_cache._free_bytes(CPU) == 2000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert kv_cache._free_bytes(CPU) == 2000 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert kv_cache._free_bytes(CPU) == 1000
