"""Runs, their stages and attempts, what they wait for, and what a stage need not compute again.

Channels: what they serve, what a release must pass, who approved it, how often it was judged.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, String, Table, Text

from posttrain.store.schema.columns import JsonText, metadata

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
    Column("repeat", Integer, nullable=False, server_default="1"),  # 1, 2, …: runs of one manifest
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
    Column("host", String(32)),  # whose drivers alone can reach its job; NULL: the ledger has one
    Column("channel", Text),  # URL of its channel; empty: its folder; NULL: a release of before, whose order says it
    Column("resumed_from", Text),  # RUN/STAGE that wrote the checkpoint `resume`; NULL: none, or as above
    Column("resumed_step", Integer),
    Column("resumed_tokens", BigInteger),
    Column("reserved_tokens", BigInteger),  # of the run's budget while it lives; NULL: no such limit
    Column("reserved_seconds", Float(53)),
    Column("stop_cause", String(16)),  # why its job was stopped; NULL: it was not
    ForeignKeyConstraint(["run_id", "stage"], ["stages.run_id", "stages.name"]),
    Index("attempts_by_state", "state"),
)
signals = Table(
    "signals",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("name", String(63), primary_key=True),
    Column("principal", String(32), nullable=False),  # who sent it
    Column("at", Float(53), nullable=False),
    Column("reason", Text, nullable=False),
)
notes = Table(
    "notes",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("run_id", String(64), ForeignKey("runs.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("principal", String(32), nullable=False),  # who wrote it
    Column("at", Float(53), nullable=False),
    Column("text", Text, nullable=False),  # empty: it is a tag
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
    Column("sequence", Integer, primary_key=True),  # 1, 2, … within the channel: two writers cannot both be the next
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
    Column("policy", String(71)),  # digest of the document that says what a release must pass; NULL: there is none
    Column("protected", Integer, nullable=False),  # 1: its policy and its quarantine are changed by approval only
    Column("frozen", String(16), nullable=False),  # what may not move it: empty | releases | all
    Column("revision", Integer, nullable=False),  # every change of its policy or protection is one
    Column("generation", Integer, nullable=False),  # every release and every change of the columns before is one
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
    Column("principal", String(32), nullable=False),  # who rolled back, or lifted it
    Column("lifted_at", Float(53)),  # NULL: it may not be promoted there
    Column("reason", Text, nullable=False),  # for lifting it
)
approval_requests = Table(
    "approval_requests",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("digest", String(71), primary_key=True),  # of `asked`
    Column("channel", String(128), nullable=False),
    Column("run_id", String(64)),
    Column("asked", JsonText, nullable=False),  # what is to be done, with everything that it would touch
    Column("principal", String(32), nullable=False),  # whose request it is
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
looks = Table(  # of older versions, which counted judgements; `ChannelReading.looks` counts evaluations
    "looks",
    metadata,
    Column("project", String(63), primary_key=True),
    Column("channel", String(128), primary_key=True),
    Column("number", Integer, primary_key=True),  # 1, 2, … of the channel
    Column("items", String(71), nullable=False),  # digest of what its gates were judged on: suites and evaluators
    Column("lineage", String(71), nullable=False),  # base model of the candidate
    Column("candidate", String(71), nullable=False),
    Column("run_id", String(64), nullable=False),
    Column("outcome", String(16), nullable=False),
    Column("owner", Text, nullable=False),  # of the run
    Column("at", Float(53), nullable=False),
    Index("looks_by_items", "project", "items"),
)
