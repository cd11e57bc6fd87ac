"""The data plane: versioned assets (datasets, models, rewards) and what can be said of them."""
