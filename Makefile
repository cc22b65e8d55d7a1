# Two commands on a fresh machine: `make demo`, then `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-demo
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: package test-client setup demo demo-chat docs test test-all lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[test]'
	@touch $@ $(DEMO)

# Less than the tests need: PyTorch, the data and serving parts, and transformers, which judges the export.
$(DEMO): pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch and Trainshed into $(VENV), once; this may take a minute or two."
	@$(PIP) torch
	@$(PIP) -e '.[demo]'
	@touch $@

# The whole line on two cores: measure and plan, train on two ranks, export, fine-tune, ask.
demo: $(DEMO)
	@mkdir -p store
	@test -f store/here.yaml || $(BIN)/trainshed plan probe --to store/here.yaml
	$(BIN)/trainshed plan recipes/quickstart.yaml --machine store/here.yaml --gpus 2 layout.dp=2 layout.micro_batch=4
	$(BIN)/trainshed run recipes/quickstart.yaml --id base --layout dp=2,micro_batch=4 export.format=hf
	$(BIN)/trainshed run recipes/quickstart-chat.yaml
	$(BIN)/trainshed generate quickstart-chat --chat --prompt 'What is [3, 14, 15]?' --max-tokens 4
	@echo
	@echo "That was the whole line: text, tokens, a plan, two ranks, a proven export, fine-tuning, an answer. Try next:"
	@echo "  source $(BIN)/activate"
	@echo "  trainshed dash                    # both runs in a browser; report.html in a run's folder is one as a file"
	@echo "  trainshed serve quickstart-chat   # OpenAI's API and a page to chat on"
	@echo "  trainshed run recipes/quickstart.yaml --id base --layout tp=2 train.steps=150 train.schedule.decay=150"
	@echo "                                    # the same run goes on, on another layout"
	@echo "  trainshed plan --model llama3-70b --gpu h100 --gpus 512 --seq 8192 --global-batch 1024"
	@echo "  trainshed recipes copy quickstart my-recipe.yaml    # a recipe of yours; then docs/tutorial.md"

# The quickstart's model, fine-tuned by LoRA on conversations, and what it answered on the way.
demo-chat: $(DEMO)
	$(BIN)/trainshed run recipes/quickstart.yaml --id base export.format=hf
	$(BIN)/trainshed run recipes/quickstart-chat.yaml
	$(BIN)/trainshed status quickstart-chat --answers

# The documentation as a site, in site/; a link that leads nowhere is an error.
docs: setup
	$(BIN)/python docs/write_reference.py
	$(BIN)/python docs/draw_line.py
	$(BIN)/zensical build --strict --clean

test: setup lint
	$(BIN)/pytest -n 2 -m "not full and not gpu"

test-all: setup lint
	$(BIN)/pytest -n 2 -m "not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

# What is published: built, its metadata checked, and the client tried in a fresh environment without extras.
package: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python release/check_client.py dist

# The client with the oldest versions of its dependencies that are allowed, and with the newest there are.
test-client: package
	$(BIN)/python release/check_client.py dist --resolution lowest-direct --tests
	$(BIN)/python release/check_client.py dist --resolution highest --tests

bench: setup
	$(PIP) -e '.[bench]'
	$(BIN)/python benchmarks/data_prepare.py
	$(BIN)/python benchmarks/chat_prepare.py
	$(BIN)/python benchmarks/data_order.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/data_fetch.py
	$(BIN)/python benchmarks/engine_cpu.py
	$(BIN)/python benchmarks/health.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/serve.py
	$(BIN)/python benchmarks/launch.py
	$(BIN)/python benchmarks/observe.py

clean:
	rm -rf $(VENV) store dist build site .cache
