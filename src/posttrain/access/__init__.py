"""Access: identities of principals, and what they may do in a project."""
