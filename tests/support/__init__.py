"""What tests share: contents, files in memory, crafted damage."""
