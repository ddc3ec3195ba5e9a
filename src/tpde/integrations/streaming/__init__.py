"""Loading models under a budget of device memory: what the integrations of all libraries share."""
