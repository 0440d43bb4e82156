"""The fabric service: NVLink partitions for the machines of tenants, over gRPC."""
