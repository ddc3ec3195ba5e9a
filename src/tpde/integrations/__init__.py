"""Other libraries' ways of loading and saving, over packed files. Importing one imports its library."""
