"""ComputeDomains: nodes whose pods share GPU memory over multi-node NVLink, through IMEX daemons of their own."""
