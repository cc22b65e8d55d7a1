"""The parts of memory and of a step, as every picture names and colours them."""

from __future__ import annotations

from dataclasses import dataclass

from trainshed.plan.performance.prediction import Memory, StepTimes


@dataclass(frozen=True)
class Part:
    """One part of a stacked bar."""

    key: str
    """The field of `Memory` or `StepTimes`."""
    word: str
    """What a legend calls it."""
    phrase: str
    """What a sentence calls it."""
    letter: str
    """What a bar is made of where there are no colours."""
    colour: str


# The colours are those of Observable's categorical palette, which keep apart on white and on black, and for most
# people who see fewer colours; what is idle or unused is grey.
MEMORY_PARTS = (
    Part("weights", "weights", "weights", "W", "#4269d0"),
    Part("gradients", "gradients", "gradients", "G", "#3ca951"),
    Part("optimizer", "optimizer", "optimizer states", "O", "#97bbf5"),
    Part("activations", "activations", "activations", "A", "#efb118"),
    Part("logits", "logits", "logits and loss", "L", "#ff725c"),
    Part("buffers", "buffers", "buffers", "B", "#a463f2"),
    Part("reserve", "reserve", "the allocator's and the driver's share", "R", "#9498a0"),
)
TIME_PARTS = (
    Part("compute", "compute", "compute", "C", "#4269d0"),
    Part("tp", "tensor parallel", "tensor-parallel communication", "T", "#efb118"),
    Part("cp", "context parallel", "context-parallel communication", "X", "#ff8ab7"),
    Part("ep", "expert parallel", "expert dispatch", "E", "#a463f2"),
    Part("pp_bubble", "pipeline bubble", "the pipeline's bubble", "P", "#9498a0"),
    Part("dp_exposed", "data parallel", "data-parallel communication that nothing hides", "D", "#ff725c"),
    Part("optimizer", "optimizer", "the optimizer", "O", "#3ca951"),
    Part("other", "other", "launches and fixed costs", "F", "#9c6b4e"),
)


def amounts(of: Memory | StepTimes, parts: tuple[Part, ...]) -> list[tuple[Part, float]]:
    """Return the parts that there is something of, in their order."""
    found = [(part, float(getattr(of, part.key))) for part in parts]
    return [(part, amount) for part, amount in found if amount > 0]


def shared_out(amounts: list[float], width: int) -> list[int]:
    """Share `width` cells out in proportion, so that they add up and nothing that exists is left without one."""
    total = sum(amounts)
    if total <= 0 or width <= 0:
        return [0] * len(amounts)
    exact = [amount / total * width for amount in amounts]
    cells = [max(1, int(share)) if share > 0 else 0 for share in exact]
    while sum(cells) != width:
        missing = 1 if sum(cells) < width else -1
        able = [place for place, count in enumerate(cells) if missing > 0 or count > 1]
        if not able:
            break
        cells[max(able, key=lambda place: missing * (exact[place] - cells[place]))] += missing
    return cells
