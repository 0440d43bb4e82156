"""``ocigpu node-labels``: what a node's GPUs are, as labels of the node."""
