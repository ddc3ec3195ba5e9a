"""Sources and sinks: bytes read and written at an offset; files that appear whole or not at all."""
