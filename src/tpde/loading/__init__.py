"""Loading models from packed files: what the integrations of all libraries share."""
