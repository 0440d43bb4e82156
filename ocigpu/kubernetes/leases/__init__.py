"""The life of a GPU between two tenants, kept by its node: device plugin and DRA driver ask the gate first."""
