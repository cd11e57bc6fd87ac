"""The web console: pages that the server draws, for a browser that logged in by a token."""

CONSOLE = "console"  # what a worker is asked for: no verb of `Control`, but a page of what it answers
