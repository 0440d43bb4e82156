"""``ocigpu mps-control-daemon``: GPUs shared by MPS."""
