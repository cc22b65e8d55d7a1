"""What the model asks of a layout: every tensor, expert, token and layer must have a place."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainshed.plan.layout import RankLayout, even_stages
from trainshed.plan.legality.asked import Asked
from trainshed.plan.legality.wording import divisors, one_of, problem, round_up
from trainshed.plan.performance.anatomy import Anatomy
from trainshed.recipe.section import Problem


def heads_and_rows(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """tp cuts heads, key/value heads and feed-forward rows into equal parts."""
    # Query heads are a multiple of the key/value heads, so that these decide.
    heads = "heads" if model.kv_heads == model.heads else "key/value heads"
    yield from _cuts(layout, [(heads, model.kv_heads), *feed_forward_cuts(model)])


def feed_forward_cuts(model: Anatomy) -> list[tuple[str, int]]:
    """What tp cuts of the feed-forward blocks, by name and size."""
    rows = [("feed-forward rows", model.ffn)]
    if model.experts is not None:
        rows.append(("rows of the shared expert", model.experts.shared_ffn))
    return rows


def _cuts(layout: RankLayout, cuts: list[tuple[str, int]]) -> Iterator[Problem]:
    for things, count in cuts:
        if count % layout.tp:
            legal = [size for size in divisors(layout.tp) if all(other % size == 0 for _, other in cuts)]
            yield problem("tp", f"tp: {layout.tp} does not divide the {count} {things}", f"write {one_of('tp', legal)}")


def vocabulary_rows(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Every tp rank holds a row of the vocabulary at least."""
    if model.vocab_size < layout.tp:
        yield problem(
            "tp",
            f"tp: {layout.tp} leaves ranks without a row of the {model.vocab_size} in the vocabulary",
            f"write tp: {model.vocab_size} or less",
        )


def experts(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """ep takes whole experts, etp equal parts of one, and etp ranks share the tokens of a tp group."""
    found = model.experts
    yield from expert_sizes(layout, model, asked)
    if found is not None and layout.tp % layout.etp:
        yield problem(
            "etp",
            f"etp: {layout.etp} does not divide tp: {layout.tp}, whose ranks share an expert's tokens",
            f"write {one_of('etp', divisors(gcd(found.ffn, layout.tp)))}",
        )


def expert_sizes(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """ep takes whole experts, etp equal parts of one."""
    found = model.experts
    if found is None:
        for key, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size > 1:
                yield problem(key, f"{key}: {size} spreads experts, and the model has none", "delete it")
        return
    if found.count % layout.ep:
        yield problem(
            "ep",
            f"ep: {layout.ep} does not divide the {found.count} experts",
            f"write {one_of('ep', divisors(found.count), limit=layout.ep)}",
        )
    if found.ffn % layout.etp:
        yield problem(
            "etp",
            f"etp: {layout.etp} does not divide the {found.ffn} rows of an expert",
            f"write {one_of('etp', divisors(gcd(found.ffn, layout.tp)))}",
        )


def expert_mesh(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """The experts of one copy lie evenly over its dp · cp · tp ranks."""
    if model.experts is None:
        return
    # With `shard: none` every dp rank is a copy for the dense weights, and experts may still lie across all of them.
    dp = layout.dp if layout.shard == "none" else layout.dp_shard
    ranks = dp * layout.cp * layout.tp
    if ranks % (layout.ep * layout.etp):
        one_copy = " of one copy" if dp != layout.dp else ""
        yield problem(
            "ep",
            f"ep {layout.ep} · etp {layout.etp} = {layout.ep * layout.etp} does not divide the "
            f"dp {dp} · cp {layout.cp} · tp {layout.tp} = {ranks} ranks{one_copy}",
            f"write ep and etp so that their product divides {ranks}, or dp so that {layout.ep * layout.etp} does",
        )


def sequence_pieces(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """cp cuts a sequence into two pieces a rank, and tp shares what a cp rank has (sequence parallel)."""
    # Each cp rank takes one piece from the front and its mirror from the back, so that causal work is even.
    length, pieces = asked.sequence_length, 2 * layout.cp if layout.cp > 1 else 1
    if length % pieces:
        yield problem(
            "cp",
            f"cp: {layout.cp} cuts a sequence into {pieces} pieces, and {length} tokens do not divide by that",
            f"write data.sequence_length: {round_up(length, pieces * layout.tp)}, or another cp",
        )
    elif (local := length // layout.cp) % layout.tp:
        yield problem(
            "tp",
            f"tp: {layout.tp} ranks share the {local} tokens of a sequence, and {local} does not divide by {layout.tp}",
            f"write data.sequence_length: {round_up(length, pieces * layout.tp)}, or another tp",
        )


def stages(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """Every chunk has a layer, and the chunks have all of them."""
    chunks = layout.pp * layout.vp
    if model.layers < chunks:
        yield problem(
            "pp",
            f"pp {layout.pp} · vp {layout.vp} = {chunks} chunks, and the model has {model.layers} layers",
            f"write pp and vp with a product of {model.layers} or less",
        )
    elif sum(layout.stages) != model.layers:
        even = ", ".join(map(str, even_stages(model.layers, chunks)))
        yield problem(
            "stages",
            f"{' + '.join(map(str, layout.stages))} = {sum(layout.stages)} layers, and the model has {model.layers}",
            f"write stages: [{even}], or delete it",
        )


def copies(layout: RankLayout, model: Anatomy, asked: Asked) -> Iterator[Problem]:
    """`replicate` is read only where something is shared out."""
    if layout.shard == "none" and layout.replicate not in (1, layout.dp):
        yield problem(
            "replicate",
            f"replicate: {layout.replicate} is not read with `shard: none`: each of the {layout.dp} dp ranks is a copy",
            "delete it, or write another shard",
        )
