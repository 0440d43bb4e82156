"""Tenants of a cluster: tenancies, the controller that keeps them, and the service in front.

The GPUs of a node between two tenants are :mod:`ocigpu.kubernetes.leases`.
"""
