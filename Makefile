# `make serve` and `make test` work on a fresh machine that has Python 3.11-3.13 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
WORKERS ?= 2

.PHONY: serve test test-fast test-clients lint docs protos clean

# Serves the default model: HTTP on 8000, gRPC on 9000. ARGS are options of `preheat serve`.
serve: $(VENV)/.serve
	$(BIN)/preheat serve $(ARGS)

# The whole test suite, in two processes (of up to 2 GB each). ARGS are options of pytest: files, -x, -k, ..., or -n0 --pdb.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# What neither compiles nor starts a process that does, which is most tests.
test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(ARGS)

# Style and types: ruff over everything, mypy --strict over the packages.
lint: $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/mypy --cache-dir build/mypy

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --group lint
	touch $@

# The suite's tests against clients that nobody here wrote (lm-eval, schemathesis), which live in an environment of their own:
# 100 packages, 970 MB. `make test` skips these tests where that environment is not there.
test-clients: $(VENV)/.test build/clients/.installed
	$(BIN)/python -m pytest tests/e2e/test_client_lm_eval.py tests/server/test_client_schemathesis.py $(ARGS)

build/clients/.installed: pyproject.toml
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	build/clients/bin/python -m pip install --quiet --group clients
	touch $@

NATIVE := setup.py $(wildcard engine/native/*.cc engine/native/*.inc)

# The installation follows the Python sources; it is made anew only when the dependencies or the native sources change.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip

$(VENV)/.serve: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.test: pyproject.toml $(NATIVE) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@ $(VENV)/.serve

# Writes the tables of docs/api.md and the fields of protos/orchestrator.proto anew from the descriptions in server/api/fields.py.
docs: $(VENV)/.test
	$(BIN)/python -m server.api.document

# The same, and regenerates the committed protos/*_pb2* and their types, with the oldest grpcio-tools that pyproject.toml allows: what
# a newer one generates refuses to run with the older grpcio and protobuf that are allowed too.
protos: docs
	$(PYTHON) -m venv build/protos
	build/protos/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.80.0 mypy-protobuf==5.1.0
	PATH=build/protos/bin:$$PATH python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	    protos/orchestrator.proto protos/preheat.proto

clean:
	rm -rf $(VENV) build *.egg-info engine/native/*.so
