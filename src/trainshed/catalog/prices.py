"""What a machine costs by the hour, from `prices.yaml`: list prices with their date, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from trainshed.catalog.machines import Machine
from trainshed.catalog.table import Entry, Table
from trainshed.recipe.section import PositiveFloat, Problem, Text

HOW_TO_SAY = "no price known: write price_per_gpu_hour in the cluster file, or `plan --price DOLLARS`"


class Price(Entry):
    """The list price of a machine on demand; exactly one of `usd_per_hour` and `unknown_because`."""

    as_of: Text = Field(description="When the price was read, as 2026-08-22")
    region: Text | None = Field(description="Where it applies")
    usd_per_hour: PositiveFloat | None = Field(description="US dollars per machine and hour")
    unknown_because: Text | None = Field(None, description="Why there is no price")

    def problems(self) -> Iterator[Problem]:
        """A price, or the reason why not."""
        if (self.usd_per_hour is None) == (self.unknown_because is None):
            yield Problem((), "needs exactly one of usd_per_hour and unknown_because", "write the one that is known")


_TABLE = Table(Path(__file__).with_name("prices.yaml"), Price, "price")


def priced_machines() -> list[str]:
    """Return the names of the machines that the price list speaks of."""
    return _TABLE.names()


def price_of(machine: Machine) -> Price | None:
    """Return the list entry of a machine; None for one that nobody rents out (bought, or a person's own)."""
    return _TABLE.entry(machine.name) if machine.name in _TABLE.names() else None
