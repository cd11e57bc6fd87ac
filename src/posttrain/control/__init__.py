"""The control plane: planning, reconciler, lifecycle actions, budgets. The only place where planes meet."""
