"""Pure arithmetic: token, time and statistical-power estimates."""
