"""The server that a team shares: `Control` over HTTP."""
