"""Lines of a site, really run by bash: what they export stays, what fails in them is named, nothing leaks out."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.clusters.kubernetes_jobs import cluster_of
from trainshed.errors import RecipeError
from trainshed.launch.job import setup_script


def sourced(folder: Path, *lines: str, **keys: Any) -> subprocess.CompletedProcess[str]:
    """Source the script in a strict shell, as ours are, and show what is left of it."""
    script = setup_script(cluster_of({"setup": list(lines)} | keys))
    assert script is not None
    (folder / "setup.sh").write_text(script)
    after = 'echo "$- ${A-unset} ${B-unset} ${trainshed_line-clean} $(trap)"'
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; . {folder}/setup.sh; {after}"], capture_output=True, text=True, check=False
    )


def test_what_lines_export_stays_and_the_shell_is_as_strict_as_before(tmp_path: Path) -> None:
    done = sourced(tmp_path, "export A='a b' # with a comment", 'export B="$NEVER_SET$A"', "set -x; set +x")
    flags, *rest = done.stdout.split(" ", 1)
    assert {"e", "u"} <= set(flags), done.stderr
    assert rest == ["a b a b clean \n"]


def test_the_environment_of_the_file_wins_over_its_lines(tmp_path: Path) -> None:
    done = sourced(tmp_path, "export A=line", environment={"A": "it's $(the file)"})
    assert " it's $(the file) " in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("false", "setup failed with exit code 1 at line 2: false"),
        ("source /nowhere/x", "setup failed with exit code 1 at line 2: source /nowhere/x"),
        ("(exit 7)", "setup failed with exit code 7 at line 2: (exit 7)"),
        ("no_such_program --x", "setup failed with exit code 127 at line 2: no_such_program --x"),
        ("echo 'unclosed", "setup failed with exit code 2 at line 2: echo 'unclosed"),
        ("if true; then", "setup failed with exit code 2 at line 2: if true; then"),
        ("exit 0", "setup ended the shell at line 2: exit 0"),
    ],
)
def test_a_line_that_fails_ends_everything_and_is_named(tmp_path: Path, line: str, said: str) -> None:
    done = sourced(tmp_path, "export A=1", line, "export B=never")
    assert done.returncode == 1
    assert f"trainshed: {said}\n" in done.stderr
    assert done.stdout == ""


def test_modules_are_looked_for_where_login_shells_find_them() -> None:
    with_modules = setup_script(cluster_of({"setup": ["module load cuda/12.8"]})) or ""
    assert "type module >/dev/null 2>&1 || . /etc/profile" in with_modules
    assert "/etc/profile" not in (setup_script(cluster_of({"setup": ["source /x/module"]})) or "")
    assert setup_script(cluster_of({})) is None


@pytest.mark.parametrize("line", ["a\nb", "", "  ", "a\x00b"])
def test_a_line_is_one_line(line: str) -> None:
    with pytest.raises(RecipeError) as caught:
        cluster_of({"setup": ["true", line]})
    assert caught.value.what == "is not one line of text"
    assert "(setup.1)" in (caught.value.where or "")
