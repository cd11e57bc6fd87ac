"""The web console: pages that the server renders for a browser that logged in by a token."""

CONSOLE = "console"  # the request for a rendered page in a worker; not a verb of `Control`
