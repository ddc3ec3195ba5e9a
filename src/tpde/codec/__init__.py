"""The codecs of docs/format.md: the native core, zstd, constants, and a slow reference of each."""
