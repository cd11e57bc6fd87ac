"""The web console: pages that the server renders for browsers in which a user has logged in with a token."""

CONSOLE = "console"  # the request for a rendered page in a worker; not a verb of `Control`
