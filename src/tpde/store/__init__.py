"""States of models, and what changed between them: delta files."""
