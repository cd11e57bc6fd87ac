"""A workspace that is open: its folder, its settings, where its ledger is, and the planes over it."""
