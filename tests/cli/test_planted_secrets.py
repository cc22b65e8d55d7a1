"""Secrets are planted where people have them, and everything that commands print and leave is searched for them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from support.recipes.text_recipes import write_small_recipe

PLANTED = "planted0secret"
SIGNED = f"?X-Amz-Credential={PLANTED}1&X-Amz-Signature={PLANTED}2"
ENVIRONMENT = {
    "HF_TOKEN": f"hf_{PLANTED}",
    "AWS_ACCESS_KEY_ID": f"AKIA{PLANTED}",
    "AWS_SECRET_ACCESS_KEY": f"{PLANTED}/aws",
    "AZURE_STORAGE_SAS_KEY": f"sv=2026&sig={PLANTED}",
    "OPENAI_API_KEY": f"sk-{PLANTED}",
    "WANDB_API_KEY": PLANTED,
}
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CORPUS = "".join(
    json.dumps({"text": " ".join(WORDS[(i * k) % 10] for k in range(1, 40))}) + "\n" for i in range(300)
).encode()


@dataclass
class Corpus:
    """A web server that gives its files only to whoever has the signature or the password."""

    host: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def signed(self, name: str, *, password: bool = False) -> str:
        who = f"me:{PLANTED}@" if password else ""
        return f"http://{who}{self.host}/{name}" + ("" if password else SIGNED)


@pytest.fixture
def corpus() -> Iterator[Corpus]:
    found = Corpus(files={"corpus.jsonl": CORPUS, "broken.jsonl": CORPUS + b"{not json\n", "unnamed": CORPUS})
    basic = "Basic " + base64.b64encode(f"me:{PLANTED}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            found.asked.append(self.path)
            may_read = f"?{query}" == SIGNED or self.headers.get("Authorization") == basic or path == "/open.jsonl"
            data = found.files.get(path[1:]) if may_read else None
            self.send_response(200 if data is not None else 404 if may_read else 403)
            self.send_header("Content-Length", str(len(data or b"")))
            self.send_header("ETag", '"1"')
            self.end_headers()
            if data and self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        found.host = f"127.0.0.1:{server.server_address[1]}"
        yield found
        server.shutdown()
        thread.join()


def trainshed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command with all secrets in its environment; whatever it prints is searched for them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "HF_"))}
    done = subprocess.run(
        [sys.executable, "-m", "trainshed", *arguments],
        cwd=folder,
        env=kept | ENVIRONMENT | {"HOME": str(folder), "HF_HOME": str(folder / "hf")},
        capture_output=True,
        text=True,
    )
    assert PLANTED not in done.stdout + done.stderr, done.stdout + done.stderr
    return done


def left_behind(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; none of them, and none of their names, may hold a secret."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    holding = [name for name, data in files.items() if PLANTED in name or PLANTED.encode() in data]
    assert holding == []
    return files


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<eod>", "<unk>", *WORDS])}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("password", [False, True])
def test_tokens_of_a_signed_url_name_it_without_what_signed_it(
    corpus: Corpus, tokenizer: str, tmp_path: Path, password: bool
) -> None:
    url = corpus.signed("corpus.jsonl", password=password)
    prepare = ("data", "prepare", "--input", url, "--tokenizer", tokenizer, "--eod", "<eod>", "--output", "out/tokens")
    assert trainshed(tmp_path, *prepare).returncode == 0
    files = left_behind(tmp_path)
    inputs = json.loads(files["out/tokens.manifest.json"])["facts"]["inputs"]
    assert inputs[0]["address"] == f"http://{corpus.host}/corpus.jsonl" + ("" if password else "?…")
    again = trainshed(tmp_path, *prepare)
    assert "1 of 1 shards are already there and proven" in again.stderr
    fetched = trainshed(tmp_path, "data", "fetch", url, "copied")
    assert fetched.returncode == 0, fetched.stderr
    left_behind(tmp_path)


@pytest.mark.parametrize(
    ("name", "exit_code", "message"),
    [
        ("broken.jsonl", 2, "/broken.jsonl?…:301: "),
        ("nowhere.jsonl", 2, "/nowhere.jsonl?…: nothing found"),
        ("unnamed", 2, "/unnamed?…: cannot tell from its name"),
        ("corpus.jsonl?", 1, "/corpus.jsonl?…: the server refused (403)"),
        ("*.jsonl", 2, "a pattern needs a listing"),
    ],
)
def test_no_error_shows_a_signature(
    corpus: Corpus, tokenizer: str, tmp_path: Path, name: str, exit_code: int, message: str
) -> None:
    prepare = ("data", "prepare", "--tokenizer", tokenizer, "--eod", "<eod>", "--output", "out/tokens", "--debug")
    failed = trainshed(tmp_path, *prepare, "--input", corpus.signed(name))
    assert (failed.returncode, message in failed.stderr) == (exit_code, True), failed.stderr
    left_behind(tmp_path)


@pytest.mark.parametrize("url", ["http://me:{secret}@127.0.0.1:9/a.jsonl", "http://127.0.0.1:9/a.jsonl?sig={secret}"])
def test_a_recipe_with_credentials_is_refused_before_it_is_kept_anywhere(tmp_path: Path, url: str) -> None:
    recipe = write_small_recipe(tmp_path)
    text = recipe.read_text()
    recipe.write_text(text.replace("{script: numbers.py}", f"{{path: '{url.format(secret=PLANTED)}'}}"))
    for command in (("run", str(recipe)), ("render", str(recipe), "--on", "slurm-h100")):
        refused = trainshed(tmp_path, *command)
        assert refused.returncode == 2
        assert "recipe.yaml:9" in refused.stderr
        assert "credentials do not belong into an address" in refused.stderr
        assert "trainshed data fetch" in refused.stderr
    recipe.unlink()
    left_behind(tmp_path)


def test_a_whole_run_leaves_no_secret_of_its_environment(corpus: Corpus, tmp_path: Path) -> None:
    corpus.files["open.jsonl"] = CORPUS
    recipe = write_small_recipe(tmp_path)
    recipe.write_text(
        recipe.read_text().replace("{script: numbers.py}", f"{{path: 'http://{corpus.host}/open.jsonl'}}")
    )
    done = trainshed(tmp_path, "run", str(recipe))
    assert done.returncode == 0, done.stderr
    assert any(name.endswith(".jsonl") and "events" in name for name in left_behind(tmp_path))
    # One that fails in the middle says why in its events, too.
    corpus.files["open.jsonl"] = CORPUS + b"{not json\n"
    failed = trainshed(tmp_path, "run", str(recipe), "data.seed=7", "name=broken")
    assert failed.returncode != 0
    left_behind(tmp_path)
