"""The ledger's tables.

Only plain SQL types are used, so SQLite and PostgreSQL store the same values: times are 64-bit floats (seconds since
the epoch), mappings are JSON text. `generation` is the compare-and-set counter of a row; leases are in separate columns
and do not change the counter.

A version of Posttrain must work on the same ledger as the previous version. Therefore a revision of the schema only
adds tables, and columns that may be NULL or whose default is the empty value of their type.
`schema_version.usable_since` is the oldest revision whose code may still use the ledger. If a revision does more than
add, it is itself the oldest such revision.
"""

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ColumnElement,
    Dialect,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
)

from posttrain.domain.errors import IntegrityError

SCHEMA_VERSION = "0006"  # revisions are numbered with leading zeros, so they compare as text
USABLE_SINCE = "0002"  # the oldest revision whose code may use a ledger of this revision


class UnreadableColumnError(IntegrityError, ValueError):
    """A JSON column was altered and cannot be read."""


class JsonText(TypeDecorator[Any]):
    """A JSON value as text.

    The databases' JSON types are not used, because they differ, and PostgreSQL's JSON type rejects the NaN that a
    diverged stage reports.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else json.dumps(value, sort_keys=True, ensure_ascii=False)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return read_json_text(value)


def read_json_text(value: str | None) -> Any:
    """Return the value of a `JsonText` column.

    Raises:
        UnreadableColumnError: the value is not JSON.
    """
    if value == "{}":  # the most frequent value
        return {}
    try:
        return None if value is None else json.loads(value)
    except ValueError as error:
        raise UnreadableColumnError(
            f"the ledger contains {value!r:.40} where JSON was written: a row was altered; posttrain doctor shows which"
        ) from error


def keyed(table: Table, **key: Any) -> list[ColumnElement[bool]]:
    """Return the conditions that columns of a table have these values."""
    return [table.c[name] == value for name, value in key.items()]


Counter = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts only in a column declared INTEGER
metadata = MetaData()


# runs, channels and assets

runs = Table(
    "runs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("name", Text, nullable=False),
    Column("manifest_digest", String(71), nullable=False),
    Column("state", String(32), nullable=False),
    Column("owner", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("next_action", Text, nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("desired", String(32), nullable=False),
    Column("project", String(63), nullable=False, server_default="default"),
    Column("repeat", Integer, nullable=False, server_default="1"),  # 1, 2, … among the runs of one manifest
    Index("runs_by_manifest", "project", "manifest_digest", "repeat", unique=True),
    Index("runs_by_name", "name"),
    Index("runs_by_state", "state"),
    Index("runs_by_time", "project", "created_at", "repeat", "id"),
)
stages = Table(
    "stages",
    metadata,
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("position", Integer, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("state", String(32), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("next_action", Text, nullable=False),
    Column("cache_key", String(71)),
    Column("cached_from", Text),
    Column("inputs", JsonText, nullable=False),
    Column("outputs", JsonText, nullable=False),
    Column("metrics", JsonText, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("started_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("not_before", Float(53)),
    Column("retried_after", Integer, nullable=False),
    Index("stages_by_key", "cache_key"),
)
attempts = Table(
    "attempts",
    metadata,
    Column("run_id", String(64), primary_key=True),
    Column("stage", String(128), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("folder", Text, nullable=False),
    Column("state", String(32), nullable=False),
    Column("generation", Integer, nullable=False),
    Column("executor", String(32), nullable=False),
    Column("handle", Text),
    Column("resume", String(71)),
    Column("reason", Text, nullable=False),
    Column("message", Text, nullable=False),
    Column("failure_signature", Text),
    Column("stop_requested_at", Float(53)),
    Column("tokens", BigInteger, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("launched_at", Float(53)),
    Column("finished_at", Float(53)),
    Column("seconds", Float(53), nullable=False),
    Column("host", String(32)),  # the only host whose drivers can reach the job; NULL: the ledger has one host
    Column("channel", Text),  # URL of the mailbox; empty: the attempt's folder; NULL: in the order (older version)
    Column("resumed_from", Text),  # RUN/STAGE that wrote the checkpoint `resume`; NULL: no checkpoint, or older version
    Column("resumed_step", Integer),
    Column("resumed_tokens", BigInteger),
    Column("reserved_tokens", BigInteger),  # part of the run's budget, while the attempt lives; NULL: no such limit
    Column("reserved_seconds", Float(53)),
    Column("stop_cause", String(16)),  # why the job was stopped; NULL: it was not stopped
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    Index("attempts_by_state", "state"),
)
signals = Table(
    "signals",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("principal", String(32), nullable=False),  # who sent the signal
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
)
notes = Table(
    "notes",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("principal", String(32), nullable=False),  # who wrote the note
    Column("at", Float(53), nullable=False),
    Column("text", Text, nullable=False),  # empty: the row is a tag
    Column("tag", String(24), nullable=False),
    Index("notes_by_tag", "project", "tag", "run_id"),
)
stage_cache = Table(
    "stage_cache",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("cache_key", String(71), primary_key=True),
    Column("run_id", String(64), nullable=False),
    Column("stage", String(128), nullable=False),
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
)
releases = Table(
    "releases",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("channel", String(128), primary_key=True),
    Column("sequence", Integer, primary_key=True),  # 1, 2, … in the channel; two writers cannot use the same number
    Column("model_digest", String(71), nullable=False),
    Column("run_id", String(64)),
    Column("action", String(32), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("at", Float(53), nullable=False),
    Column("report_digest", String(71)),
)
channels = Table(
    "channels",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("name", String(128), primary_key=True),
    Column("policy", String(71)),  # digest of the document with the gates for releases; NULL: no policy
    Column("protected", Integer, nullable=False),  # 1: policy and quarantine change by approval only
    Column("frozen", String(16), nullable=False),  # the rejected moves: empty | releases | all
    Column("revision", Integer, nullable=False),  # counts changes of the policy or protection
    Column("generation", Integer, nullable=False),  # counts releases and changes of the columns above
)
deployments = Table(
    "deployments",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("channel", String(128), primary_key=True),
    Column("role", String(16), primary_key=True),  # live
    Column("release_sequence", Integer, nullable=False),
    Column("weight", Float(53), nullable=False),  # share of the traffic
    Column("generation", Integer, nullable=False),
    ForeignKeyConstraint(["project", "channel"], ["channels.project", "channels.name"]),
)
quarantine = Table(
    "quarantine",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("channel", String(128), primary_key=True),
    Column("model_digest", String(71), primary_key=True),
    Column("release", Integer, nullable=False),  # the rollback that took the model off the channel
    Column("since", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),  # who rolled back, or who lifted the quarantine
    Column("lifted_at", Float(53)),  # NULL: the model must not be promoted to the channel
    Column("reason", Text, nullable=False),  # reason for lifting the quarantine
)
approval_requests = Table(
    "approval_requests",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),  # digest of `asked`
    Column("channel", String(128), nullable=False),
    Column("run_id", String(64)),
    Column("asked", JsonText, nullable=False),  # the requested action, with everything that it would change
    Column("principal", String(32), nullable=False),  # who requested the action
    Column("at", Float(53), nullable=False),
    Index("approval_requests_by_channel", "project", "channel"),
    Index("approval_requests_by_run", "run_id"),
)
approvals = Table(
    "approvals",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("request", String(71), primary_key=True),
    Column("principal", String(32), primary_key=True),
    Column("verdict", String(16), nullable=False),  # approved | rejected | withdrawn
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
    ForeignKeyConstraint(["project", "request"], ["approval_requests.project", "approval_requests.digest"]),
)
looks = Table(  # written by older versions, which counted judgements; `ChannelReading.looks` counts evaluations
    "looks",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("channel", String(128), primary_key=True),
    Column("number", Integer, primary_key=True),  # 1, 2, … in the channel
    Column("items", String(71), nullable=False),  # digest of the gates' suites and evaluators
    Column("lineage", String(71), nullable=False),  # base model of the candidate
    Column("candidate", String(71), nullable=False),
    Column("run_id", String(64), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("owner", Text, nullable=False),  # owner of the run
    Column("at", Float(53), nullable=False),
    Index("looks_by_items", "project", "items"),
)
assets = Table(
    "assets",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("digest", String(71), nullable=False),
    Column("form", String(16), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("meta", JsonText, nullable=False),
    Column("parents", JsonText, nullable=False),
    CheckConstraint("version >= 1", name="asset_versions_start_at_1"),
    Index("assets_by_digest", "digest"),
)
asset_status = Table(  # people's assessments of versions, which themselves never change
    "asset_status",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("name", String(256), primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("status", String(16), nullable=False),  # approved | recalled | empty
    Column("principal", String(32), nullable=False),  # who set the status
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
)
artifacts = Table(
    "artifacts",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("form", String(16), nullable=False),
    Column("bytes", BigInteger),  # NULL: an older version wrote the row
    Column("class", String(16), nullable=False),  # class of the artifact when it was first stored
    Column("created_at", Float(53), nullable=False),
)
edges = Table(  # domain/records.py defines the names of producers and consumers
    "edges",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("consumer", Text, primary_key=True),
    Column("slot", Text, primary_key=True),
    Column("producer", Text, primary_key=True),
    Column("output", Text, primary_key=True),
    Column("digest", String(71), primary_key=True),
    Index("edges_by_producer", "project", "producer"),
    Index("edges_by_digest", "project", "digest"),
)
holds = Table(
    "holds",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("holder", String(256), primary_key=True),
    Column("reason", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("released_at", Float(53)),  # NULL: the bytes must not be deleted
)

# the log, tables that a crash may leave in any state, and principals

events = Table(
    "events",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(64), nullable=False),
    Column("subject", Text, nullable=False),
    Column("principal", String(32), nullable=False),
    Column("auth", String(16), nullable=False),  # how the principal was authenticated: os | token | …
    Column("request", String(32), nullable=False),  # id of the transaction that wrote the event
    Column("at", Float(53), nullable=False),
    Column("audited", JsonText, nullable=False),  # values of audited columns, and other states, numbers, digests
    Column("words", String(71)),  # salted digest of the event's row in `payloads`; NULL: no words
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
# --- empty in every ledger: tables that the next schema removes -------------------------------------------------------

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
    Column("usable_since", String(32)),  # the oldest revision whose code may use the ledger
    PrimaryKeyConstraint("version_num", name="schema_version_pkc"),
)
work = Table(
    "work",
    metadata,
    Column("id", Counter, primary_key=True, autoincrement=True),
    Column("project", String(63), nullable=False),
    Column("kind", String(16), nullable=False),  # run | stage | sweep
    Column("object", Text, nullable=False),
    Column("affinity", Text),  # the only host whose drivers may observe the object
    Column("due_at", Float(53), nullable=False),
    Column("priority", Integer, nullable=False),
    Column("wanted_version", BigInteger, nullable=False),  # counts how often the object was scheduled
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
watches = Table(  # how long jobs have been silent
    "watches",
    metadata,
    Column("attempt", Text, primary_key=True),  # the attempt's name
    Column("run_id", String(64), nullable=False),
    Column("progress", Text, nullable=False),
    Column("quiet", Float(53), nullable=False),
    Column("at", Float(53), nullable=False),
    Index("watches_by_run", "run_id"),
)
hosts = Table(  # the hosts that share a ledger
    "hosts",
    metadata,
    Column("id", String(32), primary_key=True),  # the identity of the host's workspace folder
    Column("name", Text, nullable=False),  # HOSTNAME:FOLDER
    Column("url", Text, nullable=False),  # URL of the host's server, for the other servers; empty: no server
    Column("server", Text, nullable=False),  # process of the host's server, HOSTNAME:PID:START; empty: no server
    Column("version", Text, nullable=False),  # version of Posttrain that wrote the row
    Column("seen_at", Float(53), nullable=False),
)
requests = Table(  # answers to requests, for clients that repeat a request because no answer arrived
    "requests",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("principal", String(32), primary_key=True),
    Column("key", String(64), primary_key=True),  # chosen by the client
    Column("verb", String(64), nullable=False),
    Column("body", String(71), nullable=False),  # digest of the request
    Column("state", String(16), nullable=False),  # begun | done
    Column("owner", Text, nullable=False),  # process that began the request
    Column("status", Integer),
    Column("answer", Text),
    Column("at", Float(53), nullable=False),
    Index("requests_by_time", "at"),
)
operations = Table(  # requests that are answered later; any server can return the answer
    "operations",
    metadata,
    Column("id", String(26), primary_key=True),  # id of the request
    Column("project", String(63), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("verb", String(64), nullable=False),
    Column("body", String(71), nullable=False),  # digest of the request
    Column("server", Text, nullable=False),  # process that carries out the operation, HOSTNAME:PID:START
    Column("document", Text, nullable=False),  # status of the operation, as JSON
    Column("over", Integer, nullable=False),  # 1: the operation has ended, and the document has the result
    Column("ending", Integer, nullable=False),  # 1: the operation was cancelled
    Column("told_at", Float(53), nullable=False),  # time of that process's last report
    Column("looked_at", Float(53), nullable=False),
    Index("operations_by_time", "looked_at"),
)
uploads = Table(  # bytes in the store that a project sent, even if no row names them yet
    "uploads",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),
    Column("shown", Integer, nullable=False),  # 1: a page, which every viewer may read
    Column("at", Float(53), nullable=False),
    Index("uploads_by_time", "at"),
)
parts = Table(  # the parts of unfinished uploads, which are objects in the store
    "parts",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),  # digest of the whole upload
    Column("total", BigInteger, primary_key=True),  # bytes of the whole upload, as declared by the sender
    Column("start", BigInteger, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("object", Text, nullable=False),  # name of the object
    Column("at", Float(53), nullable=False),
    Index("parts_by_time", "at"),
)
grants = Table(  # the attempts to which the secrets of running jobs give access
    "grants",
    metadata,
    Column("digest", String(71), primary_key=True),  # digest of the secret
    Column("run_id", String(64), nullable=False),
    Column("stage", String(128), nullable=False),
    Column("number", Integer, nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Column("put_bytes", BigInteger, nullable=False),  # bytes that the attempt has written to its mailbox
    Column("bootstrap", Integer, nullable=False, server_default="0"),  # 1: the secret only redeems another one
    Index("grants_by_attempt", "run_id", "stage", "number"),
)
sessions = Table(  # browser sessions, with the token behind each session's secret
    "sessions",
    metadata,
    Column("digest", String(71), primary_key=True),  # digest of the secret
    Column("token", String(32), nullable=False),
    Column("expires_at", Float(53), nullable=False),
    Index("sessions_by_time", "expires_at"),
)
cursors = Table(  # the position of each sink in the log
    "cursors",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("sink", String(63), primary_key=True),
    Column("sequence", BigInteger, nullable=False),  # sequence of the last sealed event that was delivered
    Column("failures", Integer, nullable=False),
    Column("error", Text, nullable=False),
    Column("failed_since", Float(53)),
    Column("not_before", Float(53)),
    Column("at", Float(53)),  # time of the last delivery
    Column("lease_owner", Text),
    Column("lease_until", Float(53)),
)
projects = Table(
    "projects",
    metadata,
    Column("id", String(63), primary_key=True),
    Column("created_at", Float(53), nullable=False),
    Column("images", JsonText),  # images that the project's runs may name; NULL: never set
)
principals = Table(
    "principals",
    metadata,
    Column("id", String(32), primary_key=True),  # random: events and rows use it, so that a name can be erased
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
    Column("replaces", String(32)),  # the token from which this token was rotated
    Index("tokens_by_principal", "principal"),
)
sinks = Table(  # destinations of events
    "sinks",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("kind", String(16), nullable=False),  # webhook | jsonl | email
    Column("settings", JsonText, nullable=False),  # for a secret, only an environment variable or a file
    Column("rules", JsonText, nullable=False),  # rules that select events
    Column("created_at", Float(53), nullable=False),
    Column("principal", String(32), nullable=False),
    Column("paused", String(16), nullable=False),  # why deliveries are paused: person | failing; empty: not paused
)
