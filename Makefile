# `make serve` and `make test` work on a fresh machine that has Python 3.11-3.13 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test protos golden clean

serve: $(STAMP)
	$(BIN)/preheat serve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

# The editable install follows the sources; it is made anew only when the dependencies change.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

# Regenerates the committed *_pb2*.py files, with the oldest grpcio-tools that pyproject.toml allows: generated code refuses to
# run with a grpcio or protobuf older than what generated it.
protos:
	$(PYTHON) -m venv build/protos
	build/protos/bin/python -m pip install --quiet grpcio-tools==1.80.0
	build/protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

clean:
	rm -rf $(VENV) build *.egg-info
