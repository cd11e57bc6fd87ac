"""The data plane: versioned assets (data sets, models, rewards) and their inspection."""
