"""The control plane: planning, reconciler, lifecycle actions, budgets. The only package that calls all the others."""
