"""A file of questions: what is wrong with it is said once, at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe.evaluation import load_questions


def test_a_question_without_its_text_is_the_only_problem(tmp_path: Path) -> None:
    file = tmp_path / "questions.yaml"
    file.write_text("- {expect: [Paris]}\n")
    with pytest.raises(RecipeError) as caught:
        load_questions(file)
    assert (caught.value.what, caught.value.where) == ("is missing", f"{file}:2 (questions.0.ask)")
