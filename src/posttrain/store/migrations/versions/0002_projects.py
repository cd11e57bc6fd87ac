"""Projects, principals and tokens; events as envelopes and payloads; leaves of a Merkle tree.

The events of before stay as they are, byte for byte, in `events_before`. What the rows hold at this moment is told by
the first events of the new log (`store.journal`), which whoever runs this revision writes in the same transaction.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_DIGEST, _PROJECT, _PRINCIPAL = sa.String(71), sa.String(63), sa.String(32)
_TIME, _JSON, _HASH = sa.Float(53), sa.Text(), sa.LargeBinary(32)
_COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_DEFAULT = "'default'"
_EMPTY = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")  # SHA-256 of nothing


def upgrade() -> None:
    """Create what is new, and give every old row its project and principal."""
    op.rename_table("events", "events_before")
    op.drop_index("events_by_subject", "events_before")
    if op.get_bind().dialect.name == "postgresql":  # names of constraints and sequences outlive the renaming
        op.execute("ALTER SEQUENCE events_id_seq RENAME TO events_before_id_seq")
        op.execute("ALTER TABLE events_before RENAME CONSTRAINT events_pkey TO events_before_pkey")
        op.execute("ALTER TABLE events_before RENAME CONSTRAINT events_sequence_key TO events_before_sequence_key")
    _create_principals()
    _create_events()
    _create_tree()
    _name_principals()
    _extend_runs()
    _rebuild_assets()
    _rebuild_releases()
    _rebuild_cache()
    _create_policies()
    _create_edges()
    _create_channels()
    _create_signals()
    _create_asset_status()
    _create_approvals()
    _create_work()
    _create_watches()


def _create_asset_status() -> None:
    op.create_table(
        "asset_status",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )


def _create_approvals() -> None:
    op.create_table(
        "approval_requests",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("digest", _DIGEST, primary_key=True),
        sa.Column("channel", sa.String(128), nullable=False),
        sa.Column("run_id", sa.String(64)),
        sa.Column("asked", _JSON, nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("approval_requests_by_channel", "approval_requests", ["project", "channel"])
    op.create_index("approval_requests_by_run", "approval_requests", ["run_id"])
    op.create_table(
        "approvals",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("request", _DIGEST, primary_key=True),
        sa.Column("principal", _PRINCIPAL, primary_key=True),
        sa.Column("verdict", sa.String(16), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["project", "request"], ["approval_requests.project", "approval_requests.digest"]),
    )


def _create_signals() -> None:
    op.create_table(
        "signals",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("run_id", sa.String(64), sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )


def _create_principals() -> None:
    op.create_table(
        "projects", sa.Column("id", _PROJECT, primary_key=True), sa.Column("created_at", _TIME, nullable=False)
    )
    op.create_table(
        "principals",
        sa.Column("id", _PRINCIPAL, primary_key=True),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False, unique=True),
        sa.Column("created_at", _TIME, nullable=False),
    )
    op.create_table(
        "roles",
        sa.Column("project", _PROJECT, sa.ForeignKey("projects.id"), primary_key=True),
        sa.Column("principal", _PRINCIPAL, sa.ForeignKey("principals.id"), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", _PRINCIPAL, primary_key=True),
        sa.Column("principal", _PRINCIPAL, sa.ForeignKey("principals.id"), nullable=False),
        sa.Column("secret_digest", _DIGEST, nullable=False, unique=True),
        sa.Column("scopes", _JSON, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("revoked_at", _TIME),
        sa.Column("replaces", _PRINCIPAL),
    )
    op.create_index("tokens_by_principal", "tokens", ["principal"])


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column("id", _COUNTER, primary_key=True, autoincrement=True),
        sa.Column("project", _PROJECT, nullable=False),
        sa.Column("kind", sa.String(64), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("auth", sa.String(16), nullable=False),
        sa.Column("request", sa.String(32), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("audited", _JSON, nullable=False),
        sa.Column("words", _DIGEST),
        sa.Column("leaf", _HASH, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_place", "events", ["subject", "at"])
    op.create_index("events_by_request", "events", ["request"])
    event = sa.ForeignKey("events.id")
    op.create_table(
        "payloads",
        sa.Column("event", _COUNTER, event, primary_key=True, autoincrement=False),
        sa.Column("retention", sa.String(16), nullable=False),
        sa.Column("salt", sa.LargeBinary(16), nullable=False),
        sa.Column("body", _JSON, nullable=False),
    )
    op.create_table(
        "unsealed", sa.Column("event", _COUNTER, sa.ForeignKey("events.id"), primary_key=True, autoincrement=False)
    )


def _create_tree() -> None:
    op.create_table(
        "leaves",
        sa.Column("sequence", _COUNTER, primary_key=True, autoincrement=False),
        sa.Column("event", _COUNTER, sa.ForeignKey("events.id"), nullable=False, unique=True),
        sa.Column("leaf", _HASH, nullable=False),
    )
    op.create_table(
        "tiles",
        sa.Column("level", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("position", _COUNTER, primary_key=True, autoincrement=False),
        sa.Column("hash", _HASH, nullable=False),
    )
    head = op.create_table(
        "tree_head",
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("root", _HASH, nullable=False),
        sa.Column("peaks", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("id = 1", name="one_tree_head"),
    )
    op.bulk_insert(head, [{"id": 1, "size": 0, "root": _EMPTY, "peaks": b""}])


def _name_principals() -> None:
    """A principal for everybody whom an old row names."""
    names = "SELECT created_by AS name FROM assets UNION SELECT actor FROM releases ORDER BY 1"
    kind = "CASE WHEN name LIKE 'user:%' THEN 'user' ELSE 'service' END"
    op.execute(
        "INSERT INTO principals (id, kind, name, created_at) "
        f"SELECT 'before-' || row_number() OVER (ORDER BY name), {kind}, name, 0 FROM ({names}) AS named"
    )
    op.execute(f"INSERT INTO projects (id, created_at) VALUES ({_DEFAULT}, 0)")


def _extend_runs() -> None:
    op.add_column("runs", sa.Column("project", _PROJECT, nullable=False, server_default="default"))
    op.add_column("runs", sa.Column("repeat", sa.Integer(), nullable=False, server_default="1"))
    op.execute(
        "UPDATE runs SET repeat = (SELECT count(*) FROM runs AS other "
        "WHERE other.manifest_digest = runs.manifest_digest AND ("
        "other.created_at < runs.created_at OR (other.created_at = runs.created_at AND other.id <= runs.id)))"
    )
    op.create_index("stages_by_key", "stages", ["cache_key"])
    op.drop_index("runs_by_manifest", "runs")
    op.create_index("runs_by_manifest", "runs", ["project", "manifest_digest", "repeat"], unique=True)


def _rebuild_assets() -> None:
    op.rename_table("assets", "assets_before")
    op.drop_index("assets_by_digest", "assets_before")
    op.create_table(
        "assets",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("kind", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(256), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("digest", _DIGEST, nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("meta", _JSON, nullable=False),
        sa.Column("parents", _JSON, nullable=False),
        sa.CheckConstraint("version >= 1", name="asset_versions_start_at_1"),
    )
    op.create_index("assets_by_digest", "assets", ["digest"])
    same = "kind, assets_before.name, version, digest, form, assets_before.created_at"
    op.execute(
        f"INSERT INTO assets (project, kind, name, version, digest, form, created_at, principal, meta, parents) "
        f"SELECT {_DEFAULT}, assets_before.{same}, principals.id, meta, parents "
        "FROM assets_before JOIN principals ON principals.name = assets_before.created_by"
    )
    op.drop_table("assets_before")


def _rebuild_releases() -> None:
    op.rename_table("releases", "releases_before")
    op.create_table(
        "releases",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("channel", sa.String(128), primary_key=True),
        sa.Column("sequence", sa.Integer(), primary_key=True),
        sa.Column("model_digest", _DIGEST, nullable=False),
        sa.Column("run_id", sa.String(64)),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("report_digest", _DIGEST),
    )
    same = "channel, sequence, model_digest, run_id, action"
    op.execute(
        f"INSERT INTO releases (project, {same}, principal, at, report_digest) "
        f"SELECT {_DEFAULT}, {same}, principals.id, at, report_digest "
        "FROM releases_before JOIN principals ON principals.name = releases_before.actor"
    )
    op.drop_table("releases_before")


def _rebuild_cache() -> None:
    op.rename_table("stage_cache", "stage_cache_before")
    op.create_table(
        "stage_cache",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("cache_key", _DIGEST, primary_key=True),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(128), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    )
    op.execute(
        "INSERT INTO stage_cache (project, cache_key, run_id, stage) "
        f"SELECT {_DEFAULT}, cache_key, run_id, stage FROM stage_cache_before"
    )
    op.drop_table("stage_cache_before")


def _create_policies() -> None:
    op.create_table(
        "quarantine",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("channel", sa.String(128), primary_key=True),
        sa.Column("model_digest", _DIGEST, primary_key=True),
        sa.Column("release", sa.Integer(), nullable=False),
        sa.Column("since", _TIME, nullable=False),
        sa.Column("principal", _PRINCIPAL, nullable=False),
        sa.Column("lifted_at", _TIME),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_table(
        "looks",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("channel", sa.String(128), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("items", _DIGEST, nullable=False),
        sa.Column("lineage", _DIGEST, nullable=False),
        sa.Column("candidate", _DIGEST, nullable=False),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("looks_by_items", "looks", ["project", "items"])
    # what was rolled back and never promoted again is quarantined from the beginning
    op.execute(
        "INSERT INTO quarantine (project, channel, model_digest, release, since, principal, reason) "
        "SELECT off.project, off.channel, was.model_digest, max(off.sequence), max(off.at), max(off.principal), '' "
        "FROM releases AS off JOIN releases AS was "
        "ON was.project = off.project AND was.channel = off.channel AND was.sequence = off.sequence - 1 "
        "WHERE off.action = 'rollback' AND NOT EXISTS ("
        "SELECT 1 FROM releases AS again WHERE again.project = off.project "
        "AND again.channel = off.channel AND again.model_digest = was.model_digest AND again.sequence > off.sequence) "
        "GROUP BY off.project, off.channel, was.model_digest"
    )


def _create_edges() -> None:
    """Whoever runs this revision fills them from the rows (`store.edges`)."""
    op.create_table(
        "artifacts",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("digest", _DIGEST, primary_key=True),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("bytes", sa.BigInteger()),
        sa.Column("class", sa.String(16), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
    )
    op.create_table(
        "edges",
        sa.Column("project", _PROJECT, primary_key=True),
        *(sa.Column(name, sa.Text(), primary_key=True) for name in ("consumer", "slot", "producer", "output")),
        sa.Column("digest", _DIGEST, primary_key=True),
    )
    op.create_index("edges_by_producer", "edges", ["project", "producer"])
    op.create_index("edges_by_digest", "edges", ["project", "digest"])
    op.create_table(
        "holds",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("digest", _DIGEST, primary_key=True),
        sa.Column("holder", sa.String(256), primary_key=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("released_at", _TIME),
    )


def _create_channels() -> None:
    op.create_table(
        "channels",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("name", sa.String(128), primary_key=True),
        sa.Column("policy", _DIGEST),
        sa.Column("protected", sa.Integer(), nullable=False),
        sa.Column("frozen", sa.String(16), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
    )
    op.create_table(
        "deployments",
        sa.Column("project", _PROJECT, primary_key=True),
        sa.Column("channel", sa.String(128), primary_key=True),
        sa.Column("role", sa.String(16), primary_key=True),
        sa.Column("release_sequence", sa.Integer(), nullable=False),
        sa.Column("weight", _TIME, nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["project", "channel"], ["channels.project", "channels.name"]),
    )
    # the newest release of a channel is what is live on it; there was no policy, and nothing was frozen
    op.execute(
        "INSERT INTO channels (project, name, policy, protected, frozen, revision, generation) "
        "SELECT DISTINCT project, channel, NULL, 0, '', 0, 1 FROM releases"
    )
    op.execute(
        "INSERT INTO deployments (project, channel, role, release_sequence, weight, generation) "
        "SELECT project, channel, 'live', max(sequence), 1.0, 1 FROM releases GROUP BY project, channel"
    )


def _create_work() -> None:
    op.create_table(
        "work",
        sa.Column("id", _COUNTER, primary_key=True, autoincrement=True),
        sa.Column("project", _PROJECT, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("object", sa.Text(), nullable=False),
        sa.Column("affinity", sa.Text()),
        sa.Column("due_at", _TIME, nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("wanted_version", sa.BigInteger(), nullable=False),
        sa.Column("lease_owner", sa.Text()),
        sa.Column("lease_token", sa.String(32)),
        sa.Column("lease_until", _TIME),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failed_since", _TIME),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("traceback", sa.Text(), nullable=False),
        sa.Column("dead_at", _TIME),
    )
    op.create_index("work_by_object", "work", ["project", "kind", "object"], unique=True)
    op.create_index("work_by_time", "work", ["project", "due_at"])
    # leases move here; whoever drives an unfinished run has to look at it
    op.execute(
        "INSERT INTO work (project, kind, object, due_at, priority, wanted_version, failures, error, traceback) "
        "SELECT project, 'run', id, 0, 0, 1, 0, '', '' FROM runs WHERE state IN ('pending', 'running', 'stopping')"
    )
    op.drop_column("runs", "lease_owner")
    op.drop_column("runs", "lease_expires")


def _create_watches() -> None:
    op.create_table(
        "watches",
        sa.Column("attempt", sa.Text(), primary_key=True),
        sa.Column("run_id", sa.String(64), nullable=False),
        sa.Column("progress", sa.Text(), nullable=False),
        sa.Column("quiet", _TIME, nullable=False),
        sa.Column("at", _TIME, nullable=False),
    )
    op.create_index("watches_by_run", "watches", ["run_id"])
