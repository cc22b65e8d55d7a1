# Two commands on a fresh machine: `make demo`, then `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup demo demo-chat test test-all lint bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: setup
	$(BIN)/trainshed run recipes/quickstart.yaml

# The quickstart's model, fine-tuned by LoRA on conversations, and what it answered on the way.
demo-chat: setup
	$(BIN)/trainshed run recipes/quickstart.yaml --id base export.format=hf
	$(BIN)/trainshed run recipes/quickstart-chat.yaml
	$(BIN)/trainshed status quickstart-chat --answers

test: setup lint
	$(BIN)/pytest -n 2 -m "not full and not gpu"

test-all: setup lint
	$(BIN)/pytest -n 2 -m "not gpu"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check

bench: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
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
	rm -rf $(VENV) store dist build
