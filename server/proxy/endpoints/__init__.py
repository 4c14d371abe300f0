"""The HTTP API: one module for each endpoint, or for several that are one thing.

An endpoint is an `Endpoint` at the top of a module of this package, with its paths, its method, its handler and its
description; it is found here, so that nothing else has to list it: ``server/proxy/routes.py`` routes to it, the API key is
asked of it, and ``/openapi.json`` tells of it.
"""

from __future__ import annotations

import importlib
import pkgutil

from server.proxy.endpoint import Endpoint

__all__ = ["ENDPOINTS"]


def find_endpoints() -> tuple[Endpoint, ...]:
    """All of them, by module and line; those with parameters in their paths last, for they match what others are meant for.

    Raises `ValueError` where two have the same path and method: one of them would never be called.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    tops = [value for name in names for value in vars(importlib.import_module(f"{__name__}.{name}")).values()]
    endpoints = list(dict.fromkeys(value for value in tops if isinstance(value, Endpoint)))
    taken: set[tuple[str, str]] = set()
    for endpoint in endpoints:
        for path in (endpoint.path, *endpoint.also):
            if (path, endpoint.method) in taken:
                raise ValueError(f"two endpoints are {endpoint.method} {path}")
            taken.add((path, endpoint.method))
    return tuple(sorted(endpoints, key=lambda endpoint: "{" in endpoint.path))


ENDPOINTS = find_endpoints()
