"""Memory of devices and of Python: what is free, what a process may take, what is collected when."""
