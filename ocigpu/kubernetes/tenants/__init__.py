"""GPU containers of several tenants on nodes without a GPU driver: leases, tenancies, and the service in front."""
