"""The file of docs/format.md: constants, blob headers, containers, reading and writing. No codecs."""
