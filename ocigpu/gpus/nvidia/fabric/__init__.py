"""NVLink partitions of a board with NVSwitches, by way of NVIDIA's Fabric Manager."""
