"""The kubelet's interfaces: messages, generated from our own .proto files, and the methods by name.

``deviceplugin_pb2``: device plugins, v1beta1.  ``podresources_pb2``: which containers have what, v1.
Methods are called and served through :mod:`~.services`.
"""
