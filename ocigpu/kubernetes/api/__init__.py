"""The kubelet's interfaces: messages, generated from our own .proto files, and the methods by name.

``deviceplugin_pb2``: device plugins, v1beta1.  ``podresources_pb2``: which containers have what, v1.
``dra_v1``, ``dra_v1beta1``: drivers of dynamic resource allocation; ``dra_health_...``: the health of their devices.
``pluginregistration_pb2``: how the kubelet finds those.
Methods are called and served through :mod:`~.services`.
"""
