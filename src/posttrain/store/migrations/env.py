"""Alembic's entry.

Runs the revisions on the connection (and inside the transaction) that `store.database` hands over.
"""

from alembic import context

from posttrain.store.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # both databases can; the caller commits, so a half-migrated ledger cannot exist
)
context.run_migrations()
