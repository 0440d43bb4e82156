"""ocigpu gives containers their NVIDIA GPUs and shows its work."""

__version__ = "0.1.0"
