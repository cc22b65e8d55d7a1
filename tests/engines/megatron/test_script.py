"""Launch scripts are read as bash would read them, and never run."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainshed.engines.megatron.script import find_arguments, read_script
from trainshed.errors import InputError

DATA = Path(__file__).parent / "data"


def last_command(script: str) -> list[str]:
    return read_script(script).commands[-1]


def as_bash_does(script: str, folder: Path) -> list[str]:
    """The words of the command `show`, as a real bash makes them."""
    show = "show() { printf '%s\\0' \"$@\"; }\n"
    done = subprocess.run(["bash", "-c", show + script], capture_output=True, cwd=folder, env={"PATH": "/usr/bin:/bin"})
    return done.stdout.decode().split("\0")[:-1]


SCRIPTS = {
    "quotes": 'show a \'b c\' "d e" f\\ g "it\'s" \'say "x"\' "a \\"b\\" c"',
    "variables": 'A=1; B="two words"; show $A ${A} "$B" $B x${A}y "${B}z"',
    "defaults": 'show ${A:-5} ${B:-"x y"} "${C:-p q}"; ',
    "set over default": "A=3\nshow ${A:-5}",
    "arrays": 'ARGS=(--lr 1e-4 --name "a b")\nARGS+=(--more x)\nshow "${ARGS[@]}" tail',
    "arrays of several lines": 'A=(\n  --x 1   # why\n\n  --y 2\n)\nB=(--z)\nshow "${A[@]}" \\\n  "${B[@]}" # end',
    "strings of arguments": 'OPTS="--a 1 \\\n   --b 2"\nOPTS="$OPTS --c 3"\nshow $OPTS',
    "comments": "# first\nA=1 # then\nshow a#b $A # last\n",
    "exported": "export A=4\nshow $A",
    "joined": 'P=/data; show "$P/x"/$P',
    "lines that go on": "A='x\\\ny'\nshow a\\\nb \"c\\\nd\" 'e\\\nf' \\\n  g \"$A\" # h \\\n",
    "empty words": "A=''\nshow \"$A\" '' $A end",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str, tmp_path: Path) -> None:
    expected = as_bash_does(SCRIPTS[name], tmp_path)
    assert expected, "bash understood it"
    assert last_command(SCRIPTS[name]) == ["show", *expected]


@settings(max_examples=200)
@example(["\\\n"])
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), min_size=1, max_size=4))
def test_quoted_words_come_back_whatever_is_in_them(words: list[str]) -> None:
    script = " ".join(shlex.quote(word) for word in ["show", *words])
    assert last_command(script) == ["show", *words]


@settings(max_examples=200)
@given(st.text(st.sampled_from("a \n\t'\"\\$(){}[]@;&|<>#=+-:`A"), max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    read_script(text)


def test_what_only_a_running_shell_knows_stays_as_written(tmp_path: Path) -> None:
    words = last_command(f'show $1 $UNSET ${{UNSET}} $(touch {tmp_path}/hurt) "$(hostname)"')
    assert words[1:4] == ["$1", "$UNSET", "${UNSET}"]
    assert words[-1] == "$(hostname)"
    assert not (tmp_path / "hurt").exists()


def test_a_script_that_starts_torchrun_gives_the_programs_words_and_its_nodes() -> None:
    found = find_arguments((DATA / "aks-train-175b.sh").read_text(), "aks-train-175b.sh")
    assert found.words[:4] == ("--num-layers", "96", "--hidden-size", "12288")
    assert (found.nodes, found.gpus_per_node, found.sizes) == (2, 8, ("175b",))


@pytest.mark.parametrize(
    "text",
    [
        "--num-layers 2 --lr 1e-4",
        "--num-layers 2 \\\n  --lr 1e-4\n",
        "- --num-layers\n- 2\n- --lr\n- 1e-4\n",
        "args: [--num-layers, 2, '--lr=1e-4']",
        '["--num-layers", "2", "--lr", "1e-4"]',
        "--num-layers: 2\n--lr: 1e-4\n",
        "GPT_ARGS='--num-layers 2'\nTRAIN_ARGS='--lr 1e-4'\n",
        "python pretrain_gpt.py --num-layers 2 --lr 1e-4 2>&1 | tee log",
    ],
)
def test_argument_lists_come_in_many_clothes(text: str) -> None:
    words = find_arguments(text, "a.txt").words
    assert [word for each in words[:4] for word in each.split("=")][:4] == ["--num-layers", "2", "--lr", "1e-4"]


@pytest.mark.parametrize("text", ["", "echo hello", "model: {layers: 3}"])
def test_a_file_without_arguments_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no argument of Megatron-LM") as raised:
        find_arguments(text, "notes.txt")
    assert raised.value.where == "notes.txt"
