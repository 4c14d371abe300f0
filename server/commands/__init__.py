"""The commands of ``preheat``.

Who calls: a shell, through ``cli.main``, which parses and dispatches without loading JAX; each command is a module.
What goes through: a configuration (``server/config``) goes in, an exit code comes out.
Who owns what: ``serve`` owns the process of a server, from its ports to its signals; ``generate``, ``plan``, ``build`` and
``cache`` serve nobody and end by themselves. An error a user can mend is a `server.errors.StartError`, printed as one line.
"""
