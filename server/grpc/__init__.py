"""The gRPC door: JetStream's ``Orchestrator``, our ``Preheat``, ``grpc.health.v1`` and reflection.

Who calls: JetStream's clients, our own (``server/client.py``), and the HTTP proxy, which comes in through a Unix socket.
What goes through: a ``DecodeRequest`` becomes a `server.orchestrator.request.GenerateRequest` and goes to the orchestrator;
its tokens come back through a `streams.StreamSink` as messages.
Who owns what: ``server`` owns the event loop, its thread and the ports; each call is a coroutine there (``decode``,
``preheat``, ``health``). Tokenizing, templates and grammars run in pools of threads, so that no stream waits for them.
Cancelling a call cancels its request.
"""
