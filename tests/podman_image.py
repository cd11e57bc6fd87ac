"""An image of the environment that runs the tests, without copying it: empty, and this machine's folders are mounted
into every container of it, read-only, by a containers.conf of the tests' own. Images lie in a folder of the tests.

    python tests/podman_image.py      ends with 0 where this machine can run a container, with 69 where it refuses
"""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import posttrain

_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
UNABLE = 69  # exit code where the machine, not this file, is why no container runs
_REFUSALS = re.compile(
    r"operation not permitted|permission denied|cgroup|user namespace|newuidmap|subuid", re.IGNORECASE
)
LACKING = "" if shutil.which("podman") else "podman is not installed; apt-get install podman runc"


class Podman:
    """A podman with images and containers of its own.

    Args:
        folder: where they lie.
        shown: folders that every container sees besides.
    """

    def __init__(self, folder: Path, *shown: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
        )
        (folder / "containers.conf").write_text(_settings(shown))
        self.variables = {
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
        self.image = self._build()

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            ["podman", *words], env={**os.environ, **self.variables}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout.strip()

    def containers(self) -> list[str]:
        """Names of those that there are, running or not."""
        return self("ps", "--all", "--format", "{{.Names}}").split()

    def pid(self, name: str) -> int:
        """Of a container's first process."""
        return int(self("inspect", "--format", "{{.State.Pid}}", name))

    def close(self) -> None:
        for name in self.containers():
            self("rm", "--force", "--time=0", name)
        self("rmi", "--all", "--force")

    def _build(self) -> str:
        here = self.folder / "image"
        here.mkdir()
        (here / "of-tests").touch()
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        (here / "Containerfile").write_text(f"FROM scratch\nENV PATH={path}\nCOPY of-tests /of-tests\n")
        self("build", "--quiet", "--tag", "localhost/posttrain-tests", str(here))
        return f"localhost/posttrain-tests@{self('image', 'inspect', '--format', '{{.Digest}}', 'posttrain-tests')}"


class Registry:
    """An image like a podman's, and of no other registry: podman asks none for a digest that it has.

    Args:
        folder: where it lies.
        port: of this machine, where it is once it was started.
    """

    def __init__(self, podman: Podman, folder: Path, port: int) -> None:
        folder.mkdir(parents=True)
        name = f"localhost/of-registry-{port}"
        (folder / "Containerfile").write_text(f"FROM {podman.image.split('@')[0]}\nLABEL registry={port}\n")
        podman("build", "--quiet", "--pull=never", "--tag", name, str(folder))
        podman("save", "--quiet", "--format", "oci-dir", "--output", str(folder / "oci"), name)
        podman("rmi", name)
        self._blobs, self._port = folder / "oci" / "blobs" / "sha256", port
        self._server: ThreadingHTTPServer | None = None
        digest = json.loads((folder / "oci" / "index.json").read_text())["manifests"][0]["digest"]
        self.image = f"127.0.0.1:{port}/team/train@{digest}"
        (folder / "registries.conf").write_text(f'[[registry]]\nlocation = "127.0.0.1:{port}"\ninsecure = true\n')
        self.variables = {"CONTAINERS_REGISTRIES_CONF": str(folder / "registries.conf")}

    def start(self) -> None:
        blobs = self._blobs

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                found = blobs / self.path.rpartition("sha256:")[2]
                body = found.read_bytes() if "sha256:" in self.path and found.is_file() else b""
                self.send_response(200 if body or self.path == "/v2/" else 404)
                kind = "vnd.oci.image.manifest.v1+json" if "/manifests/" in self.path else "octet-stream"
                self.send_header("content-type", f"application/{kind}")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)

            do_GET = do_HEAD = answer  # noqa: N815  # as the base class calls them

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _settings(more: Sequence[Path]) -> str:
    places = [place for place in _SYSTEM if os.path.exists(place)]
    places += [sys.base_prefix, sys.prefix, str(Path(posttrain.__file__).resolve().parents[1])]
    places += map(str, more)
    shown = [place for place in dict.fromkeys(places) if not place.startswith("/usr/")]
    volumes = ", ".join(f'"{place}:{place}:ro"' for place in shown)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    ulimits = f'"nofile={files}:{files}", "nproc=1000:1000"'  # who may not raise limits sets none higher
    return (
        f"[containers]\nvolumes = [{volumes}]\ndefault_ulimits = [{ulimits}]\npids_limit = 0\n"
        '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )


def podman_of(factory: pytest.TempPathFactory, *shown: Path) -> Podman:
    """One that is closed by its user."""
    assert not LACKING, LACKING
    return Podman(factory.mktemp("podman"), *shown)


def main() -> None:
    """Run one container; a machine that refuses it is told from whatever else is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = Podman(Path(folder))
            made("run", "--rm", "--network=none", made.image, "python", "-c", "")
        except AssertionError as error:
            if not _REFUSALS.search(str(error)):
                raise
            print(f"podman runs no container on this machine: {error}", file=sys.stderr)
            sys.exit(UNABLE)
        try:
            made("run", "--rm", "--network=none", "--read-only", "--cap-drop=all", made.image, "python", "-c", "")
        finally:
            made.close()


if __name__ == "__main__":
    main()
