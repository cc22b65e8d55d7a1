"""An argument list, a launch script or a list of words for Megatron-LM, read as a recipe."""

from __future__ import annotations

from trainshed.engines.imported import Imported
from trainshed.engines.megatron.importing.found_model import read_model
from trainshed.engines.megatron.importing.mistakes import find_mistakes
from trainshed.engines.megatron.importing.notebook import Notebook
from trainshed.engines.megatron.importing.parsed import parse
from trainshed.engines.megatron.importing.run_keys import read_checkpoints, read_data, read_rest
from trainshed.engines.megatron.importing.train_keys import read_layout, read_training
from trainshed.engines.megatron.importing.words import find_words


def read_megatron(text: str, name: str) -> Imported:
    """Read a file's text as a recipe; `name` is the file's, for errors and for the run's name.

    Arguments that are no key of a recipe and that Megatron still has are kept as `engine.args`. Nothing in the text is
    executed. Raises `InputError` where it holds no arguments, or values that Megatron would refuse.
    """
    found = find_words(text, name)
    book = Notebook(parse(found.words, name), found, name)
    config = read_model(book)
    read_training(book)
    read_layout(book)
    read_data(book, config)
    read_checkpoints(book)
    read_rest(book)
    return book.imported(tuple(find_mistakes(book, config)))
