"""JetStream's ``Orchestrator``: ``Decode`` and ``HealthCheck``.

A ``Decode`` call becomes a `GenerateRequest`, goes to ``Orchestrator.submit`` with a `StreamSink`, and the coroutine
sends what the sink collects. When the client leaves, grpc cancels the coroutine, which cancels the ticket. What is
refused before it reaches the orchestrator is counted here; the orchestrator counts the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import math
import secrets
import time
from collections.abc import AsyncIterator, Sequence

import grpc

from protos import conventions, orchestrator_pb2, orchestrator_pb2_grpc
from protos.orchestrator_pb2 import DecodeRequest, DecodeResponse
from server.api import decode_fields, field_types, fields
from server.api.fields import RequestFields
from server.errors import InvalidRequest, ServerError, Unavailable
from server.grpc.door import PROOF_METADATA, RETRY_STARTING, Door, Model, Ticket, abort
from server.grpc.streams import MessageWriter, StreamSink
from server.orchestrator import validation
from server.orchestrator.live_request import log_outcome
from server.orchestrator.request import GenerateRequest
from server.telemetry.metrics import Outcome
from server.text.guided import Guide
from server.text.tokenizers import Tokenizer


class OrchestratorService(Door, orchestrator_pb2_grpc.OrchestratorServicer):
    """JetStream's service."""

    async def HealthCheck(
        self,
        request: orchestrator_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[orchestrator_pb2.HealthCheckRequest, orchestrator_pb2.HealthCheckResponse],
    ) -> orchestrator_pb2.HealthCheckResponse:
        return orchestrator_pb2.HealthCheckResponse(is_live=self._server.state != "failed")

    async def Decode(
        self, request: DecodeRequest, context: grpc.aio.ServicerContext[DecodeRequest, DecodeResponse]
    ) -> AsyncIterator[DecodeResponse]:
        ticket: Ticket | None = None
        try:
            proof = self._is_proof(context)
            sink, writer, wire_prompt, built, model = await self._prepare(request, context, proof)
            ticket = model.orchestrator.submit(built, sink, proof=proof)
            await context.send_initial_metadata(((conventions.ACCEPTED, "1"),))
            echoed = wire_prompt is None  # nothing to bring back
            while True:
                await sink.ready()
                prompt_logprobs, pending, usage, error = sink.take()
                if not echoed and (prompt_logprobs is not None or not built.prompt_logprobs):
                    echoed = True
                    for message in writer.prompt(built.prompt, wire_prompt or None, prompt_logprobs):
                        yield message
                for message in writer.deltas(pending, usage):
                    yield message
                if error is not None:
                    raise error
                if usage is not None:
                    ticket = None
                    return
        except ServerError as error:
            if error.param == "n":
                error.param = "num_samples"  # what this API calls it
            await abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
            raise
        except Exception:
            await self._fault(context)
        finally:
            if ticket is not None:
                ticket.cancel()

    def _is_proof(self, context: grpc.aio.ServicerContext[DecodeRequest, DecodeResponse]) -> bool:
        """The warmup proof comes in as any client does, before the server is ready, by a key that only this process
        knows."""
        return any(
            name == PROOF_METADATA and isinstance(value, str) and hmac.compare_digest(value, self._server.proof_key)
            for name, value in context.invocation_metadata() or ()
        )

    async def _prepare(
        self, request: DecodeRequest, context: grpc.aio.ServicerContext[DecodeRequest, DecodeResponse], proof: bool
    ) -> tuple[StreamSink, MessageWriter, str | None, GenerateRequest, Model]:
        """Checks the call and makes the orchestrator's request; counts what is refused here."""
        try:
            model = self._loaded()
            if model.orchestrator.state != "ready" and not proof:
                raise Unavailable(f"the server is {model.orchestrator.state}", retry_after=RETRY_STARTING)
        except Unavailable as error:
            self._refused(request, "rejected", error)
            raise
        try:
            parsed = decode_fields.fields_from_proto(request)
            is_text = request.WhichOneof("content") == "text_content"
            if is_text:
                text = request.text_content.text
                validation.check_text_length(text, model.limits)
                add_bos = parsed.add_special_tokens is not False and not request.has_bos
                ids: Sequence[int] = await self._work(self._encode, model.tokenizer, text, add_bos, parsed.parse_special)
            elif request.WhichOneof("content") == "token_content":
                ids = request.token_content.token_ids
            else:
                raise InvalidRequest("prompt is required: set text_content or token_content", param="prompt")
            remaining = context.time_remaining()
            timeout = min(math.inf if limit is None else limit for limit in (remaining, self._server.request_timeout))
            built = validation.build_request(
                parsed,
                ids,
                model.limits,
                request_id=parsed.request_id or secrets.token_hex(8),
                detokenize=is_text or parsed.want_text or bool(parsed.stop),
                deadline=time.monotonic() + timeout,
            )
            built = dataclasses.replace(
                built,
                guide=await self._guide(model, parsed),
                shown_special=_shown_special(model, parsed),
            )
        except ServerError as error:
            self._refused(request, "invalid", error)
            raise
        except asyncio.CancelledError:
            self._refused(request, "cancelled", "the client left before its request was queued")
            raise
        except Exception:
            self._refused(request, "error", "a fault in reading the request")
            raise
        wire_prompt = None  # text of the echoed prompt; "" where only its log-probs are wanted
        if parsed.echo:
            wire_prompt = (
                request.text_content.text
                if is_text
                else await self._work(model.tokenizer.decode, list(ids), skip_special=parsed.skip_special_tokens)
            )
        elif built.prompt_logprobs:
            wire_prompt = ""
        writer = MessageWriter(
            model.tokenizer,
            built,
            echoed=wire_prompt or "",
            prompt=request.text_content.text if is_text else None,
            text=is_text or parsed.want_text,
            logprobs=parsed.logprobs,
            prompt_logprobs=parsed.prompt_logprobs,
        )
        return StreamSink(self._server.waker, len(built.sampling)), writer, wire_prompt, built, model

    async def _guide(self, model: Model, parsed: RequestFields) -> Guide | None:
        """Compiled before the request is queued, in a thread of its own, so that a heavy one delays other such only."""
        for name in fields.GUIDED:
            if (value := getattr(parsed, name)) is not None:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._server.grammar_worker, model.guides.compile, name, value)
        return None

    def _encode(self, tokenizer: Tokenizer, text: str, add_bos: bool, parse_special: bool) -> list[int]:
        if self._server.fault_hook is not None:
            self._server.fault_hook("tokenize", text)
        return tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def _refused(self, request: DecodeRequest, outcome: Outcome, error: ServerError | str) -> None:
        """Counts and logs a request that does not reach the orchestrator."""
        self._server.metrics.outcome(outcome)
        try:
            identifier = field_types.request_id(request.request_id)
        except ValueError:
            identifier = "-"
        log_outcome(identifier, outcome, error=error if isinstance(error, str) else error.message)


def _shown_special(model: Model, parsed: RequestFields) -> frozenset[int]:
    """The control tokens that the answer's text shows."""
    if not parsed.skip_special_tokens:
        return model.tokenizer.special_ids
    return model.tool_markers if parsed.show_tool_markers else frozenset()
