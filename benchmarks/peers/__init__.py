"""Other libraries to compare with. Each is optional, and imported where it is used."""
