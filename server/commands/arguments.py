"""The arguments of the commands, as argparse has them. Loads neither JAX nor a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata

from server.api import field_types, fields
from server.api.fields import RequestFields
from server.config import options
from server.config.commands import ProxyConfig, ServeConfig

EXAMPLES = """examples:
  preheat serve                                   the built-in model on HTTP 8000 and gRPC 9000
  preheat serve --model ./llama --warmup aot      a model of yours, executables kept for the next start
  preheat plan --model ./llama --slots 64         what would be compiled, and whether it fits
  preheat build --model ./llama --target v5e-4    compile for TPUs on a machine that has none
  preheat generate "Once upon a time" --max-tokens 40
  preheat proxy --upstream a:9000 --upstream b:9000

Every option of a command can also be set as PREHEAT_<NAME> in the environment (PREHEAT_MAX_LEN for --max-len), or in a
TOML file given with --config; the command line comes first, then the environment, then the file."""


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What ``preheat generate`` was asked for."""

    prompts: tuple[str, ...]
    sampling: RequestFields
    chat: bool  # each prompt is a user's message, put through the chat template


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="preheat",
        description="Serve large language models on JAX, without anybody waiting for a compile.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"preheat {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, config: type | None) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False
        )
        if config is not None:
            options.add_arguments(made, config)
        return made

    command("serve", "serve a model over HTTP and gRPC", ServeConfig)
    build = command("build", "compile every program of a configuration into the warmup cache and exit", ServeConfig)
    plan = command(
        "plan", "print the table of programs, shapes and memory, and whether it fits; start nothing", ServeConfig
    )
    for made in (build, plan):
        made.add_argument(
            "--target", metavar="SLICE", help="a TPU slice, such as v5e-4 or v5p-8, instead of this machine's device"
        )
    generate = command("generate", "generate offline, through the same engine", ServeConfig)
    _add_generate_arguments(generate)
    proxy = command("proxy", "the HTTP proxy alone, in front of one or more gRPC orchestrators", ProxyConfig)
    proxy.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)  # a socket bound by a server
    proxy.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)  # see server/proxy/process.py
    cache = command("cache", "list or prune the warmup cache", ServeConfig)
    cache.add_argument("action", choices=("list", "prune"), help="what to do")
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="without any: one from --file, or from standard input"
    )
    group.add_argument("--file", metavar="FILE", help="one prompt per line")
    group.add_argument("--chat", action="store_true", help="put each prompt through the model's chat template")
    group.add_argument("--adapter", metavar="NAME", help="answer with this adapter of --lora")
    for name, description in fields.DESCRIPTIONS.items():
        if description.flag:
            _add_sampling_flag(group, name)


def _add_sampling_flag(group: argparse._ArgumentGroup, name: str) -> None:
    """The flag of a request's field; its value is checked as that of ``/v1/completions``."""
    field = fields.COMPLETIONS[name]
    about = field.about.removesuffix(".").replace("%", "%%")
    flag, dest = options.flag_name(name), f"sampling_{name}"
    match field_types.schema_of(field.check).get("type"):
        case "integer":
            group.add_argument(flag, dest=dest, type=int, metavar="N", help=about)
        case "number":
            group.add_argument(flag, dest=dest, type=float, metavar="X", help=about)
        case "boolean":
            group.add_argument(flag, dest=dest, action="store_true", default=None, help=about)
        case _:
            group.add_argument(flag, dest=dest, action="append", metavar="TEXT", help=f"{about}; repeatable")


def _version() -> str:
    try:
        return importlib.metadata.version("preheat")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "unknown"
