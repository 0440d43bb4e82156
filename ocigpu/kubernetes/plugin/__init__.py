"""``ocigpu device-plugin``: the kubelet's device plugin for extended resources."""
