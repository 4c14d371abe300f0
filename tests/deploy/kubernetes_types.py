"""What a manifest may say: Kubernetes' own types as `lightkube` has them, generated from its OpenAPI, read strictly.

Of the three kinds that Kubernetes does not have, the fields used here, after their definitions in LeaderWorkerSet 0.10, KubeRay 1.7 and the
Prometheus operator 0.93.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import msgspec
from lightkube.models import core_v1, meta_v1
from lightkube.models.util_intstr import IntOrString


class RollingUpdateConfiguration(msgspec.Struct):
    maxSurge: IntOrString | None = None
    maxUnavailable: IntOrString | None = None


class RolloutStrategy(msgspec.Struct):
    type: str
    rollingUpdateConfiguration: RollingUpdateConfiguration | None = None


class LeaderWorkerTemplate(msgspec.Struct):
    workerTemplate: core_v1.PodTemplateSpec
    leaderTemplate: core_v1.PodTemplateSpec | None = None
    size: int | None = None
    restartPolicy: str | None = None


class LeaderWorkerSetSpec(msgspec.Struct):
    leaderWorkerTemplate: LeaderWorkerTemplate
    replicas: int | None = None
    rolloutStrategy: RolloutStrategy | None = None


class LeaderWorkerSet(msgspec.Struct):
    apiVersion: str
    kind: str
    metadata: meta_v1.ObjectMeta
    spec: LeaderWorkerSetSpec


class HeadGroupSpec(msgspec.Struct):
    template: core_v1.PodTemplateSpec
    rayStartParams: dict[str, str] | None = None


class WorkerGroupSpec(msgspec.Struct):
    groupName: str
    template: core_v1.PodTemplateSpec
    replicas: int | None = None
    minReplicas: int | None = None
    maxReplicas: int | None = None
    rayStartParams: dict[str, str] | None = None


class RayClusterSpec(msgspec.Struct):
    headGroupSpec: HeadGroupSpec
    rayVersion: str | None = None
    workerGroupSpecs: list[WorkerGroupSpec] | None = None


class RayServiceSpec(msgspec.Struct):
    rayClusterConfig: RayClusterSpec
    serveConfigV2: str | None = None


class RayService(msgspec.Struct):
    apiVersion: str
    kind: str
    metadata: meta_v1.ObjectMeta
    spec: RayServiceSpec


class PodMetricsEndpoint(msgspec.Struct):
    port: str | None = None
    path: str | None = None
    interval: str | None = None


class PodMonitorSpec(msgspec.Struct):
    selector: meta_v1.LabelSelector
    podMetricsEndpoints: list[PodMetricsEndpoint]


class PodMonitor(msgspec.Struct):
    apiVersion: str
    kind: str
    metadata: meta_v1.ObjectMeta
    spec: PodMonitorSpec


CUSTOM = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LeaderWorkerSet,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("ray.io/v1", "RayService"): RayService,
}


def problems(document: dict[str, Any]) -> list[str]:
    """What is wrong with a whole object: wrong types and missing fields, or else the paths of fields that its kind does not have."""
    version, kind = document["apiVersion"], document["kind"]
    try:
        known = msgspec.to_builtins(msgspec.convert(document, CUSTOM.get((version, kind)) or _type_of(version, kind)))
    except msgspec.ValidationError as error:
        return [f"{kind}: {error}"]
    return list(_lost(document, known, kind))


def _type_of(version: str, kind: str) -> type:
    """``apps/v1`` is module ``apps_v1``, ``v1`` is ``core_v1``; groups lose what follows their first dot."""
    group, _, number = version.rpartition("/")
    return getattr(importlib.import_module(f"lightkube.models.{group.partition('.')[0] or 'core'}_{number}"), kind)


def _lost(before: Any, after: Any, path: str) -> Iterator[str]:
    """What reading has dropped, for it knew no such field."""
    if isinstance(before, dict):
        for name, value in before.items():
            if name in after:
                yield from _lost(value, after[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}: no such field"
    elif isinstance(before, list):
        for index, (item, kept) in enumerate(zip(before, after, strict=True)):
            yield from _lost(item, kept, f"{path}[{index}]")
