"""Options: where values come from, how they are parsed, what a mistake is answered with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.commands.cli import main
from server.config import commands
from server.config.commands import ProxyConfig, ServeConfig, load_proxy_config, load_serve_config
from server.errors import StartError


def test_defaults_are_those_of_the_contract():
    made = load_serve_config({}, {})
    assert made.model == made.served_model_name == "smollm2-135m-instruct"
    assert (made.host, made.http_port, made.grpc_port, made.no_http) == ("127.0.0.1", 8000, 9000, False)
    assert (made.warmup, made.slots, made.tp, made.dtype, made.quantize) == ("manual", 8, 1, "auto", "none")
    assert (made.request_timeout, made.drain_timeout, made.metrics_port) == (None, 30.0, None)
    assert (made.api_key, made.tls_cert, made.tls_key, made.log_format) == ((), None, None, "text")
    assert made.warmup_cache is not None and made.warmup_cache.name == "preheat"


def test_command_line_beats_environment_beats_file(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("slots = 2\nmax-len = 100\nmodel = 'of-file'\nprefill_buckets = [16, 32]\nno-http = true\n")
    made = load_serve_config({"config": str(file), "slots": "5"}, {"PREHEAT_SLOTS": "3", "PREHEAT_MAX_LEN": "200"})
    assert (made.slots, made.max_len, made.model, made.prefill_buckets, made.no_http) == (
        5,
        200,
        "of-file",
        (16, 32),
        True,
    )
    assert load_serve_config({}, {"PREHEAT_CONFIG": str(file)}).slots == 2


def test_lists_are_comma_separated_and_repeatable():
    made = load_serve_config(
        {"api_key": ["a,b", "c"], "batch_sizes": ["1,2", "8"]}, {"PREHEAT_PREFILL_BUCKETS": "16, 64"}
    )
    assert (made.api_key, made.batch_sizes, made.prefill_buckets) == (("a", "b", "c"), (1, 2, 8), (16, 64))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("800MiB", 800 * 2**20),
        ("12GB", 12 * 10**9),
        ("2G", 2 * 2**30),
        ("4096", 4096),
        ("1 TiB", 2**40),
        ("10kb", 10_000),
    ],
)
def test_memory_sizes(text, size):
    assert load_serve_config({"memory": text}, {}).memory == size


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("org/Llama-3", "Llama-3"),
        ("/models/llama/", "llama"),
        ("./x.gguf", "x.gguf"),
        ("tiny", "tiny"),
    ],
)
def test_served_name_is_the_last_part_of_the_model(model, name):
    assert load_serve_config({"model": model}, {}).served_model_name == name


@pytest.mark.parametrize(
    ("given", "origins"),
    [
        (["*"], ("*",)),
        (["http://localhost:3000,https://a.example"], ("http://localhost:3000", "https://a.example")),
        (["HTTPS://A.example:443/", "null"], ("https://a.example", "null")),  # as browsers spell it (RFC 6454 6.2)
        (["http://[::1]:80", "app://obsidian.md"], ("http://[::1]", "app://obsidian.md")),
    ],
)
def test_origins_are_those_that_browsers_send(given, origins):
    assert load_serve_config({"cors_origin": given}, {}).cors_origin == origins
    assert load_proxy_config({"cors_origin": given}, {}).cors_origin == origins
    assert load_serve_config({}, {}).cors_origin == ()


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ({"slots": "0"}, {}, "--slots = '0' (command line): must be an integer from 1 to 4096"),
        ({"slots": "2.5"}, {}, "--slots = '2.5' (command line)"),
        ({}, {"PREHEAT_SLOTS": "many"}, "PREHEAT_SLOTS = 'many' (environment): must be an integer"),
        ({"http_port": "70000"}, {}, "--http-port = '70000' (command line): must be a port from 0 to 65535"),
        ({"warmup": "eager"}, {}, "must be one of manual, aot, none"),
        ({"memory": "lots"}, {}, "such as 12GiB"),
        ({"memory": "0"}, {}, "more than 0 bytes"),
        ({"request_timeout": "-1"}, {}, "seconds"),
        ({"request_timeout": "nan"}, {}, "seconds"),
        ({"request_timeout": "1e300"}, {}, "seconds from 0.001 to 1e+09, or none"),
        ({"drain_timeout": "1e10"}, {}, "seconds from 0 to 1e+09"),
        ({"memory": "9" * 400}, {}, "less than 8 EiB"),
        ({"memory": "8388608TiB"}, {}, "less than 8 EiB"),
        ({"no_http": None}, {"PREHEAT_NO_HTTP": "maybe"}, "must be true or false"),
        ({"prefill_buckets": ["16,x"]}, {}, "--prefill-buckets = '16,x' (command line): must be an integer"),
        ({"prefill_buckets": ["32,16"]}, {}, "--prefill-buckets 32,16: must be in rising order"),
        ({"batch_sizes": ["1,1"]}, {}, "--batch-sizes 1,1: must be in rising order"),
        ({"tls_cert": __file__}, {}, "--tls-cert is given without --tls-key"),
        ({"tls_cert": "/nowhere/cert.pem"}, {}, "--tls-cert = '/nowhere/cert.pem' (command line): cannot be read"),
        ({"http_port": "9000"}, {}, "--grpc-port and --http-port are both 9000"),
        ({"model": ""}, {}, "--model = '' (command line): must not be empty"),
        ({"cors_origin": ["example.org"]}, {}, "--cors-origin = 'example.org' (command line): must be scheme://host"),
        ({"cors_origin": ["https://example.org/app"]}, {}, "without a path"),
        ({"cors_origin": ["https://*.example.org"]}, {}, "without a path"),
        ({"config": "/nowhere.toml"}, {}, "--config /nowhere.toml: cannot be read"),
    ],
)
def test_a_mistake_names_option_value_and_source(arguments, environment, said):
    with pytest.raises(StartError) as caught:
        load_serve_config(arguments, environment)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("slot = 3", "unknown option 'slot'; did you mean slots?"),
        ("slots = ", "not valid TOML"),
        ("slots = 'x'", "slots = 'x' (file"),
        ("slots = [1, 2]", "must be a single value"),
        ("slots = {a = 1}", "must be a text"),
        ("slots = true", "must be an integer"),
    ],
)
def test_a_mistake_in_the_file(tmp_path, content, said):
    file = tmp_path / "bad.toml"
    file.write_text(content)
    with pytest.raises(StartError) as caught:
        load_serve_config({"config": str(file)}, {})
    assert said in str(caught.value) and str(file) in str(caught.value)


def test_keys_are_not_shown():
    assert "hunter2" not in repr(load_serve_config({"api_key": ["hunter2"]}, {}))
    with pytest.raises(StartError) as caught:
        load_serve_config({"api_key": ["hunter2 x"]}, {})
    assert "hunter2" not in str(caught.value)


def test_a_certificate_is_tried_at_once():
    tls = Path(__file__).with_name("tls")
    load_serve_config({"tls_cert": str(tls / "test_cert.pem"), "tls_key": str(tls / "test_key.pem")}, {})
    with pytest.raises(StartError) as caught:
        load_serve_config({"tls_cert": __file__, "tls_key": str(tls / "test_key.pem")}, {})
    assert __file__ in str(caught.value) and "PEM" in str(caught.value)


def test_ports_may_be_equal_where_they_are_not_used():
    load_serve_config({"http_port": "9000", "no_http": "true"}, {})
    load_serve_config({"http_port": "0", "grpc_port": "0"}, {})


@pytest.mark.parametrize(
    ("chunk", "max_len", "buckets"),
    [
        (None, 2048, (16, 32, 64, 128, 256, 512)),
        (None, 100, (16, 32, 64, 100)),
        (48, 2048, (16, 32, 48)),
        (16, 2048, (16,)),
        (8, 2048, (8,)),
        (None, 10, (10,)),
    ],
)
def test_prefill_buckets_are_powers_of_two_up_to_the_chunk(chunk, max_len, buckets):
    assert commands.resolve_prefill_buckets(ServeConfig(prefill_chunk=chunk), max_len) == buckets


@pytest.mark.parametrize(("slots", "sizes"), [(8, (1, 2, 4, 8)), (6, (1, 2, 4, 6)), (1, (1,)), (3, (1, 2, 3))])
def test_batch_sizes_are_powers_of_two_and_the_slots(slots, sizes):
    assert commands.resolve_batch_sizes(ServeConfig(slots=slots)) == sizes


def test_sizes_are_what_groups_of_devices_can_share():
    assert commands.resolve_batch_sizes(ServeConfig(slots=8, dp=2)) == (2, 4, 8)
    assert commands.resolve_batch_sizes(ServeConfig(slots=8, dp=2, ep=4)) == (8,)
    assert commands.resolve_prefill_buckets(ServeConfig(dp=4), 2048) == (64, 128, 256, 512)
    assert commands.resolve_prefill_buckets(ServeConfig(dp=3), 100) == (48, 96, 102)


def test_what_contradicts_the_model_or_other_options():
    assert commands.resolve_max_len(ServeConfig(), 8192) == 2048
    assert commands.resolve_max_len(ServeConfig(), 1024) == 1024
    assert commands.resolve_max_len(ServeConfig(max_len=4096), 8192) == 4096
    assert commands.resolve_max_queue(ServeConfig(slots=6)) == 24
    assert commands.resolve_max_queue(ServeConfig(max_queue=0)) == 0
    for call, numbers in [
        (lambda: commands.resolve_max_len(ServeConfig(max_len=9000), 8192), ("9000", "8192")),
        (lambda: commands.resolve_prefill_buckets(ServeConfig(prefill_chunk=512), 256), ("512", "256")),
        (lambda: commands.resolve_prefill_buckets(ServeConfig(prefill_buckets=(16, 512)), 256), ("512", "256")),
        (
            lambda: commands.resolve_prefill_buckets(ServeConfig(prefill_buckets=(16, 64), prefill_chunk=32), 256),
            ("64", "32"),
        ),
        (lambda: commands.resolve_batch_sizes(ServeConfig(slots=8, batch_sizes=(1, 4))), ("1,4", "8")),
    ]:
        with pytest.raises(StartError) as caught:
            call()
        assert all(number in str(caught.value) for number in numbers)


def test_proxy_options():
    made = load_proxy_config({"upstream": ["a:1", "b:2"]}, {"PREHEAT_API_KEY": "k"})
    assert (made.upstream, made.api_key) == (("a:1", "b:2"), ("k",))
    assert ProxyConfig().upstream == ("127.0.0.1:9000",)
    with pytest.raises(StartError, match="must be host:port"):
        load_proxy_config({"upstream": ["nowhere"]}, {})


def test_a_start_error_is_one_line_and_exit_code_1(capsys):
    assert main(["serve", "--slots", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("preheat: --slots = '0'") and captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["serve", "--nonsense"], ["cache", "burn"], ["generate", "--top-k", "x"]])
def test_usage_errors_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--file", "y"], "both"),
        (["generate", "--file", "/nowhere"], "cannot be read"),
        (["generate", "x", "--temperature", "-1"], "temperature must be a number from 0"),
        (["generate", "x", "--seed", str(2**63)], "seed must be an integer from"),
    ],
)
def test_generate_checks_its_arguments_before_loading_anything(arguments, said, capsys):
    assert main(arguments) == 1
    assert said in capsys.readouterr().err


def test_help_and_the_proxy_import_neither_jax_nor_the_engine():
    program = (
        "import sys, server.commands.cli, server.proxy.main\n"
        "try: server.commands.cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'jaxlib', 'engine', 'warmup', 'numpy', 'flax'}\n"
        "bad = [name for name in sys.modules if name.split('.')[0] in heavy]\n"
        "assert not bad, bad\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--max-len" in done.stdout


def test_adapters(tmp_path):
    made = load_serve_config({"lora": ["a=/x/one,b=two", "c = /x=y"]}, {})
    assert made.lora == (("a", Path("/x/one")), ("b", Path("two")), ("c", Path("/x=y")))
    assert load_serve_config({}, {"PREHEAT_LORA": "a=/x"}).lora == (("a", Path("/x")),)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"lora": ["a"]}, "name=path"),
        ({"lora": ["=x"]}, "name=path"),
        ({"lora": ["a="]}, "name=path"),
        ({"lora": ["a=x", "a=y"]}, "two adapters have that name"),
        ({"lora": ["llama=x"], "model": "/models/llama"}, "--served-model-name"),
        ({"lora": ["m=x"], "served_model_name": "m"}, "--served-model-name"),
    ],
)
def test_adapters_that_cannot_be(arguments, said):
    with pytest.raises(StartError) as caught:
        load_serve_config(arguments, {})
    assert "--lora" in str(caught.value) and said in str(caught.value)
