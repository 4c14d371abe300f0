"""The engine: everything that runs on the accelerator, and nothing that knows of requests, sockets or clocks.

``api``          the verbs that a server calls (prefill, insert, generate, fetch) and the values that cross them
``config``       what a model is (`ModelConfig`) and how it is laid out to be served (`EngineConfig`)
``programs``     the table of XLA programs: every program that serving can ever call, and nothing else
``jax_engine``   the engine on JAX;  ``mock``  an engine whose output can be computed by hand

The server imports this package through ``api`` and ``config``; this package imports neither ``server`` nor ``warmup``.
"""
