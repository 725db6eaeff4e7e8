"""Kubernetes manifests that start an engine: a Deployment for instances of one node, a LeaderWorkerSet for larger ones; and two
LeaderWorkerSets for pools of prefill and decode, with a router before them.

Sources: Kubernetes' API reference (apps/v1 Deployment, v1 Service); LeaderWorkerSet's API reference,
leaderworkerset.x-k8s.io/v1, and its variables LWS_LEADER_ADDRESS and LWS_WORKER_INDEX.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

MAX_NAME = 50  # characters of an object's name, with room for what controllers add to the 63 that a label has
MOUNT_PATH = "/etc/serving"  # of files in a container
ROUTER_IMAGE = "python:3.12-slim"  # routers are Python packages with compiled code for Linux
DEVICE_RESOURCES: Mapping[str, str] = {"NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodGroup:
    """Instances of an engine: `replicas` groups of `num_nodes` pods with `devices` each.

    `leader` and `worker` are the words of the command; the workers of a group join its leader. `resource` is the name of the
    device plug-in's resource. `files` are mounted in `MOUNT_PATH`. `pod_variables` are variables of each pod, by the field of
    Kubernetes that has the value.
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
    pod_variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def leader_hosts(self) -> list[str]:
        """Hosts of the leaders of a LeaderWorkerSet, by the headless service that its controller makes."""
        return [f"{self.name}-{index}.{self.name}" for index in range(self.replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPod:
    """Program that sends requests to the instances of pools: the words of its command, and the package that installs it."""

    name: str
    port: int
    command: Sequence[str]
    package: str


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
    objects = [workload, _service(service_name, selector, group.port)]
    if group.files:
        metadata = {"name": f"{group.name}-files"}
        objects.insert(0, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(group.files)})
    return _yaml_text(objects)


def write_pools_manifest(pools: Sequence[PodGroup], router: RouterPod) -> str:
    """Return the manifest of two pools, each a LeaderWorkerSet whose leaders have hosts of their own, and of the router."""
    labels = {"app": router.name}
    command = f"pip install --quiet {router.package} && exec {shlex.join(router.command)}"
    container = {
        "name": "router", "image": ROUTER_IMAGE, "command": ["sh", "-c", command], "ports": [{"containerPort": router.port}],
    }  # fmt: skip
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": router.name, "labels": labels},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }  # fmt: skip
    sets = [_leader_worker_set(group, {"app": group.name}) for group in pools]
    return _yaml_text([*sets, deployment, _service(router.name, labels, router.port)])


def _yaml_text(objects: Sequence[Mapping[str, Any]]) -> str:
    """Return objects as the documents of a YAML text, without references between them."""
    yaml = import_module("yaml")

    class PlainDumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    text: str = yaml.dump_all(objects, Dumper=PlainDumper, sort_keys=False, width=120)
    return text


def _service(name: str, selector: Mapping[str, str], port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name},
        "spec": {"selector": dict(selector), "ports": [{"port": port, "targetPort": port}]},
    }  # fmt: skip


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
    if group.pod_variables:
        container["env"] = [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in group.pod_variables.items()
        ]
    if is_leader:
        probe = {"httpGet": {"path": "/health", "port": group.port}, "periodSeconds": 10, "failureThreshold": 180}
        container |= {"ports": [{"containerPort": group.port}], "startupProbe": probe}
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if group.files:
        container["volumeMounts"].append({"name": "files", "mountPath": MOUNT_PATH})
        volumes.append({"name": "files", "configMap": {"name": f"{group.name}-files"}})
    return {"metadata": {"labels": dict(labels)}, "spec": {"containers": [container], "volumes": volumes}}
