"""A kubelet's pod-resources interface that answers from a file; in a process of its own, because gRPC starts threads.

``python podresources.py SOCKET FILE``; FILE, read for each request, is JSON: ``{"pods": [[namespace, pod, container,
resource, [device id, ...]], ...], "claims": [[namespace, pod, container, claim, driver, pool, device, [CDI name, ...]],
...]}``, ``{"fail": text}`` or ``{"delay": seconds, ...}``.  Prints a line when it listens.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from ocigpu.kubernetes.api import podresources_pb2 as pb
from ocigpu.kubernetes.api.services import POD_RESOURCES, serve


def main(path: str, file: str) -> None:
    def list_(_request: Any, context: grpc.ServicerContext) -> pb.ListPodResourcesResponse:
        data = json.loads(Path(file).read_text())
        time.sleep(data.get("delay", 0))
        if "fail" in data:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, data["fail"])
        pods = []
        for namespace, pod, container, resource, ids in data["pods"]:
            devices = [pb.ContainerDevices(resource_name=resource, device_ids=[id_]) for id_ in ids]
            containers = [pb.ContainerResources(name=container, devices=devices)]
            pods.append(pb.PodResources(name=pod, namespace=namespace, containers=containers))
        for namespace, pod, container, claim, driver, pool, name, names in data.get("claims", ()):
            part = pb.ClaimResource(
                cdi_devices=[pb.CDIDevice(name=each) for each in names],
                driver_name=driver, pool_name=pool, device_name=name,
            )  # fmt: skip
            dynamic = pb.DynamicResource(claim_name=claim, claim_namespace=namespace, claim_resources=[part])
            containers = [pb.ContainerResources(name=container, dynamic_resources=[dynamic])]
            pods.append(pb.PodResources(name=pod, namespace=namespace, containers=containers))
        return pb.ListPodResourcesResponse(pod_resources=pods)

    def refuse(_request: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "only List is served")

    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers(
        (serve(POD_RESOURCES, dict.fromkeys(POD_RESOURCES.methods_by_name, refuse) | {"List": list_}),)
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    print("listening", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
