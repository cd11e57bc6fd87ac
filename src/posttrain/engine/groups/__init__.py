"""Worker groups. Empty until the single-controller issue lands; its place in the import order is held here."""
