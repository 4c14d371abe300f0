"""The HTTP front door: a stateless proxy, in a process of its own, before one or more orchestrators.

It holds no model files and imports neither JAX nor the engine. The life of a request: `app` reads and checks the JSON
(``server/api/fields.py``), `upstreams` picks an orchestrator and opens a gRPC call per prompt, `shapes` turns messages into
what the API promises, and `http` sends it, watching whether the client is still there.
"""
