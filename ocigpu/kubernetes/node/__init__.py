"""A node's GPUs as the kubelet counts them: read, shared, configured, watched."""
