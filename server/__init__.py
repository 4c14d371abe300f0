"""The front doors, and the life of a request.

The rooms, from the roof down. Each imports only rooms below it (``tests/server/test_architecture.py``)::

    commands       what ``preheat serve``, ``generate``, ``plan``, ... do
    start          a configuration becomes a warm engine, and proves it
    proxy          the HTTP door, a process of its own: JSON in, events out
    grpc           the gRPC door: ``Decode`` and what the proxy needs beside it
    client         a gRPC client; the proxy's and the proof's way in
    orchestrator   threads, scheduler, pages: from an accepted request to its last token
    config         options of the commands and where their values come from
    api            what a request may say: one description of each field
    text           tokenizers, chat templates, tool forms, grammars, stop strings
    telemetry      metrics and logs
    errors         every error a client can be answered with

Three ways through the house:

* A request: ``proxy.endpoints`` -> ``proxy.answering`` -> ``api.parsing`` -> ``client`` -> ``grpc.decode`` ->
  ``orchestrator.validation`` -> ``orchestrator.orchestrator`` -> prefill, generate, detokenize -> ``grpc.streams`` ->
  ``proxy.answer_formats``.
* A start: ``commands.cli`` -> ``config.commands`` -> ``commands.serve`` -> ``start.warm_engine`` -> ``start.proof`` -> ready.
* A step: ``orchestrator.generate_worker`` asks ``orchestrator.scheduler`` for rows, the engine for tokens, and commits them.
"""
