"""The table of a sweep as text and as a page, by what `sweep.json` holds."""

from __future__ import annotations

from typing import Any

import pytest

from trainshed.cli.sweep import table_lines
from trainshed.workflow.sweeps.results import mark_text, sweep_page, sweep_rows


def swept(*runs: tuple[float, float | None]) -> dict[str, Any]:
    """A sweep of `lr` with the last loss and the best validation loss of each run."""
    rows = [
        {
            "run": f"small/{place}",
            "values": {"train.optimizer.lr": f"{place}e-4"},
            "step": 10,
            "steps": 10,
            "loss": loss,
            "validation_loss": validation,
            "best_validation_loss": validation,
            "tokens_per_second": 1234.0,
            "mfu": None,
            "state": "done",
            "why": "",
        }
        for place, (loss, validation) in enumerate(runs, 1)
    ]
    about = {"name": "small", "id": "1a2b", "recipe": "recipe.yaml", "on": "local"}
    return about | {"keys": ["train.optimizer.lr"], "runs": rows}


@pytest.mark.parametrize(
    ("runs", "marked", "text"),
    [
        ([(2.0, 3.0), (1.0, 4.0)], ["3.0000 *"], "* the lowest validation loss"),
        ([(2.0, None), (1.0, None)], ["1.0000 *"], "* the lowest loss after the last step"),
        ([(2.0, None)], [], ""),
        ([(float("nan"), None), (float("inf"), None)], [], ""),
    ],
)
def test_the_mark_says_which_loss_is_the_lowest(
    runs: list[tuple[float, float | None]], marked: list[str], text: str
) -> None:
    plain = swept(*runs)
    assert [cell for row in sweep_rows(plain)[1] for cell in row if cell.endswith("*")] == marked
    assert mark_text(plain) == text
    assert (f"<p>{text}</p>" in sweep_page(plain, {})) is bool(text)


def test_numbers_stand_right_and_words_left_on_the_page_as_in_the_terminal() -> None:
    plain = swept((2.0, 3.0), (1.0, 4.0))
    page = sweep_page(plain, {})
    for cell in ('<th class="number">lr</th>', '<td class="number">3.0000 *</td>', '<td class="number">1,234</td>'):
        assert cell in page
    for cell in ('<th class="text">run</th>', '<td class="text">small/1</td>', '<td class="text">done</td>'):
        assert cell in page
    assert table_lines(["name", "count"], [["a", "1"], ["long", "100"]]) == [
        "name  count",
        "a         1",
        "long    100",
    ]
