# Every target sets up what it needs first, so `make demo` works in a fresh clone.
.DEFAULT_GOAL := help
.PHONY: setup demo test check soak bench jars docs site clean help

BIN := .venv/bin
READY := .venv/.ready
# Spark starts the Java that JAVA_HOME names, so it uses the one that was found.
WITH_JAVA = JAVA_HOME="$$(scripts/ensure-java.sh --quiet)" && export JAVA_HOME &&
# Further arguments for pytest: make test ARGS="-k sinks -x"
ARGS ?=
# Tests run in this many processes; each has its own Spark session and servers. A file stays in one process, and the
# files come in order: those on Spark take longest and come first, so that the processes end at the same time.
PROCESSES ?= 2

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Find or install Java, create .venv, install the dependencies
	@echo "setup: ready"

$(READY): pyproject.toml constraints.txt
	@scripts/ensure-java.sh >/dev/null
	@scripts/ensure-venv.sh
	@echo "setup: installing cutline and its dependencies into .venv (the first time takes minutes)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(READY) ## Run the demo
	@$(WITH_JAVA) $(BIN)/cutline demo

jars: $(READY) ## Fetch the Java archives that tests on Kafka, HDFS and S3A need; says what cannot be had
	@$(BIN)/python scripts/fetch_jars.py

test: $(READY) jars ## Run the tests, without the soak tests
	@echo "test: pytest"
	@$(WITH_JAVA) $(BIN)/pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY) ## Lint, format, types, layers
	@echo "check: ruff check"
	@$(BIN)/ruff check --quiet --output-format concise .
	@echo "check: ruff format"
	@$(BIN)/ruff format --quiet --check . || { echo "check: run $(BIN)/ruff format ." >&2; exit 1; }
	@echo "check: mypy"
	@$(BIN)/mypy --no-error-summary
	@echo "check: layers"
	@$(BIN)/lint-imports --no-logo

soak: $(READY) jars ## Run the soak tests
	@echo "soak: pytest -m soak"
	@$(WITH_JAVA) $(BIN)/pytest -m soak $(ARGS)

bench: $(READY) ## Run every benchmark
	@$(WITH_JAVA) for script in benchmarks/*.py; do \
		[ -e "$$script" ] || { echo "bench: there are no benchmarks"; break; }; \
		echo "bench: $$script"; \
		$(BIN)/python "$$script" || exit 1; \
	done

docs: $(READY) ## Write what the documentation takes from the code, check its links
	@echo "docs: state machines"
	@$(BIN)/python tools/state_diagrams.py
	@echo "docs: layers"
	@$(BIN)/python tools/layer_picture.py
	@echo "docs: table of options"
	@$(BIN)/python tools/options_table.py
	@echo "docs: reference of the command line"
	@$(BIN)/python tools/cli_reference.py
	@echo "docs: screens of the live view"
	@$(BIN)/python tools/live_screens.py
	@echo "docs: lists of examples and decisions"
	@$(BIN)/python tools/indexes.py
	@echo "docs: pictures"
	@$(BIN)/python tools/pictures.py
	@echo "docs: links"
	@$(BIN)/python scripts/check_docs.py

site: $(READY) ## Build the documentation as a site in site/
	@echo "site: mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: open site/index.html, or $(BIN)/mkdocs serve"

clean: ## Remove caches and build output; .venv stays
	@echo "clean: caches and build output"
	@rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis spark-warehouse metastore_db derby.log
	@find src tests examples benchmarks scripts tools -name __pycache__ -type d -prune -exec rm -rf {} +
