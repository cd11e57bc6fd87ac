"""HTTP floor. Empty until the server issue lands; its place in the import order is held here."""
