"""The decision plane: gate rules and release channels. It returns decisions, which `control` executes."""
