"""The engine: everything that runs on the accelerator, and nothing that knows of requests, sockets or clocks.

Who calls: the server, through ``api`` (the verbs: prefill, insert, generate, fetch, and the values that cross them) and
``config`` (what a model is, `ModelConfig`, and how it is laid out to be served, `EngineConfig`); warmup, through the table.
The rooms, from the roof down; each imports only rooms below it (``tests/server/test_architecture.py``)::

    loader, fills    a checkpoint's tensors become the weights; agreement settles where config and tensors differ
    peft, families, checkpoints    what files say: adapters, models, formats. On the host; nothing that is traced imports them
    mock             an engine whose output can be computed by hand
    jax_engine       the engine on JAX: owns weights, decode state and prefixes, and calls programs by their names
    table, kinds     the table of programs: every program that serving can ever call, and nothing else
    functions, segments    what the programs do, on arrays only
    model, moe, adapters, layers, attention, kernels, native, sampling, rope    the decoder and the sampler
    state, weights, sharding, programs    abstract trees, how devices share them, and what a row of the table is
    quantization, api, discovery, config

This package imports neither ``server`` nor ``warmup``.
"""
