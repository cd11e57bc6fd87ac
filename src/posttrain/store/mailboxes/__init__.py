"""The back-ends of mailboxes, one file each. They do not import each other."""
