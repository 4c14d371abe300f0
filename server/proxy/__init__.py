"""The HTTP front door: a stateless proxy, in a process of its own, before one or more orchestrators.

It holds no model files and imports neither JAX nor the engine. The life of a request: `routes` leads to one of `endpoints`;
`answering` has the JSON read and checked (``server/api/parsing.py``), `generation` opens a gRPC call per prompt at
one of the `upstreams`, which `policy` chooses; `answer_formats` turns messages into what the API promises, and `transport` sends
it, watching whether the client is still there.
"""
