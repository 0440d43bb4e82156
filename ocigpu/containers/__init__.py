"""Containers that exist on this host: found, explained, compared and changed.  Nothing here is on the hot path."""
