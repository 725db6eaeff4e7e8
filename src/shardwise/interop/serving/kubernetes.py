"""Kubernetes manifests that start an engine: a Deployment for instances of one node, a LeaderWorkerSet for larger ones.

Sources: Kubernetes' API reference (apps/v1 Deployment, v1 Service); LeaderWorkerSet's API reference,
leaderworkerset.x-k8s.io/v1, and its variables LWS_LEADER_ADDRESS and LWS_WORKER_INDEX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

MAX_NAME = 50  # characters of an object's name, with room for what controllers add to the 63 that a label has
MOUNT_PATH = "/etc/serving"  # of files in a container
DEVICE_RESOURCES: Mapping[str, str] = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """Instances of an engine: `replicas` groups of `num_nodes` pods with `devices` each.

    `leader` and `worker` are the words of the command; the workers of a group join its leader. `resource` is the name of the
    device plug-in's resource. `files` are mounted in `MOUNT_PATH`.
    """

    name: str
    image: str
    port: int
    leader: Sequence[str]
    worker: Sequence[str]
    replicas: int
    num_nodes: int
    devices: int
    resource: str
    files: Mapping[str, str] = field(default_factory=dict)


def object_name(text: str) -> str:
    """Return a name that Kubernetes allows for an object: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_NAME].rstrip("-") or "serving"


def write_manifest(group: PodGroup) -> str:
    """Return the manifest of instances and of the service in front of them.

    The controller of a LeaderWorkerSet makes a headless service of the set's name, by which its pods find each other, unless a
    service has that name already. Source: leaderworkerset_controller.go, reconcileHeadlessServices.
    """
    labels = {"app": group.name}
    is_spread = group.num_nodes > 1
    workload = _leader_worker_set(group, labels) if is_spread else _deployment(group, labels)
    selector = {**labels, "role": "leader"} if is_spread else labels
    service_name = f"{group.name}-leader" if is_spread else group.name
    service = {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": service_name},
        "spec": {"selector": selector, "ports": [{"port": group.port, "targetPort": group.port}]},
    }  # fmt: skip
    objects = [workload, service]
    if group.files:
        metadata = {"name": f"{group.name}-files"}
        objects.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(group.files)})
    text: str = import_module("yaml").safe_dump_all(objects, sort_keys=False, width=120)
    return text


def _deployment(group: PodGroup, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": group.name, "labels": dict(labels)},
        "spec": {
            "replicas": group.replicas, "selector": {"matchLabels": dict(labels)},
            "template": _pod_template(group, group.leader, labels, is_leader=True),
        },
    }  # fmt: skip


def _leader_worker_set(group: PodGroup, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1", "kind": "LeaderWorkerSet",
        "metadata": {"name": group.name, "labels": dict(labels)},
        "spec": {
            "replicas": group.replicas,
            "leaderWorkerTemplate": {
                "size": group.num_nodes, "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": _pod_template(group, group.leader, {**labels, "role": "leader"}, is_leader=True),
                "workerTemplate": _pod_template(group, group.worker, labels, is_leader=False),
            },
        },
    }  # fmt: skip


def _pod_template(
    group: PodGroup, tokens: Sequence[str], labels: Mapping[str, str], *, is_leader: bool
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "engine", "image": group.image, "command": list(tokens),
        "resources": {"limits": {group.resource: group.devices}},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    if is_leader:
        probe = {"httpGet": {"path": "/health", "port": group.port}, "periodSeconds": 10, "failureThreshold": 180}
        container |= {"ports": [{"containerPort": group.port}], "startupProbe": probe}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if group.files:
        container["volumeMounts"].append({"name": "files", "mountPath": MOUNT_PATH})
        volumes.append({"name": "files", "configMap": {"name": f"{group.name}-files"}})
    return {"metadata": {"labels": dict(labels)}, "spec": {"containers": [container], "volumes": volumes}}
