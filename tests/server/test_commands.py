"""Which function a command calls, with what; and how log lines look."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import types

import pytest

from server.commands.arguments import GenerateOptions
from server.commands.cli import main
from server.config.commands import ServeConfig
from server.telemetry.logs import JsonFormatter


@pytest.fixture
def called(monkeypatch):
    """Stands in for the modules that do the work, and records their calls."""
    calls = []

    def record(name):
        return lambda *arguments: calls.append((name, arguments)) or 7

    for module, functions in {"serve": ["serve"], "build": ["build", "plan"], "cache": ["cache"], "generate": ["generate"]}.items():
        fake = types.SimpleNamespace(**{name: record(name) for name in functions})
        monkeypatch.setitem(sys.modules, f"server.commands.{module}", fake)
        monkeypatch.setattr(f"server.commands.{module}", fake, raising=False)
    for name in list(os.environ):
        if name.startswith("PREHEAT_"):
            monkeypatch.delenv(name)
    return calls


@pytest.mark.parametrize(
    ("command", "name", "more"),
    [
        (["serve", "--slots", "3"], "serve", None),
        (["build", "--slots", "3", "--target", "v5e-4"], "build", "v5e-4"),
        (["plan", "--slots", "3"], "plan", None),
        (["cache", "list", "--slots", "3"], "cache", "list"),
    ],
)
def test_commands_reach_their_functions(called, command, name, more):
    assert main(command) == 7
    [(function, arguments)] = called
    assert function == name and arguments[0] == ServeConfig(slots=3)
    if name != "serve":
        assert arguments[1] == more


def generated(called) -> GenerateOptions:
    [(name, (config, options))] = called
    assert name == "generate" and isinstance(config, ServeConfig)
    return options


def test_generate_takes_prompts_and_options(called):
    assert (
        main(
            [
                "generate",
                "one",
                "two",
                "--chat",
                "--max-tokens",
                "5",
                "--temperature",
                "0.5",
                "--seed",
                "9",
                "--stop",
                "a",
                "--stop",
                "b",
                "--ignore-eos",
                "--n",
                "2",
            ]
        )
        == 7
    )
    options = generated(called)
    assert (options.prompts, options.chat) == (("one", "two"), True)
    sampling = options.sampling
    assert (
        sampling.max_tokens,
        sampling.temperature,
        sampling.seed,
        sampling.stop,
        sampling.ignore_eos,
        sampling.n,
    ) == (5, 0.5, 9, ("a", "b"), True, 2)


def test_generate_is_silent_where_the_user_is(called):
    main(["generate", "x"])
    sampling = generated(called).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed, sampling.stop, sampling.ignore_eos) == (
        None,
        None,
        None,
        (),
        False,
    )


def test_generate_reads_a_file_and_standard_input(called, tmp_path, monkeypatch):
    file = tmp_path / "prompts.txt"
    file.write_text("first é\n\nsecond\n", encoding="utf-8")
    main(["generate", "--file", str(file)])
    assert generated(called).prompts == ("first é", "second")
    called.clear()
    monkeypatch.setattr(sys, "stdin", io.StringIO("a prompt\nof two lines\n"))
    main(["generate"])
    assert generated(called).prompts == ("a prompt\nof two lines",)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff"])
def test_generate_without_a_usable_prompt(called, tmp_path, content, capsys):
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    assert main(["generate", "--file", str(file)]) == 1
    assert capsys.readouterr().err.startswith("preheat: ") and not called


def test_json_log_lines():
    record = logging.makeLogRecord(
        {"name": "preheat", "levelname": "INFO", "msg": "a %s", "args": ("b",), "request": {"id": "é"}}
    )
    line = JsonFormatter().format(record)
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["logger"], parsed["message"], parsed["request"]) == (
        "info",
        "preheat",
        "a b",
        {"id": "é"},
    )
    try:
        raise ValueError("x")
    except ValueError:
        failed = logging.makeLogRecord({"msg": "bad", "exc_info": sys.exc_info()})
    line = JsonFormatter().format(failed)
    assert "\n" not in line and "ValueError: x" in json.loads(line)["exception"]
