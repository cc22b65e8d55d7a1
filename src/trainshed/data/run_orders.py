"""The orders of a run: which samples training and validation see, from a recipe and its prepared sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainshed.data.order import DataOrder
from trainshed.data.prepared import PreparedData, PreparedSource
from trainshed.data.sampling.build_order import TokenFiles, build_order, open_order
from trainshed.data.sampling.schedule import BatchSchedule, RampUp, SkipList
from trainshed.data.sampling.synthetic import SyntheticSource
from trainshed.errors import InputError
from trainshed.recipe import Recipe
from trainshed.recipe.messages import as_recipe_error
from trainshed.reporting import SILENT, Reporter


@dataclass(frozen=True)
class RunOrders:
    """The length of a run in steps, and what it sees."""

    steps: int
    train: DataOrder
    validation: DataOrder | None


def run_orders(
    recipe: Recipe, data: PreparedData, indexes: Path, *, build: bool, reporter: Reporter = SILENT
) -> RunOrders:
    """Put a run's orders together; `build` makes missing indexes, else they are an error."""
    section, train = recipe.data, recipe.train
    ramp = train.batch_ramp
    schedule = BatchSchedule(
        train.global_batch, RampUp(ramp.start, ramp.increment, ramp.samples) if ramp is not None else None
    )
    if section.synthetic:
        order = DataOrder([_synthetic(recipe)], schedule)
        return RunOrders(_steps(recipe, schedule, order.sequence_length, 0), order, None)
    length = section.sequence_length
    assert length is not None, "the schema asks for it wherever data is not synthetic"
    share = section.split.train if section.split else 1.0
    steps = _steps(recipe, schedule, length, int(sum(source.tokens for source in data.sources) * share))
    making = _Making(recipe, indexes, build, reporter)
    order = making.order(data.sources, (0.0, share), schedule, steps, SkipList(section.skip), least=train.global_batch)
    too_short = list(recipe.warmup_problems(steps))
    if too_short:
        raise as_recipe_error(too_short, recipe.places)
    validation = None
    if section.validation is not None:
        measured, part = data.sources, (share, 1.0)
        if data.validation is not None:
            measured, part = (data.validation,), (0.0, 1.0)
        else:
            assert section.split is not None, "the schema asks for a split or a source"
            part = (share, min(1.0, share + section.split.validation))
        measured = [replace(source, name=f"{source.name} (validation)") for source in measured]
        batches = section.validation.batches
        validation = making.order(measured, part, BatchSchedule(train.global_batch), batches, SkipList())
    return RunOrders(steps, order, validation)


@dataclass(frozen=True)
class _Making:
    recipe: Recipe
    indexes: Path
    build: bool
    reporter: Reporter

    def order(
        self,
        sources: Sequence[PreparedSource],
        share: tuple[float, float],
        schedule: BatchSchedule,
        steps: int,
        skip: SkipList,
        *,
        least: int = 1,
    ) -> DataOrder:
        files = [
            TokenFiles(
                source.label,
                source.prefixes,
                source.weight,
                (share[0], min(share[1], 1.0)),
                content=source.content,
                name=source.name,
            )
            for source in sources
        ]
        length, seed = self.recipe.data.sequence_length or 0, self.recipe.data.seed
        if not self.build:
            return open_order(
                files, indexes=self.indexes, seed=seed, sequence_length=length, schedule=schedule, skip=skip
            )
        return build_order(
            files,
            indexes=self.indexes,
            seed=seed,
            sequence_length=length,
            schedule=schedule,
            steps=steps,
            skip=skip,
            accept=lambda order: self._require_text(order, least, of_split=share != (0.0, 1.0)),
            reporter=self.reporter,
        )

    def _require_text(self, order: DataOrder, least: int, *, of_split: bool) -> None:
        """Refuse sources without a whole sample, or with less than one batch together: steps would fail or repeat."""
        length = order.sequence_length
        where = self.recipe.where("data.split" if of_split else "data.train")
        more = "give it more text" + (", another `data.split`" if of_split else "") + " or a smaller"
        samples = 0
        for source in order.sources:
            if source.epoch_samples == 0:
                raise InputError(
                    f"source '{source.name}' holds {source.tokens or 'no'} tokens, and a sample takes {length + 1}",
                    where=where,
                    hint=f"{more} `data.sequence_length`",
                )
            samples += source.epoch_samples or least
        if samples < least:
            count = f"{samples} sample" + ("s" if samples > 1 else "")
            raise InputError(
                f"the sources hold {count} of {length + 1} tokens, fewer than one batch of {least}: every step would "
                "see the same text more than once",
                where=where,
                hint=f"{more} `train.global_batch` or `data.sequence_length`",
            )


def _synthetic(recipe: Recipe) -> SyntheticSource:
    config = recipe.model.config
    if config is None:
        raise InputError(
            "synthetic data needs the model's vocabulary",
            where=recipe.where("model"),
            hint="write `preset` or `config` under `model`",
        )
    length = recipe.data.sequence_length or config.max_positions
    return SyntheticSource(vocab_size=config.vocab_size, sequence_length=length, seed=recipe.data.seed)


def _steps(recipe: Recipe, schedule: BatchSchedule, sequence_length: int, epoch_tokens: int) -> int:
    """The length of the run in steps, whichever way the recipe says it."""
    train = recipe.train
    if train.steps is not None:
        return train.steps
    tokens = train.tokens if train.tokens is not None else int((train.epochs or 0) * epoch_tokens)
    return schedule.steps_for(-(-tokens // sequence_length))
