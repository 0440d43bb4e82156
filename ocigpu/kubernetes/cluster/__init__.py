"""The API server and what stands in it, read and written: clients, pods with GPUs, quantities, events, election."""
