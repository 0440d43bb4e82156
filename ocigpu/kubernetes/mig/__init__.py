"""``ocigpu mig``, ``ocigpu mig-manager``: the MIG layout of a node's GPUs."""
