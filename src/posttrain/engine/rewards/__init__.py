"""Function rewards, evaluated in a killable worker process."""
