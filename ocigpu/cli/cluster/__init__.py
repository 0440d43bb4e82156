"""Programs and commands of a cluster: plugin, driver, labels, leases, tenancies, service."""
