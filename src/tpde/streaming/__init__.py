"""Models larger than a GPU: packed weights copied, decoded and used under a budget of device memory."""
