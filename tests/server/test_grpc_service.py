"""The gRPC port, over real sockets, on the mock engine: after a byte comes the next one."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path

import grpc
import pytest
from front_doors import MAX_LEN, NAME, open_doors
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engine.mock import Table
from protos import orchestrator_pb2_grpc, preheat_pb2
from protos.conventions import MESSAGE_LIMIT
from protos.orchestrator_pb2 import DecodeRequest, HealthCheckRequest
from server import errors
from server.client import AsyncClient, Client, DecodeCall, decode_request
from server.errors import StartError
from server.grpc.server import GrpcServer
from server.telemetry.metrics import Metrics

TIMEOUT = 20.0
BOS = 256
TLS = Path(__file__).with_name("tls")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def doors():
    with open_doors(http=False) as opened:
        yield opened


@pytest.fixture
def client(doors):
    with Client(doors.grpc.address, timeout=TIMEOUT) as made:
        yield made


def test_text_in_text_and_ids_out(client):
    answer = client.generate("abc", max_tokens=4)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("defg", (100, 101, 102, 103), "length")
    assert (answer.prompt_tokens, answer.completion_tokens) == (4, 4)


def test_has_bos_adds_none(client):
    request = decode_request("abc", max_tokens=1)
    request.has_bos = True
    assert list(client.decode(request))[-1].usage.prompt_tokens == 3


def test_ids_in_ids_out_and_text_where_asked(client):
    request = DecodeRequest(max_tokens=3)
    request.token_content.token_ids.extend([97])
    messages = list(client.decode(request))
    assert [token for message in messages for token in message.stream_content.samples[0].token_ids] == [98, 99, 100]
    assert "".join(message.stream_content.samples[0].text for message in messages) == ""
    assert messages[-1].usage.prompt_tokens == 1  # exactly as given
    request.want_text = True
    assert "".join(message.stream_content.samples[0].text for message in client.decode(request)) == "bcd"


def test_stop_strings_work_on_ids_without_text(client):
    request = DecodeRequest(max_tokens=9, stop=["e"])
    request.token_content.token_ids.extend([97])
    messages = list(client.decode(request))
    last = messages[-1].stream_content.samples[0]
    assert (last.finish_reason, last.stop_string) == ("stop", "e")
    assert all(message.stream_content.samples[0].text == "" for message in messages)


def test_every_message_has_one_sample_per_sample(client):
    messages = list(client.decode(decode_request("a", max_tokens=3, n=3, echo=True, logprobs=1, prompt_logprobs=0)))
    assert {len(message.stream_content.samples) for message in messages} == {3}
    for sample in range(3):
        assert "".join(message.stream_content.samples[sample].text for message in messages) == "bcd"
    assert messages[-1].usage.completion_tokens == 9


def test_without_a_length_it_goes_on_to_the_end(client):
    answer = client.generate("a")
    assert (answer.completion_tokens, answer.finish_reason) == (MAX_LEN - 2, "length")


def test_echo_and_prompt_log_probs(client):
    first = next(iter(client.decode(decode_request("ab", max_tokens=1, echo=True, prompt_logprobs=1))))
    assert (first.prompt.text, list(first.prompt.token_ids)) == ("ab", [BOS, 97, 98])
    nothing, a, b = first.prompt.logprobs
    assert not nothing.HasField("logprob") and nothing.special
    assert (a.text, a.raw, len(a.alternatives), a.special) == ("a", b"a", 1, False)
    assert b.logprob == pytest.approx(0, abs=1e-5) and b.alternatives[0].token_id == 98  # b follows a for certain


def test_prompt_only_generates_nothing(client):
    messages = list(client.decode(decode_request("ab", prompt_only=True, prompt_logprobs=0)))
    assert messages[-1].usage.completion_tokens == 0
    assert messages[0].prompt.token_ids[-1] == 98 and messages[0].prompt.text == ""


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"temperature": -1.0}, errors.InvalidRequest, "temperature"),
        ({"top_k": -5}, errors.InvalidRequest, "top_k"),
        ({"max_tokens": 1000}, errors.InvalidRequest, "max_tokens"),
        ({"model": "other"}, errors.ModelNotFound, "model"),
        ({"stop_token_ids": [100_000]}, errors.InvalidRequest, "stop_token_ids"),
    ],
)
def test_errors_keep_their_type_and_field(client, options, kind, param):
    with pytest.raises(errors.ServerError) as caught:
        client.generate("a", **options)
    assert (type(caught.value), caught.value.param) == (kind, param)


@pytest.mark.parametrize("prompt", [[], [-1], [320], [2**31 - 1]])
def test_prompts_that_are_no_tokens(client, prompt):
    with pytest.raises(errors.InvalidRequest) as caught:
        client.generate(prompt)
    assert caught.value.param == "prompt"


def test_no_content(client):
    with pytest.raises(errors.InvalidRequest, match="text_content or token_content"):
        list(client.decode(DecodeRequest(max_tokens=1)))


def test_outcomes_add_up(doors, client):
    def total():
        return sum(
            doors.metrics.value("preheat_requests_total", outcome=name)
            for name in ("ok", "error", "rejected", "cancelled", "invalid")
        )

    before = total()
    client.generate("a", max_tokens=1)
    for bad in ({"temperature": -1.0}, {"max_tokens": 1000}):
        with pytest.raises(errors.InvalidRequest):
            client.generate("a", **bad)
    assert total() == before + 3


def test_the_state_tells_how_many_sequences_there_may_be(client):
    state = client.call(client.preheat.State, preheat_pb2.StateRequest())
    assert (state.state, state.running, state.slots, state.capacity) == ("ready", 0, 4, 4 + 16)  # and the queue's


def test_messages_over_the_transports_default_limit(client):
    with pytest.raises(errors.InvalidRequest) as caught:
        client.generate("x" * 5_000_000)  # the default limit is 4 MiB
    assert "5000000 characters" in caught.value.message


def test_a_message_over_our_limit(client):
    with pytest.raises(errors.TooLarge):
        client.generate("x" * (MESSAGE_LIMIT + 1))


def test_a_fault_of_ours_is_internal_and_says_nothing(doors, client, monkeypatch, caplog):
    def broken(*arguments, **keywords):
        raise ZeroDivisionError("a secret of the inside")

    monkeypatch.setattr(doors.orchestrator, "submit", broken)
    with pytest.raises(errors.InternalError) as caught:
        client.generate("a")
    assert "secret" not in caught.value.message
    assert "a secret of the inside" in caplog.text  # for us


def test_a_fault_in_tokenizing_is_counted(doors, client, monkeypatch):
    before = doors.metrics.value("preheat_requests_total", outcome="error")
    monkeypatch.setattr(doors.grpc.model.tokenizer, "encode", lambda *arguments, **keywords: 1 / 0)
    with pytest.raises(errors.InternalError):
        client.generate("a")
    assert doors.metrics.value("preheat_requests_total", outcome="error") == before + 1


def test_a_fault_in_tokenizing_ends_that_request():
    def hook(stage, text):
        assert stage == "tokenize"
        if text == "unlucky":
            raise ZeroDivisionError("a secret of the inside")

    with open_doors(http=False, fault_hook=hook) as doors, Client(doors.grpc.address, timeout=TIMEOUT) as client:
        with pytest.raises(errors.InternalError) as caught:
            client.generate("unlucky", max_tokens=2)
        assert "secret" not in caught.value.message
        assert client.generate("a", max_tokens=2).text == "bc"
        assert doors.metrics.value("preheat_requests_total", outcome="error") == 1
        assert doors.metrics.value("preheat_requests_total", outcome="ok") == 1


def test_refusals_at_the_door_are_logged(doors, client, caplog):
    with caplog.at_level("INFO", "preheat.request"):
        with pytest.raises(errors.InvalidRequest):
            client.generate("a", temperature=-1.0, request_id="mine")
        with pytest.raises(errors.InvalidRequest):
            client.generate("a", request_id="two\nlines")
    first, second = (record.request for record in caplog.records if record.name == "preheat.request")
    assert (first["id"], first["outcome"]) == ("mine", "invalid") and "temperature" in first["error"]
    assert (second["id"], second["outcome"]) == ("-", "invalid")


def test_the_death_of_the_grpc_thread_is_told(monkeypatch, caplog):
    died = threading.Event()

    async def dies(self, started):
        started.set_result(None)
        raise OSError("no more file descriptors")

    monkeypatch.setattr(GrpcServer, "_serve", dies)
    server = GrpcServer(NAME, metrics=Metrics(), on_death=lambda error: died.set())
    server.start()
    assert died.wait(TIMEOUT)
    assert (server.state, "no more file descriptors" in server.reason) == ("failed", True)
    server.stop(0)


def test_async_client(doors):
    async def talk():
        async with AsyncClient(doors.grpc.address, timeout=TIMEOUT) as client:
            whole, pieces = await asyncio.gather(
                client.generate("a", max_tokens=3), collect(client.stream("x", max_tokens=2))
            )
            with pytest.raises(errors.InvalidRequest):
                await client.generate("a", max_tokens=1000)
            return whole.text, "".join(piece.text for piece in pieces)

    async def collect(stream):
        return [piece async for piece in stream]

    assert asyncio.run(talk()) == ("bcd", "yz")


def test_leaving_cancels_the_call_and_not_the_read():
    """A cancelled read of gRPC loses native memory."""

    class Call:
        cancelled = False

        def __init__(self):
            self.ended, self.reading = asyncio.Event(), asyncio.Event()

        async def read(self):
            self.reading.set()
            await self.ended.wait()
            return grpc.aio.EOF

        def cancel(self):
            Call.cancelled = True
            self.ended.set()

    async def leave():
        call = Call()
        reader = asyncio.ensure_future(anext(aiter(DecodeCall(call))))
        await asyncio.wait_for(call.reading.wait(), TIMEOUT)
        (read,) = asyncio.all_tasks() - {reader, asyncio.current_task()}
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert Call.cancelled
        assert await asyncio.wait_for(read, TIMEOUT) is grpc.aio.EOF

    asyncio.run(leave())


def test_tokenizer_and_chat_methods(client):
    assert client.tokenize("aé") == [BOS, 97, 195, 169]
    assert client.tokenize("<|eos|>") == [BOS, 257]
    assert client.tokenize("<|eos|>", parse_special=False, add_bos=False) == [*b"<|eos|>"]
    assert client.detokenize([97, 195, 169, 257]) == "aé"
    assert client.detokenize([97, 195, 169, 257], skip_special_tokens=False) == "aé<|eos|>"
    with pytest.raises(errors.InvalidRequest) as caught:
        client.detokenize([500])
    assert caught.value.param == "tokens"
    rendered = client.call(
        client.preheat.RenderChat, preheat_pb2.RenderChatRequest(messages=json.dumps([{"role": "user", "content": "<|eot|>"}]))
    )
    assert rendered.text == "user: <|eot|><|eot|>assistant: "
    assert list(rendered.token_ids) == [*b"user: <|eot|>", 258, *b"assistant: "]  # only the template's own is one
    for bad in ("{", "5", "[5]", "[" * 100_000):
        with pytest.raises(errors.InvalidRequest):
            client.call(client.preheat.RenderChat, preheat_pb2.RenderChatRequest(messages=bad))
    card = client.call(client.preheat.ModelCard, preheat_pb2.ModelCardRequest())
    assert (card.name, card.max_len, card.vocab_size, card.has_chat_template) == (NAME, MAX_LEN, 320, True)


def test_reflection_describes_the_services(doors):
    with grpc.insecure_channel(doors.grpc.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"jetstream_proto.Orchestrator", "preheat.v1.Preheat", "grpc.health.v1.Health"} <= set(
            database.get_services()
        )
        file = database.FindFileContainingSymbol("jetstream_proto.DecodeRequest")
        message = next(message for message in file.message_type if message.name == "DecodeRequest")
        numbers = {field.name: field.number for field in message.field}
        assert numbers["max_tokens"] == 4 and numbers["has_bos"] == 10 and numbers["temperature"] == 20


def test_cancelling_frees_everything():
    with open_doors(http=False) as opened, Client(opened.grpc.address, timeout=TIMEOUT) as client:
        gate = opened.engine.gate("generate")
        messages = client.decode(decode_request("a", max_tokens=50))
        assert next(messages).stream_content.samples[0].text == "b"
        assert gate.arrived()
        messages.close()
        until(lambda: opened.orchestrator.load[0] == 0)
        gate.open()
        assert client.generate("x", max_tokens=1).text == "y"
        assert opened.metrics.value("preheat_requests_total", outcome="cancelled") == 1


def test_a_deadline_ends_a_request():
    with open_doors(http=False, request_timeout=0.2) as opened, Client(opened.grpc.address, timeout=TIMEOUT) as client:
        gate = opened.engine.gate("generate")
        with pytest.raises(errors.TimedOut):
            client.generate("a", max_tokens=50)
        gate.open()


def test_a_full_queue_refuses_at_once():
    with open_doors(http=False, slots=1, max_queue=0) as opened, Client(opened.grpc.address, timeout=TIMEOUT) as client:
        gate = opened.engine.gate("generate")
        messages = client.decode(decode_request("a", max_tokens=5))
        next(messages)
        with pytest.raises(errors.QueueFull) as caught:
            client.generate("b")
        assert caught.value.retry_after >= 1
        gate.open()
        assert "".join(message.stream_content.samples[0].text for message in messages) == "cdef"


def test_a_slow_reader_gets_everything():
    """While nothing reads, deltas gather; what is then read is complete and in order."""
    with open_doors(Table({97: {98: 1.0}, 98: {97: 1.0}}), http=False) as opened, Client(opened.grpc.address) as client:
        messages = client.decode(decode_request([97], max_tokens=60, logprobs=20))
        first = next(messages)
        until(lambda: opened.orchestrator.load[0] == 0)  # the server is done, the client has read one message
        rest = list(messages)
        tokens = [token for message in [first, *rest] for token in message.stream_content.samples[0].token_ids]
        assert tokens == [98, 97] * 30
        assert sum(len(message.stream_content.samples[0].logprobs) for message in [first, *rest]) == 60


def test_before_the_model_is_there():
    server = GrpcServer("early", metrics=Metrics(), slots=3, warmup_report=lambda: {"state": "loading"})
    server.start()
    try:
        with Client(server.address, timeout=TIMEOUT) as client:
            assert client.state().state == "loading"
            assert client.call(client.preheat.ModelCard, preheat_pb2.ModelCardRequest()).name == "early"
            assert json.loads(client.call(client.preheat.Warmup, preheat_pb2.WarmupRequest()).json) == {"state": "loading"}
            assert "preheat_requests_total" in client.call(client.preheat.Metrics, preheat_pb2.MetricsRequest()).text
            for attempt in (lambda: client.generate("a"), lambda: client.tokenize("a")):
                with pytest.raises(errors.Unavailable) as caught:
                    attempt()
                assert caught.value.retry_after
            assert client.orchestrator.HealthCheck(HealthCheckRequest(), timeout=TIMEOUT).is_live
            server.fail("out of luck")
            assert not client.orchestrator.HealthCheck(HealthCheckRequest(), timeout=TIMEOUT).is_live
            assert client.state().reason == "out of luck"
    finally:
        server.stop(0)


def test_health_follows_the_state():
    with open_doors(http=False, ready=False) as opened, grpc.insecure_channel(opened.grpc.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        statuses = health_pb2.HealthCheckResponse
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        assert next(watch).status == statuses.NOT_SERVING
        opened.orchestrator.open()
        assert next(watch).status == statuses.SERVING
        for service in ("", "jetstream_proto.Orchestrator", "preheat.v1.Preheat"):
            assert (
                stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT).status == statuses.SERVING
            )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=TIMEOUT)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        opened.orchestrator.drain(0)
        assert next(watch).status == statuses.NOT_SERVING
        watch.cancel()
        with Client(opened.grpc.address, timeout=TIMEOUT) as client, pytest.raises(errors.Unavailable):
            client.generate("a")


def test_api_keys():
    with open_doors(http=False, api_key=("k1", "k2")) as opened:
        for key in ("k1", "k2"):
            with Client(opened.grpc.address, api_key=key, timeout=TIMEOUT) as client:
                assert client.generate("a", max_tokens=1).text == "b"
        for key in (None, "k3", "k", "k11"):
            with Client(opened.grpc.address, api_key=key, timeout=TIMEOUT) as client:
                for attempt in (lambda: client.generate("a"), lambda: client.tokenize("a")):
                    with pytest.raises(errors.Unauthenticated):
                        attempt()
                assert client.state().state == "ready"  # open, as health and metrics are
                assert client.orchestrator.HealthCheck(HealthCheckRequest(), timeout=TIMEOUT).is_live


def test_tls():
    tls = ((TLS / "test_cert.pem").read_bytes(), (TLS / "test_key.pem").read_bytes())
    with (
        open_doors(http=False, tls=tls) as opened,
        Client(opened.grpc.address, ca=TLS / "test_cert.pem", timeout=TIMEOUT) as client,
    ):
        assert client.generate("a", max_tokens=1).text == "b"
        with Client(opened.grpc.local_address, timeout=TIMEOUT) as local:  # of this machine and user only
            assert local.generate("a", max_tokens=1).text == "b"


def test_a_taken_port_is_a_start_error(doors):
    with pytest.raises(StartError, match=f"--grpc-port {doors.grpc.port}"):
        GrpcServer("second", metrics=Metrics(), port=doors.grpc.port).start()


def test_generated_code_runs_with_the_oldest_dependencies():
    project = (ROOT / "pyproject.toml").read_text()
    for package, pattern in [
        ("grpcio", r"GRPC_GENERATED_VERSION = '([0-9.]+)'"),
        ("protobuf", r"Protobuf Python Version: ([0-9.]+)"),
    ]:
        oldest = re.search(rf'"{package}>=([0-9.]+)"', project)[1]
        generated = {
            version for file in (ROOT / "protos").glob("*_pb2*.py") for version in re.findall(pattern, file.read_text())
        }
        assert generated and all(as_tuple(version) <= as_tuple(oldest) for version in generated)


def test_all_our_fields_are_numbered_from_20():
    for message, theirs in [
        (DecodeRequest, {4, 5, 6, 7, 8, 9, 10}),
        (orchestrator_pb2_grpc.protos_dot_orchestrator__pb2.DecodeResponse, {2, 3}),
    ]:
        numbers = {field.number for field in message.DESCRIPTOR.fields}
        assert {number for number in numbers if number < 20} == theirs
        assert all(field.has_presence or field.is_repeated for field in message.DESCRIPTOR.fields if field.number >= 20)


def as_tuple(version):
    numbers = [int(part) for part in version.split(".")]
    return tuple(numbers + [0] * (3 - len(numbers)))


def until(condition, timeout=TIMEOUT):
    """Waits for what another thread does; there is no event to wait on from out here."""
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        pause.wait(0.005)
