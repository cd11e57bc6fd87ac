"""Back-ends that run workers: in the controller's own process, or in Ray actors."""
