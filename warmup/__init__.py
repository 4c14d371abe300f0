"""Warming up: everything between "the engine is described" and "nothing compiles any more".

``prepare``      the way in: prepares the table of programs in one of the modes, then runs each once
``manual``       the jitted functions, compiled ahead through JAX's persistent cache
``aot``          executables loaded from the artifact store, or compiled, stored and loaded back
``compiling``    lowering on one thread, compiling on several; donations are asserted here
``store``        the artifact store; ``fingerprint`` what names its folders; ``trust`` who may write them
``cache``        list and prune
``plan``         the memory plan: budget, KV pages, what fits
``target``       building for TPUs on a machine without them
``guard``        counts traces and compiles, at all times
``report``       what `GET /warmup` and the log show

This package imports ``engine`` (its configuration and table of programs), and nothing of ``server``.
"""
