"""From a configuration to an engine that is ready.

Who calls: ``serve``, and every command that needs an engine or only its programs.
What goes through: ``model_files`` finds the model, ``warm_engine`` reads its configuration, lays the engine out, compiles or loads
its programs while the weights load, and runs each program once; ``proof`` sends real requests through the whole server.
Who owns what: the caller owns the engine that comes out. Nothing here knows of a running request.
"""
