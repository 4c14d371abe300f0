"""``grpc.health.v1``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.grpc.door import DECODE, HEALTH, PREHEAT, Door


class HealthService(Door, health_pb2_grpc.HealthServicer):
    """``grpc.health.v1``: SERVING while requests are accepted, overall and for each service."""

    _services = ("", DECODE, PREHEAT, HEALTH)
    _watch_interval = 0.2  # seconds between looks at the state

    def _status(self, service: str) -> int:
        statuses = health_pb2.HealthCheckResponse
        status: int = statuses.SERVING if self._server.state == "ready" else statuses.NOT_SERVING
        if service not in self._services:
            status = statuses.SERVICE_UNKNOWN
        return status

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(
        self,
        request: health_pb2.HealthListRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthListRequest, health_pb2.HealthListResponse],
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._services}
        )

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        sent = None
        while True:
            status = self._status(request.service)
            if status != sent:
                sent = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(self._watch_interval)
