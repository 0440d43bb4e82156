"""Commands about this host and its GPUs."""
