"""Attacks that go on: mutated files, failing system calls, kills, losses of power. See security.md."""
