"""An open workspace: its folder, its settings, the place of its ledger, and the components that work on them."""
