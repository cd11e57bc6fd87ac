"""Where workers live: in the controller's own process, or in Ray actors."""
