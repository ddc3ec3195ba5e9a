"""Files that earlier releases wrote, and what made them."""
