"""A run whose checkpoints, weights and tokens do not fit on its volume is refused, with the figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainshed.cli import run_cli
from trainshed.errors import RecipeError
from trainshed.plan.budget.volume import VolumeTerms, VolumeUse, check_volume, volume_terms, volume_use
from trainshed.recipe import load_cluster, load_recipe
from trainshed.recipe.section import quantity_bytes

TIB = 2**40
TERMS = VolumeTerms(
    capacity_bytes=16.0 * TIB,
    capacity_key="cluster.yaml:9 (volumes.0.create.size)",
    keep_key="recipe.yaml:5 (checkpoint.keep)",
    keep=3,
    every=1000,
    checkpoints_here=True,
    base_copies=0,
    export_bytes_per_weight=0,
    tokens_bytes=None,
)


def used(terms: VolumeTerms, steps: int | None = 10_000, weights: int = 100) -> VolumeUse:
    use = volume_use(
        terms,
        checkpoint_bytes=2 * TIB,
        weights=weights,
        exported_weights=weights,
        steps=steps,
        tokens_per_step=1000,
        vocab_size=50257,
    )
    assert use is not None
    return use


@pytest.mark.parametrize(
    ("keep", "every", "steps", "count"),
    [(3, 1000, 10_000, 4), (None, 1000, 10_000, 10), (3, 1000, 2_000, 2), (3, None, 10_000, 1), (3, 1000, None, 4)],
)
def test_one_more_checkpoint_than_is_kept_lies_there(
    keep: int | None, every: int | None, steps: int | None, count: int
) -> None:
    assert used(replace(TERMS, keep=keep, every=every), steps).checkpoints == count


def test_all_checkpoints_of_a_run_without_a_known_end_cannot_be_counted() -> None:
    terms = replace(TERMS, keep=None)
    figures = {"checkpoint_bytes": 1, "weights": 1, "exported_weights": 1, "tokens_per_step": 1, "vocab_size": 9}
    assert volume_use(terms, steps=None, **figures) is None


def test_a_full_volume_is_refused_with_what_to_write() -> None:
    terms = replace(TERMS, keep=None)
    with pytest.raises(RecipeError, match=r"20 of 16 TiB: 10 checkpoints of 2\b") as raised:
        check_volume(used(terms), terms)
    assert "write `checkpoint: {keep: 3}`, or make it larger: cluster.yaml:9" in (raised.value.hint or "")
    check_volume(used(TERMS), TERMS)


def test_weights_and_tokens_count_and_a_hint_leaves_room_for_them() -> None:
    terms = replace(TERMS, base_copies=2, export_bytes_per_weight=4, tokens_bytes=3 * TIB)
    use = used(terms, weights=TIB)
    assert use.total_bytes == (4 * 2 + 2 * 2 + 4 + 3) * TIB
    with pytest.raises(RecipeError, match="base weights 4, export 4, tokens 3") as raised:
        check_volume(use, terms)
    assert "{keep: 1}" in (raised.value.hint or "")


def test_checkpoints_that_are_kept_elsewhere_do_not_count() -> None:
    recipe = load_recipe("aks-gpt-175b", ["checkpoint.to=s3://bucket/checkpoints"])
    terms = volume_terms(recipe, load_cluster("aks-nd-h100-v5"))
    assert terms is not None
    assert used(terms).checkpoints == 0


def test_the_size_is_that_of_the_stores_volume_or_of_the_storage() -> None:
    recipe = load_recipe("aks-gpt-175b")
    made = load_cluster("aks-nd-h100-v5")
    assert (terms := volume_terms(recipe, made)) is not None
    assert (terms.capacity_bytes, "volumes.0.create.size" in terms.capacity_key) == (16 * TIB, True)
    named = load_cluster("aks-nd-h100-v5", ["volumes=[{mount: /data, pvc: mine}]", "storage.size_tib=32"])
    assert (terms := volume_terms(recipe, named)) is not None
    assert (terms.capacity_bytes, "storage.size_tib" in terms.capacity_key) == (32 * TIB, True)
    assert volume_terms(recipe, load_cluster("gke-a3-mega")) is None


def test_tokens_that_lie_there_are_measured(tmp_path: Path) -> None:
    (tmp_path / "corpus_text_document.bin").write_bytes(bytes(1000))
    tokens = f"data.train=[{{tokens: {tmp_path}/corpus_text_document}}]"
    recipe = load_recipe("aks-gpt-175b", [tokens, "data.shards=1", f"store={tmp_path}"])
    cluster = load_cluster("aks-nd-h100-v5", [f"volumes=[{{mount: {tmp_path}, pvc: mine}}]"])
    assert (terms := volume_terms(recipe, cluster)) is not None
    assert terms.tokens_bytes == 1000


@pytest.mark.parametrize("command", ["plan", "render"])
def test_every_door_refuses_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The shipped recipe filled its volume at the seventh save."""
    arguments = [command, "aks-gpt-175b", "--on", "aks-nd-h100-v5"]
    offline = ["--offline"] if command == "render" else []
    assert run_cli([*arguments, "checkpoint.keep=null", *offline]) == 2
    shown = capsys.readouterr().err
    assert "22.2 of 16 TiB: 10 checkpoints of 2.22" in shown
    assert run_cli([*arguments, *offline]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(("text", "size"), [("16Ti", 16 * TIB), ("1200Gi", 1200 * 2**30), ("5", 5), ("1.5k", 1500)])
def test_sizes_are_read_as_kubernetes_writes_them(text: str, size: float) -> None:
    assert quantity_bytes(text) == size
