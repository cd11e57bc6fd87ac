"""Pure functions on packed tensors: advantages, losses, KL estimators."""
