"""The command ``preheat``: which function does the work of which command.

Imports are made when they are needed, so that ``--help`` and ``preheat proxy`` load neither JAX nor a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from server.api import fields, parsing
from server.commands.arguments import GenerateOptions, make_parser
from server.config.commands import ProxyConfig, load_proxy_config, load_serve_config
from server.errors import InvalidRequest, StartError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code. Usage errors exit with 2, as argparse has it."""
    started = time.monotonic()
    parsed = make_parser().parse_args(arguments)
    try:
        return _dispatch(parsed, started)
    except StartError as error:
        print(f"preheat: {error}", file=sys.stderr)
        return 1


def _dispatch(parsed: argparse.Namespace, started: float) -> int:
    given = vars(parsed)
    if parsed.command == "proxy":
        return _proxy(load_proxy_config(given, os.environ), parsed.listen_fd, parsed.lifeline_fd)
    config = load_serve_config(given, os.environ)
    request = _generate_options(parsed) if parsed.command == "generate" else None

    if parsed.command == "serve":
        from server.commands import serve  # loads JAX

        return serve.serve(config, started)

    if parsed.command == "cache":
        from server.commands import cache

        return cache.cache(config, parsed.action)
    if parsed.command in ("build", "plan"):
        from server.commands import build  # loads JAX

        return build.build(config, parsed.target) if parsed.command == "build" else build.plan(config, parsed.target)

    from server.commands import generate  # loads JAX

    assert request is not None
    return generate.generate(config, request)


def _proxy(config: ProxyConfig, listen_fd: int | None, lifeline_fd: int | None) -> int:
    from server.proxy import process
    from server.proxy.main import run
    from server.telemetry.logs import configure_logging

    configure_logging(config.log_format)
    if listen_fd is not None:
        return run(config, socket.socket(fileno=listen_fd), lifeline_fd)
    listening = process.bind(config.host, config.http_port)
    where = (*config.upstream, *([str(config.upstream_file)] if config.upstream_file else []))
    logging.getLogger("preheat").info(
        "serving HTTP on %s for %s", process.url(config, listening.getsockname()[1]), ", ".join(where)
    )
    return run(config, listening)


def _generate_options(parsed: argparse.Namespace) -> GenerateOptions:
    sampling = {
        name.removeprefix("sampling_"): value for name, value in vars(parsed).items() if name.startswith("sampling_")
    }
    try:
        checked = parsing.parse({**sampling, "prompt": ""}, fields.COMPLETIONS)
    except InvalidRequest as error:
        raise StartError(str(error)) from None
    return GenerateOptions(
        _prompts(parsed), dataclasses.replace(checked, lora_adapter_id=parsed.adapter), parsed.chat
    )


def _prompts(parsed: argparse.Namespace) -> tuple[str, ...]:
    if parsed.prompts and parsed.file:
        raise StartError("prompts are given both as arguments and with --file: give one of them")
    if parsed.prompts:
        return tuple(parsed.prompts)
    try:
        if parsed.file:
            lines = Path(parsed.file).read_text(encoding="utf-8").splitlines()
            prompts = tuple(line for line in lines if line)
        else:
            prompts = tuple(filter(None, (sys.stdin.read().removesuffix("\n"),)))
    except OSError as error:
        raise StartError(f"--file {parsed.file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise StartError(f"{parsed.file or 'standard input'} is not UTF-8: byte {error.start} is not valid") from None
    if not prompts:
        raise StartError("there is no prompt: give one as an argument, with --file, or on standard input")
    return prompts


if __name__ == "__main__":
    sys.exit(main())
