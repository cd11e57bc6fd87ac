"""The control plane: planning, reconciler, lifecycle actions, budgets. Only this package calls all the others."""
