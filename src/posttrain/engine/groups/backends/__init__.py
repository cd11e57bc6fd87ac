"""Where workers run: in the controller's own process, or in Ray actors."""
