"""Every kind of message about a single value or key: what, where, what to write."""

from collections.abc import Callable

import pytest

from trainshed.errors import RecipeError
from trainshed.recipe import parse_recipe


@pytest.mark.parametrize(
    ("override", "what", "hint"),
    [
        # types
        ("train.steps=ten", "expected a whole number, got `ten`", None),
        ("train.steps=1.5", "expected a whole number, got 1.5", None),
        ("train.steps=1e3", "expected a whole number, got 1000.0", "write 1000"),
        ("train.steps=true", "expected a whole number, got true", None),
        ("train.steps='100'", "expected a whole number, got `100`", "write it without quotes: 100"),
        ("train.steps=010", "expected a whole number, got `010`", "a leading zero: write 10"),
        ("train.steps=1:30", "expected a whole number, got `1:30`", "a time of day is not a number here"),
        ("data.sequence_length=8k", "expected a whole number, got `8k`", "write the number out"),
        ("train.optimizer.lr='1e-4'", "expected a number, got `1e-4`", "write it without quotes: 1e-4"),
        ("train.optimizer.lr=null", "expected a number, got nothing", "write a value or delete the line"),
        ("train.deterministic=yes", "expected true or false, got `yes`", "write true or false"),
        ("train.deterministic=off", "expected true or false, got `off`", "write true or false"),
        ("train.deterministic=maybe", "expected true or false, got `maybe`", None),
        ("train.deterministic=1", "expected true or false, got 1", None),
        ("name=12", "expected text, got 12", 'write it in quotes: "12"'),
        ("name=1e4", "expected text, got 10000", 'write it in quotes: "10000"'),
        ("model=tiny", "expected a mapping, got `tiny`", None),
        ("train.optimizer=[1]", "expected a mapping, got a list", None),
        ("data.skip=5", "expected a list, got 5", None),
        ("data.train=5", "expected a list, got 5", None),
        ("data.eod=3", "expected true or false or text, got 3", 'write it in quotes: "3"'),
        ("tokenizer=[a]", "expected text or a mapping, got a list", None),
        ("layout=3", "expected text or a mapping, got 3", 'write it in quotes: "3"'),
        # bounds
        ("train.steps=0", "must be at least 1, and is 0", None),
        ("train.optimizer.lr=0", "must be more than 0, and is 0", None),
        ("train.dropout=1", "must be less than 1, and is 1", None),
        ("train.dropout=-0.5", "must be at least 0, and is -0.5", None),
        ("train.optimizer.lr=.inf", "must be a finite number, and is inf", None),
        ("train.optimizer.lr=1e999", "must be a finite number, and is inf", None),
        ("train.optimizer.betas=[0.9]", "is missing", None),
        ("train.optimizer.betas=[0.9,0.9,0.9]", "must have at most 2 elements, and has 3", None),
        ("data.train.0.path=[]", "must have at least 1 element, and has 0", None),
        # choices
        ("train.precision=bf-16", "`bf-16` is not one of fp64, fp32, bf16, fp16, fp8", "did you mean bf16?"),
        ("train.precision=int4", "`int4` is not one of fp64, fp32, bf16, fp16, fp8", None),
        ("train.precision=16", "16 is not one of fp64, fp32, bf16, fp16, fp8", "did you mean fp16?"),
        ("checkpoint.resume=null", "nothing is not one of auto, must, fresh", None),
        ("train.optimizer.name=lion", "`lion` is not one of adamw, muon", None),
        ("engine=torhc", "`torhc` is not one of torch, megatron, nemo, torchtune", "did you mean torch?"),
        ("layout=atuo", "`atuo` is not known", "this version knows auto"),
        # counts
        ("train.tokens=20X", "`20X` is not a count", "write a whole number, or one with k, M, B or T: 20B"),
        ("train.tokens=1.5", "expected a whole number, got 1.5", None),
        (
            "train.tokens=1.0001k",
            "`1.0001k` is not a whole number",
            "write for example 1500M instead of 1.5B, or round it",
        ),
        # names
        (
            "name=Big_Run",
            "`Big_Run` cannot name objects on a cluster",
            "use lower-case letters, digits and dashes; begin with a letter",
        ),
        (
            f"name={'a' * 41}",
            "is longer than 40 characters",
            "names of objects on a cluster have 63, id and suffix included",
        ),
        ("model.preset=''", "is empty", "write a value or delete the line"),
        # keys
        ("train.stpes=5", "unknown key `stpes`", "did you mean train.steps?"),
        ("train.Global-Batch=5", "unknown key `Global-Batch`", "did you mean train.global_batch?"),
        ("global_batch=5", "unknown key `global_batch`", "did you mean train.global_batch?"),
        ("train.lr=5", "unknown key `lr`", "did you mean train.optimizer.lr?"),
        ("train.tp=2", "unknown key `tp`", "did you mean layout.tp?"),
        ("learning_rate=5", "unknown key `learning_rate`", "did you mean train.optimizer.lr?"),
        ("train.micro_batch_size=5", "unknown key `micro_batch_size`", "did you mean layout.micro_batch?"),
        ("data.train.0.wieght=5", "unknown key `wieght`", "did you mean data.train.0.weight?"),
        ("model.config.hiden=5", "unknown key `hiden`", "did you mean model.config.hidden?"),
        ("tokenizer.train.vocab=5", "unknown key `vocab`", "did you mean tokenizer.train.vocab_size?"),
        ("resources.xyzzy=5", "unknown key `xyzzy`", "known here: nodes"),
        ("budgets.step=soon", "`soon` is not a duration", "write seconds, or a number with s, m, h or d: 20m"),
        (
            "budgets.step=0",
            "`0` is not a duration of more than 0 seconds and at most 30 days",
            "write for example 20m",
        ),
        ("budgets.steps=20m", "unknown key `steps`", "did you mean budgets.step?"),
        *(
            (
                f"{key}=1",
                f"`{key}` is reserved and not supported by this version of Trainshed",
                "delete it",
            )
            for key in ("engine_options",)
        ),
    ],
)
def test_each_message(error: Callable[..., RecipeError], override: str, what: str, hint: str | None) -> None:
    found = error(override)
    key = override.split("=")[0]
    lines = [line for line in found.what.splitlines() if key in line] if "problems" in found.what else []
    if lines:  # a broken value can make a second thing wrong; its own line is what counts here
        assert any(line.endswith(f"{what}; {hint}" if hint else what) for line in lines)
    else:
        assert (found.what, found.hint) == (what, hint)
        assert (found.where or "").startswith(f"command line: {key}=…")


@pytest.mark.parametrize(
    ("line", "where", "what", "hint"),
    [
        ("  optimizer: {}\n", "r.yaml:7 (train.optimizer.lr)", "is missing", "write for example `lr: 0.0003`"),
        ("", "r.yaml:4 (train.optimizer)", "is missing", "write for example `optimizer: {lr: 3.0e-4}`"),
    ],
)
def test_a_missing_key_shows_the_nearest_line_and_an_example(line: str, where: str, what: str, hint: str) -> None:
    text = "name: x\nmodel: {preset: tiny, init: random}\ndata: synthetic\ntrain:\n  steps: 1\n  global_batch: 1\n"
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text + line, source="r.yaml")
    assert (caught.value.where, caught.value.what, caught.value.hint) == (where, what, hint)


def test_all_problems_of_a_file_come_at_once_each_with_its_line() -> None:
    text = """\
name: Upper
model: {preset: tiny}
data:
  sequence_length: 8k
  trian: []
train:
  steps: 1
  tokens: 2B
  global_batch: 1
  optimizer: {lr: no}
"""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, source="r.yaml")
    assert str(caught.value) == (
        "r.yaml: 5 problems\n"
        "  r.yaml:1 (name): `Upper` cannot name objects on a cluster; use lower-case letters, digits and dashes;"
        " begin with a letter\n"
        "  r.yaml:2 (model.init): there are no weights to start from and nobody said to train from nothing;"
        " write `from: hf://org/name` or `init: random` under `model`\n"
        "  r.yaml:4 (data.sequence_length): expected a whole number, got `8k`; write the number out\n"
        "  r.yaml:5 (data.trian): unknown key `trian`; did you mean data.train?\n"
        "  r.yaml:10 (train.optimizer.lr): expected a number, got `no`"
    )


def test_a_misspelt_key_is_not_also_called_missing(base: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(base.replace("optimizer:", "optimiser:"), source="r.yaml")
    assert str(caught.value) == ("r.yaml:13 (train.optimiser): unknown key `optimiser`\ndid you mean train.optimizer?")


def test_a_list_of_wrong_elements_is_not_also_called_too_short(error: Callable[..., RecipeError]) -> None:
    assert error("train.lora={rank: 1, alpha: 2, targets: [q]}").what.startswith("`q` is not one of q_proj")


def test_a_long_value_is_shortened(error: Callable[..., RecipeError]) -> None:
    assert error(f"train.steps={'x' * 100}").what == f"expected a whole number, got `{'x' * 59}…`"


def test_a_source_written_without_a_list_is_named_as_it_was_written(base: str) -> None:
    text = base.replace("    - path: corpus/*.jsonl", "    pth: corpus/*.jsonl")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, source="r.yaml")
    assert str(caught.value) == "r.yaml:9 (data.train.pth): unknown key `pth`\ndid you mean data.train.path?"
