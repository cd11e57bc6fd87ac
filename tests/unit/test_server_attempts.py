"""What a job of a server can reach with its attempt's token, for how long, and what of an environment it gets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from cli_world import World, make_world
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from server_bench import KEY, AttemptAtServer, ServerBench, attempt_with_access, granting, served

from posttrain.app.workspace import init_workspace, serve_jobs
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, NotFoundError, UnavailableError
from posttrain.domain.ids import Role
from posttrain.domain.jobspec import JobSpec
from posttrain.domain.lifecycle import AttemptState
from posttrain.execution.executors.local.executor import refuse_elsewhere
from posttrain.execution.processes import of_a_server
from posttrain.server.attempts import LEAST_COUNTED
from posttrain.server.limits import CHANNEL
from posttrain.store.atomic import SMALL, write_json
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.grants import PREFIX, RENEW_SECONDS, SECONDS, Grants
from posttrain.store.mailboxes.served import ServedObjects
from posttrain.store.retries import JobAccess, read_access
from posttrain.store.trees import materialise, put_tree
from s3_server import s3_server, use_s3


@dataclass
class Clock:
    """Time that a test moves."""

    at: float

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds


class Job(AttemptAtServer):
    """An attempt, and what its token opens."""

    @property
    def blobs(self) -> ServedBlobs:
        return ServedBlobs(self.folder, patience=0.0, pause=lambda _: None)

    @property
    def token(self) -> str:
        found = read_access(self.folder)
        assert found is not None
        return found.token

    def status(self, digest: str, token: str | None = None, method: str = "GET") -> int:
        return self.bench.ask(method, f"/v1/attempt/blobs/{digest}", self.token if token is None else token).status


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        made.person("root", Role.ADMIN)
        yield made


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def job(bench: ServerBench, name: str, project: str = "default", number: int = 1, resume: str | None = None) -> Job:
    made = attempt_with_access(bench, name, project, number, resume)
    return Job(bench, made.attempt, made.inputs)


def ended(bench: ServerBench, made: Job, state: str = "failed") -> None:
    with bench.workspace.ledger.transaction(bench.workspace.actor) as transaction:
        launched = transaction.update_attempt(made.attempt, state=AttemptState.LAUNCHED)
        transaction.update_attempt(launched, state=AttemptState(state))


def test_a_job_reads_what_its_inputs_reach_and_nothing_else(bench: ServerBench, tmp_path: Path) -> None:
    mine, other, foreign = job(bench, "mine"), job(bench, "other"), job(bench, "foreign", "elsewhere")
    folder = materialise(mine.blobs, mine.inputs["model"], tmp_path / "cache")
    assert (folder / "model.safetensors").read_bytes() == b"mine" * 100
    assert mine.blobs.get(mine.inputs["data"]) == b"rows of mine"
    assert b"".join(mine.blobs.stream(mine.inputs["data"])) == b"rows of mine"
    assert mine.blobs.check(mine.inputs["data"]) == mine.blobs.size(mine.inputs["data"]) == 12
    mine.blobs.fetch(mine.inputs["data"], tmp_path / "rows")
    assert (tmp_path / "rows").read_bytes() == b"rows of mine"
    stray = bench.workspace.blobs.put(b"in the store, and no input")
    for digest in (*other.inputs.values(), *foreign.inputs.values(), stray, digest_bytes(b"nowhere")):
        with pytest.raises(NotFoundError):
            mine.blobs.get(digest)
        assert not mine.blobs.has(digest)
        assert mine.status(digest) == 404
    assert foreign.status(foreign.inputs["data"]) == 200
    with pytest.raises(IntegrityError, match="64 hex digits"):
        mine.blobs.get("../../ledger.db")
    for wrong in (lambda: mine.blobs.put(b"x"), lambda: mine.blobs.put_file(tmp_path / "rows")):
        with pytest.raises(InputError, match="stores nothing itself"):
            wrong()


def test_a_job_that_goes_on_reads_its_checkpoint(bench: ServerBench, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "shard").write_bytes(b"at step 5")
    tree = put_tree(bench.workspace.blobs, tmp_path / "checkpoint")
    mine = job(bench, "mine", resume=tree)
    assert (materialise(mine.blobs, tree, tmp_path / "cache") / "shard").read_bytes() == b"at step 5"
    assert job(bench, "other").status(tree) == 404


def test_the_token_opens_nothing_else_and_nothing_else_opens_this(bench: ServerBench) -> None:
    mine = job(bench, "mine")
    for method, path in (
        ("GET", "/v1/projects/default/whoami"),
        ("GET", "/v1/projects/default/runs"),
        ("GET", f"/v1/projects/default/blobs/{mine.inputs['data']}"),
        ("GET", f"/v1/projects/default/blobs/{mine.inputs['data']}/state"),
        ("PATCH", f"/v1/projects/default/blobs/{mine.inputs['data']}"),
        ("POST", f"/v1/projects/default/blobs/{mine.inputs['data']}/direct"),
    ):
        assert bench.ask(method, path, mine.token).status == 401, path
    for method in ("PUT", "POST", "PATCH", "DELETE"):
        assert mine.status(mine.inputs["data"], method=method) == 405
    for shown in ("", KEY, bench.tokens["root"], PREFIX + "x" * 43, mine.token[:-1], mine.token.upper()):
        assert mine.status(mine.inputs["data"], shown) == 401
    secret = mine.token.encode()
    for path in bench.workspace.root.rglob("ledger.db*"):
        assert secret not in path.read_bytes()
    assert (mine.folder / "access.json").stat().st_mode & 0o077 == 0
    assert mine.token not in repr(read_access(mine.folder))


@pytest.mark.parametrize("state", ["succeeded", "stopped", "failed", "lost"])
def test_an_attempt_that_is_over_reads_nothing_any_more(bench: ServerBench, state: str) -> None:
    mine = job(bench, "mine")
    assert mine.status(mine.inputs["data"]) == 200
    ended(bench, mine, state)
    assert mine.status(mine.inputs["data"]) == 401
    with pytest.raises(InfrastructureError, match="rejects this attempt"):
        mine.blobs.get(mine.inputs["data"])


def test_an_attempt_that_another_followed_reads_nothing_any_more(bench: ServerBench) -> None:
    first = job(bench, "mine")
    second = job(bench, "mine", number=2)
    assert first.status(first.inputs["data"]) == 401
    assert second.status(second.inputs["data"]) == 200


def test_access_expires_unless_a_driver_renews_it_and_is_forgotten_with_its_attempt(bench: ServerBench) -> None:
    ledger = bench.workspace.ledger
    clock = Clock(ledger.clock.now())
    mine, over = job(bench, "mine"), job(bench, "over")
    ended(bench, over)
    grants, digest = Grants(ledger.database, clock), digest_bytes(mine.token.encode())
    assert grants.known(digest) is not None
    clock.sleep(SECONDS + 60)
    assert grants.known(digest) is None
    assert grants.renew(None) == [mine.attempt.folder]
    assert grants.known(digest) is not None
    from sqlalchemy import select

    from posttrain.store.schema import grants as table

    with ledger.database.read(across="a test") as connection:
        assert list(connection.execute(select(table.c.digest)).scalars()) == [digest]
    clock.sleep(SECONDS + 60)
    assert grants.known(digest) is None


def test_a_job_is_told_where_the_server_is_now_and_waits_for_it_meanwhile(
    bench: ServerBench, capfd: pytest.CaptureFixture[str]
) -> None:
    mine = job(bench, "mine")
    known = read_access(mine.folder)
    assert known is not None
    replace(known, url="http://127.0.0.1:9").write(mine.folder)  # where it was, and nobody is
    with pytest.raises(UnavailableError, match="did not answer within 0 s"):
        mine.blobs.get(mine.inputs["data"])
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 4:
            granting(bench).keep()

    assert ServedBlobs(mine.folder, pause=pause).get(mine.inputs["data"]) == b"rows of mine"
    assert len(waited) == 4
    assert read_access(mine.folder) == known  # the same token
    assert "does not answer" in capfd.readouterr().err


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """One that a team made itself, for a name by which no job asks, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "posttrain.example.org")])
    begun = datetime.now(UTC) - timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(begun).not_valid_after(begun + timedelta(days=90))
    both = (tmp_path / "certificate.pem", tmp_path / "key.pem")
    both[0].write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    both[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return both


def test_a_job_believes_the_certificate_of_its_server_and_no_other(
    bench: ServerBench, certificate: tuple[Path, Path]
) -> None:
    mine = job(bench, "mine")
    known = read_access(mine.folder)
    assert known is not None
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    config = uvicorn.Config(
        bench.app, log_config=None, lifespan="off", ssl_certfile=certificate[0], ssl_keyfile=certificate[1]
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        driver = granting(bench)
        said = {"url": f"https://0.0.0.0:{port}", "key": KEY, "pid": 1, "certificate": str(certificate[0])}
        write_json(bench.workspace.root / "server.json", said)
        driver.keep()
        assert read_access(mine.folder) == replace(
            known, url=f"https://127.0.0.1:{port}", certificate=certificate[0].read_text()
        )
        assert ServedBlobs(mine.folder).get(mine.inputs["data"]) == b"rows of mine"
        replace(known, url=f"https://127.0.0.1:{port}").write(mine.folder)  # what the machine believes
        with pytest.raises(UnavailableError, match="certificate"):
            mine.blobs.get(mine.inputs["data"])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def test_corrupt_bytes_are_not_taken_from_a_server_either(bench: ServerBench, tmp_path: Path) -> None:
    mine = job(bench, "mine")
    hex_ = mine.inputs["data"].removeprefix("sha256:")
    [path] = bench.workspace.root.glob(f"blobs/sha256/{hex_[:2]}/{hex_[2:]}")
    path.chmod(0o600)
    path.write_bytes(b"rows of evil")
    with pytest.raises((IntegrityError, UnavailableError)):
        mine.blobs.fetch(mine.inputs["data"], tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_access_that_is_gone_or_damaged_is_said(bench: ServerBench) -> None:
    mine = job(bench, "mine")
    (mine.folder / "access.json").write_text('{"url": "x", "what": 1}')
    with pytest.raises(IntegrityError, match="damaged"):
        mine.blobs.get(mine.inputs["data"])
    (mine.folder / "access.json").unlink()
    with pytest.raises(InfrastructureError, match="was deleted"):
        mine.blobs.get(mine.inputs["data"])
    driver = granting(bench)
    (bench.workspace.root / "server.json").unlink()
    with pytest.raises(InfrastructureError, match="does not contain the server's address"):
        driver.give(mine.attempt, mine.folder)


def test_nothing_that_a_job_says_of_its_access_is_believed_or_written_by_the_driver(
    bench: ServerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hostile job names the token of another one, a socket and a server of its own, and a word of its own."""
    evil, mine = attempt_with_access(bench, "evil"), attempt_with_access(bench, "mine")
    driver, before = granting(bench), (mine.folder / "access.json").read_bytes()
    token = json.loads(before)["token"]
    lies = [
        (evil.folder / "access.json", json.dumps({"token": token, "socket": "/tmp/evil.sock"})),
        (evil.folder / "address.json", json.dumps({"url": "http://127.0.0.1:9", "token": "x", "certificate": "evil"})),
    ]
    for path, lie in lies:
        path.write_text(lie)
    monkeypatch.setattr(Grants, "renew", lambda *_: [evil.attempt.folder, mine.attempt.folder])
    for at in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        monkeypatch.setattr(driver, "_renewed", -RENEW_SECONDS)  # a minute later
        write_json(bench.workspace.root / "server.json", {"url": at, "key": KEY, "pid": 1})
        opened = opens(driver.keep)
        assert not [one for one in opened if Path(one).name in ("access.json", "address.json")]
        for job in (evil, mine):
            assert json.loads((job.folder / "address.json").read_text()) == {"url": at}
    assert lies[0][0].read_text() == lies[0][1], "nobody writes it after the start, so nobody gives back what it says"
    assert (mine.folder / "access.json").read_bytes() == before
    lies[1][0].write_text(lies[1][1])
    monkeypatch.setattr(driver, "_renewed", -RENEW_SECONDS)
    driver.keep()
    assert lies[1][0].read_text() == lies[1][1], "it is told what changed, however often it writes there"


def opens(do: Callable[[], None]) -> list[str]:
    """The names of the files that something opens."""
    found, here = list[str](), threading.get_ident()
    listening = [True]

    def hook(event: str, words: tuple[Any, ...]) -> None:
        if listening and event == "open" and threading.get_ident() == here:
            found.append(os.fsdecode(words[0]) if isinstance(words[0], str | bytes | os.PathLike) else "")

    sys.addaudithook(hook)
    do()
    listening.clear()
    return found


def put_nothing(path: Path) -> None:
    path.write_text('{"x": 1}')


def put_values_of_another_kind(path: Path) -> None:
    path.write_text('{"url": 1, "token": 2}')


def put_nesting(path: Path) -> None:
    path.write_text("[" * 100_000)


def put_a_sparse_file(path: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


def put_a_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "put", [put_nothing, put_values_of_another_kind, put_nesting, put_a_sparse_file, put_a_link, os.mkfifo, os.mkdir]
)
def test_what_one_job_puts_in_its_folder_holds_up_no_other(
    bench: ServerBench, put: Callable[[Path], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil, mine = attempt_with_access(bench, "evil"), attempt_with_access(bench, "mine")
    driver = granting(bench)
    for name in ("access.json", "address.json"):
        (evil.folder / name).unlink()
        put(evil.folder / name)
    monkeypatch.setattr(Grants, "renew", lambda *_: [evil.attempt.folder, mine.attempt.folder])
    for at in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        monkeypatch.setattr(driver, "_renewed", -RENEW_SECONDS)  # a minute later
        write_json(bench.workspace.root / "server.json", {"url": at, "key": KEY, "pid": 1})
        driver.keep()
        known = read_access(mine.folder)
        assert known is not None
        assert known.url == at
    told = [one.getMessage() for one in caplog.records if "cannot receive the server's address" in one.getMessage()]
    assert len(told) == (1 if put is os.mkdir else 0), "what is no folder is replaced"
    assert all(str(evil.folder) in one for one in told)
    monkeypatch.setattr(driver, "_server", lambda: pytest.fail("it was asked again at once"))
    driver.keep()


def test_the_objects_of_a_channel_are_its_attempts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server("artifacts") as address:
        use_s3(monkeypatch, address)
        with served(tmp_path / "served", channel="s3://artifacts/talk") as bench:
            mine, other = (attempt_with_access(bench, name) for name in ("mine", "other"))
            objects = ServedObjects(mine.folder, patience=0.0)
            assert objects.create("start.json", b"mine")
            assert ServedObjects(other.folder).get("start.json") is None
            known = bench.workspace.jobs.folders.of(mine.attempt).mailbox
            assert known._objects.get("start.json") == b"mine"
            token = Job(bench, mine.attempt, mine.inputs).token
            foreign = "..%2f..%2fother-aaaaaaaa/sft/001/start.json"
            for key in (foreign, ".hidden", "a/../start.json", "x" * 90, "a/b/c/d/e"):
                assert bench.ask("GET", f"/v1/attempt/channel/{key}", token).status in (404, 422), key
            assert bench.ask("PUT", "/v1/attempt/channel/events/", token, b"x").status == 422
            ended(bench, Job(bench, mine.attempt, mine.inputs))
            for deed in (lambda: objects.create("result.json", b""), lambda: objects.get("start.json")):
                with pytest.raises(InfrastructureError, match="rejects this attempt"):
                    deed()


def test_what_an_attempt_puts_into_its_channel_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.attempts.MOST_PUT", 3 * LEAST_COUNTED + 100)
    with s3_server("artifacts") as address:
        use_s3(monkeypatch, address)
        with served(tmp_path / "served", channel="s3://artifacts/talk") as bench:
            mine, other = (
                ServedObjects(attempt_with_access(bench, name).folder, patience=0.0) for name in ("mine", "other")
            )
            assert mine.create("events/1", b"x" * (LEAST_COUNTED + 100))
            mine.overwrite("events/1", b"small")
            assert mine.create("events/2", b"small")
            for deed in (lambda: mine.create("events/3", b""), lambda: mine.overwrite("events/1", b"")):
                with pytest.raises(InputError, match="more to its mailbox than its server allows"):
                    deed()
            assert (mine.get("events/1"), mine.numbers("events")) == (b"small", [1, 2])
            mine.remove("events/2")
            with pytest.raises(InputError):
                mine.create("events/2", b"")
            assert other.create("events/1", b"another attempt's")


def begun(bench: ServerBench, job: Job, key: str, size: int) -> socket.socket:
    """A PUT of which no byte of the body has come."""
    one = socket.create_connection(("127.0.0.1", bench.port), timeout=300)
    lines = [f"PUT /v1/attempt/channel/{key} HTTP/1.1", "host: x", f"authorization: Bearer {job.token}"]
    one.sendall("\r\n".join([*lines, f"content-length: {size}", "", ""]).encode())
    return one


def test_what_comes_of_a_channel_is_bounded_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_server("artifacts") as address:
        use_s3(monkeypatch, address)
        with served(tmp_path / "served", channel="s3://artifacts/talk") as bench:
            made = [attempt_with_access(bench, name) for name in ("mine", "other")]
            mine, other = (Job(bench, one.attempt, one.inputs) for one in made)
            assert bench.ask("PUT", "/v1/attempt/channel/start.json", mine.token, b"x" * (SMALL + 1)).status == 422
            bench.limits.most_bodies = 1 << 20
            with begun(bench, mine, "events/000001.jsonl", 1 << 20):
                while not any(lane == CHANNEL for _, lane in list(bench.limits._held)):
                    time.sleep(0.01)
                with begun(bench, mine, "events/000002.jsonl", 1 << 20) as second:
                    assert second.recv(4096).startswith(b"HTTP/1.1 429")
                assert bench.ask("PUT", "/v1/attempt/channel/start.json", other.token, b"x").status == 204
            while bench.limits._held:
                time.sleep(0.01)
            assert bench.ask("PUT", "/v1/attempt/channel/start.json", mine.token, b"x").status == 204
    assert [one.message for one in caplog.records if one.levelname == "ERROR"] == [], "who leaves is no defect"


def test_nothing_is_read_for_a_channel_that_is_a_folder(bench: ServerBench) -> None:
    made = attempt_with_access(bench, "mine")
    with begun(bench, Job(bench, made.attempt, made.inputs), "result.json", 200 << 20) as one:
        assert one.recv(4096).startswith(b"HTTP/1.1 404")


# --- the environment --------------------------------------------------------------------------------------------------

MACHINE = {"PATH": "/bin", "HOME": "/home/x", "LC_ALL": "C", "CUDA_VISIBLE_DEVICES": "1", "HF_HOME": "/models"}
ADMINS = {"LICENSE": "l", "HF_TOKEN": "h"}
SERVERS = {
    "AWS_SECRET_ACCESS_KEY": "a", "PGPASSWORD": "p", "POSTTRAIN_TOKEN": "t", "POSTTRAIN_STORE": "s3://x",
    "PYTHONPATH": "y", "AZURE_STORAGE_KEY": "z", "SOMETHING": "s", "RAY_AUTH_TOKEN": "r",
    "POSTTRAIN_SINK_PASSWORD": "s",
}  # fmt: skip


def test_jobs_get_a_machines_variables_and_what_an_admin_named() -> None:
    everything = MACHINE | ADMINS | SERVERS
    assert of_a_server(everything) == MACHINE
    assert of_a_server(everything, [*ADMINS, "PGPASSWORD", "POSTTRAIN_TOKEN"]) == MACHINE | ADMINS


def test_a_secret_that_a_job_names_arrives_where_an_admin_named_it_too() -> None:
    request = JobSpec("job", "file:///folder", "module", secrets=("HF_TOKEN",))
    refuse_elsewhere(request, of_a_server(MACHINE | ADMINS, ["HF_TOKEN"]))
    with pytest.raises(InputError, match="needs HF_TOKEN in the environment of the process that drives its run"):
        refuse_elsewhere(request, of_a_server(MACHINE | ADMINS))


def test_an_admin_names_variables_and_takes_that_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = world.root / ".posttrain" / "workspace.json"
    world.ok("init", "--job-variable", "LICENSE", "--job-variable", "HF_TOKEN")
    assert '"job_variables": ["HF_TOKEN", "LICENSE"]' in settings.read_text()
    world.ok("init")
    assert "HF_TOKEN" in settings.read_text()
    for name in ("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "POSTTRAIN_TOKEN", "no name"):
        assert "--job-variable must name a variable" in world("init", "--job-variable", name).stderr
    world.ok("init", "--job-variable", "none")
    assert "job_variables" not in settings.read_text()


def test_an_order_of_a_served_workspace_names_no_store(tmp_path: Path, bench: ServerBench) -> None:
    workspace = bench.workspace
    before = workspace.jobs.executor
    serve_jobs(workspace)
    assert workspace.jobs.access is not None
    assert workspace.jobs.executor is not before
    assert workspace.seen_by("user:ann", "default", "token").jobs.access is workspace.jobs.access
    assert init_workspace(tmp_path / "alone").jobs.access is None


KEEPS = """
import ctypes, os
from posttrain.execution.processes import close_to_others
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # as after a start under this account
close_to_others()
print(flush=True)
input()
"""
LOOKS = "import os, sys; os.setuid(65534); print(open(f'/proc/{sys.argv[1]}/environ').read())"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to step down to another account")
def test_processes_of_the_same_account_cannot_read_a_servers_environment() -> None:
    secret = {**os.environ, "SECRET": "of-the-server"}
    for program, readable in ((KEEPS, False), (KEEPS.replace("close_to_others()\n", "\n"), True)):
        command = [sys.executable, "-c", program]
        lives = subprocess.Popen(command, env=secret, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert lives.stdout is not None
        assert lives.stdout.readline() == b"\n"
        words = [sys.executable, "-c", LOOKS, str(lives.pid)]
        looks = subprocess.run(words, capture_output=True, text=True, check=False)
        assert ("of-the-server" in looks.stdout) is readable, looks.stderr
        lives.communicate(b"\n")


def test_what_lets_a_job_in_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    JobAccess("http://x", "secret").write(tmp_path)
    assert (tmp_path / "access.json").stat().st_mode & 0o777 == 0o600
