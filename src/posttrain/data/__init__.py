"""The data plane: versioned assets (datasets, models, rewards) and their inspection."""
