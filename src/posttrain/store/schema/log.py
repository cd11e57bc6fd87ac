"""The event log and its Merkle tree.

What a crash may leave in any state: told by no event, made again from the other tables, or expired.

Who there is, in which project, with which role; and where events are sent on to.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
)

from posttrain.store.schema.columns import Counter, JsonText, metadata

events = Table(
    "events",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("principal", String(32), nullable=False),
    Column("auth", String(16), nullable=False),  # how the principal was known: os | token | …
    Column("request", String(32), nullable=False),  # of the transaction that wrote it
    Column("at", Float(53), nullable=False),
    Column("audited", JsonText, nullable=False),  # values of audited columns, and other states, numbers, digests
    Column("words", String(71)),  # salted digest of its row in `payloads`; NULL: it has none
    Column("leaf", LargeBinary(32), nullable=False),
    Index("events_by_place", "subject", "at"),
    Index("events_by_request", "request"),
    sqlite_autoincrement=True,  # an id is never used twice
)
payloads = Table(
    "payloads",
    metadata,
    Column("event", Counter, ForeignKey("events.id"), primary_key=True, autoincrement=False),
    Column("retention", String(16), nullable=False),
    Column("salt", LargeBinary(16), nullable=False),
    Column("body", JsonText, nullable=False),
)
unsealed = Table(
    "unsealed",
    metadata,
    Column("event", Counter, ForeignKey("events.id"), primary_key=True, autoincrement=False),
)
leaves = Table(
    "leaves",
    metadata,
    Column("sequence", Counter, primary_key=True, autoincrement=False),  # 1, 2, … without a gap
    Column("event", Counter, ForeignKey("events.id"), nullable=False, unique=True),
    Column("leaf", LargeBinary(32), nullable=False),
)
tiles = Table(
    "tiles",
    metadata,
    Column("level", Integer, primary_key=True),
    Column("position", Counter, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary(32), nullable=False),  # root over 256^(level + 1) leaves
)
tree_head = Table(
    "tree_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    Column("root", LargeBinary(32), nullable=False),
    Column("peaks", LargeBinary, nullable=False),  # roots of the perfect subtrees, the largest first
    CheckConstraint("id = 1", name="one_tree_head"),
)
# --- empty in every ledger: they stand in those of this schema, until the next one takes them away --------------------

events_before = Table(
    "events_before",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("payload", JsonText, nullable=False),
    Column("sequence", BigInteger, unique=True),
    Column("previous_hash", String(71)),
    Column("hash", String(71)),
    sqlite_autoincrement=True,  # an id is never used twice
)
chain_head = Table(
    "chain_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("sequence", BigInteger, nullable=False),
    Column("hash", String(71), nullable=False),
    CheckConstraint("id = 1", name="one_chain_head"),
)
schema_versions = Table(  # one row
    "schema_version",
    metadata,
    Column("version_num", String(32), nullable=False),
    Column("usable_since", String(32)),  # the oldest revision whose code may use it
    PrimaryKeyConstraint("version_num", name="schema_version_pkc"),
)
work = Table(
    "work",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(16), nullable=False),  # run | stage | sweep
    Column("object", Text, nullable=False),
    Column("affinity", Text),  # the host that alone may look at it
    Column("due_at", Float(53), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("wanted_version", BigInteger, nullable=False),  # counts who woke it
    Column("lease_owner", Text),
    Column("lease_token", String(32)),
    Column("lease_until", Float(53)),
    Column("failures", Integer, nullable=False),
    Column("failed_since", Float(53)),
    Column("error", Text, nullable=False),
    Column("traceback", Text, nullable=False),
    Column("dead_at", Float(53)),
    Index("work_by_object", "project", "kind", "object", unique=True),
    Index("work_by_time", "project", "due_at"),
)
watches = Table(  # of jobs: how long they have been silent
    "watches",
    metadata,
    Column("attempt", Text, primary_key=True),  # its name
    Column("run_id", String(64), nullable=False),
    Column("progress", Text, nullable=False),
    Column("quiet", Float(53), nullable=False),
    Column("at", Float(53), nullable=False),
    Index("watches_by_run", "run_id"),
)
hosts = Table(  # of a ledger that several have
    "hosts",
    metadata,
    Column("id", String(32), primary_key=True),  # the identity of its workspace folder
    Column("name", Text, nullable=False),  # HOSTNAME:FOLDER
    Column("url", Text, nullable=False),  # where the other servers reach the one that it has; empty: none
    Column("server", Text, nullable=False),  # process of that server, HOSTNAME:PID:START; empty: none
    Column("version", Text, nullable=False),  # of the Posttrain that said so
    Column("seen_at", Float(53), nullable=False),
)
requests = Table(  # what was answered, for whoever asks the same again because they heard nothing
    "requests",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("principal", String(32), primary_key=True),
    Column("key", String(64), primary_key=True),  # given by whoever asks
    Column("verb", String(64), nullable=False),
    Column("body", String(71), nullable=False),  # digest of what was asked
    Column("state", String(16), nullable=False),  # begun | done
    Column("owner", Text, nullable=False),  # process that began it
    Column("status", Integer),
    Column("answer", Text),
    Column("at", Float(53), nullable=False),
    Index("requests_by_time", "at"),
)
operations = Table(  # requests that are answered by and by, for whichever server is asked about one
    "operations",
    metadata,
    Column("id", String(26), primary_key=True),  # of its request
    Column("project", String(63), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("verb", String(64), nullable=False),
    Column("body", String(71), nullable=False),  # digest of what was asked
    Column("server", Text, nullable=False),  # process that carries it out, HOSTNAME:PID:START
    Column("document", Text, nullable=False),  # how it stands, as JSON
    Column("over", Integer, nullable=False),  # 1: it ended, and the document says how
    Column("ending", Integer, nullable=False),  # 1: somebody cancelled it
    Column("told_at", Float(53), nullable=False),  # by that process
    Column("looked_at", Float(53), nullable=False),
    Index("operations_by_time", "looked_at"),
)
uploads = Table(  # bytes that a project sent, in the store, though no row names them yet
    "uploads",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("shown", Integer, nullable=False),  # 1: a page, made for whoever may look
    Column("at", Float(53), nullable=False),
    Index("uploads_by_time", "at"),
)
parts = Table(  # of an upload that is under way: objects in the store
    "parts",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),  # of the whole
    Column("total", BigInteger, primary_key=True),  # bytes of the whole, as its sender says
    Column("start", BigInteger, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("object", Text, nullable=False),  # its name
    Column("at", Float(53), nullable=False),
    Index("parts_by_time", "at"),
)
grants = Table(  # of running jobs: which attempt stands behind the secret that one shows
    "grants",
    metadata,
    Column("digest", String(71), primary_key=True),  # of the secret
    Column("run_id", String(64), nullable=False),
    Column("stage", String(128), nullable=False),
    Column("number", Integer, nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("put_bytes", BigInteger, nullable=False),  # into its channel
    Index("grants_by_attempt", "run_id", "stage", "number"),
)
sessions = Table(  # of browsers: which token stands behind the secret that one shows
    "sessions",
    metadata,
    Column("digest", String(71), primary_key=True),  # of the secret
    Column("token", String(32), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Index("sessions_by_time", "expires_at"),
)
cursors = Table(  # how far each sink is
    "cursors",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("sink", String(63), primary_key=True),
    Column("sequence", BigInteger, nullable=False),  # of the last sealed event that was delivered
    Column("failures", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("failed_since", Float(53)),
    Column("not_before", Float(53)),
    Column("at", Float(53)),  # of the last delivery
    Column("lease_owner", Text),
    Column("lease_until", Float(53)),
)
projects = Table(
    "projects",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("created_at", Float(53), nullable=False),
    Column("images", JsonText),  # that its runs may name; null: nobody said
)
principals = Table(
    "principals",
    metadata,
    Column("id", String(32), primary_key=True),  # random: what events and rows name, so that a name can be erased
    Column("kind", String(16), nullable=False),  # user | service
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", Float(53), nullable=False),
)
roles = Table(
    "roles",
    metadata,
    Column("project", String(63), ForeignKey("projects.id"), primary_key=True),
    Column("principal", String(32), ForeignKey("principals.id"), primary_key=True),
    Column("role", String(16), nullable=False),  # viewer | submitter | approver | admin
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("principal", String(32), ForeignKey("principals.id"), nullable=False),
    Column("secret_digest", String(71), nullable=False, unique=True),
    Column("scopes", JsonText, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("revoked_at", Float(53)),
    Column("replaces", String(32)),  # the token that this one was rotated from
    Index("tokens_by_principal", "principal"),
)
sinks = Table(  # where events are sent on to
    "sinks",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("kind", String(16), nullable=False),  # webhook | jsonl | email
    Column("settings", JsonText, nullable=False),  # of a secret only where it is: an environment variable, a file
    Column("rules", JsonText, nullable=False),  # which events
    Column("created_at", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("paused", String(16), nullable=False),  # why nothing is sent: empty: it is | person | failing
)
