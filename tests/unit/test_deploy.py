"""What lies in deploy/: read by the tools that will read it, where they are installed, and held to rules of our own."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from posttrain.server import metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
UNIT, MODEL_UNIT = DEPLOY / "posttrain.service", DEPLOY / "posttrain-model@.service"
MOST_EXPOSED = 40  # of 100: what systemd-analyze finds left open, for rewards' cells and GPUs need it


def installed(tool: str) -> str:
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not installed")
    return found


# --- the unit ---------------------------------------------------------------------------------------------------------


def options(unit: Path = UNIT) -> dict[str, str]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(unit)
    return dict(parser["Service"])


@pytest.mark.parametrize("unit", [UNIT, MODEL_UNIT], ids=["server", "model"])
def test_systemd_reads_the_unit_and_finds_it_closed(unit: Path, tmp_path: Path) -> None:
    tool = installed("systemd-analyze")
    there = tmp_path / unit.name.replace("@", "@prod")
    there.write_text(unit.read_text().replace("/opt/posttrain/bin/posttrain", "/bin/true"))  # it wants a file there
    read = subprocess.run([tool, "verify", "--man=no", str(there)], capture_output=True, text=True, check=False)
    assert (read.returncode, read.stdout + read.stderr) == (0, "")
    asked = [tool, "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager", str(there)]
    judged = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout


def test_jobs_live_on_when_the_service_ends() -> None:
    """Each of these alone would end them, or take away what they need."""
    said = options()
    assert said["KillMode"] == "process"
    assert said["OOMPolicy"] == "continue"
    assert said["Environment"] == "TMPDIR=/var/lib/posttrain/tmp"  # the last of them
    assert "posttrain/tmp" in said["StateDirectory"].split()
    assert said["ReadWritePaths"] == "/run/lock"  # of devices
    forbidden = {
        *("RemoveIPC", "DynamicUser", "RestrictNamespaces", "ProtectProc", "ProcSubset", "ProtectKernelTunables"),
        *("ProtectKernelLogs", "PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers"),
    }
    assert not forbidden & said.keys()


def test_the_service_is_told_ready_and_shows_no_token() -> None:
    said = options()
    assert said["Type"] == "notify"
    assert float(said["WatchdogSec"]) >= 30
    assert "--no-token" in said["ExecStart"].split()
    assert "--log-format json" in said["ExecStart"]
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert said[name] == "yes", name
    assert said["ProtectSystem"] == "strict"
    assert said["CapabilityBoundingSet"] == ""


def test_the_service_of_a_model_asks_for_keys_drains_and_is_started_again() -> None:
    said = options(MODEL_UNIT)
    words = said["ExecStart"].split()
    assert {"--keys", "--behind-proxy"} <= {*words}
    assert int(words[words.index("--drain") + 1]) < int(said["TimeoutStopSec"])
    assert (said["Type"], said["KillMode"], said["Restart"]) == ("notify", "mixed", "always")


# --- the container ----------------------------------------------------------------------------------------------------


def container() -> list[list[str]]:
    """Instructions, each in words."""
    text = (DEPLOY / "Containerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [line.split() for line in joined.splitlines() if line.strip()]


def test_the_container_file_is_what_it_should_be() -> None:
    lines = container()
    named = [line[0] for line in lines]
    assert named.count("FROM") == 2  # what builds is not in what runs
    base = next(line[1] for line in lines if line[0] == "ARG")
    assert re.fullmatch(r"BASE=python:3\.1\d\.\d+-slim-bookworm", base), "a name and a whole version"
    assert all(line[1] == "${BASE}" for line in lines if line[0] == "FROM")
    last = lines[max(number for number, line in enumerate(lines) if line[0] == "FROM") :]
    after = [line[0] for line in last]
    assert after.index("USER") < after.index("ENTRYPOINT")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", next(line[1] for line in last if line[0] == "USER"))
    assert any(line[0] == "HEALTHCHECK" and "/readyz" in " ".join(line) for line in last)
    assert not [line for line in last if line[0] == "COPY" and not line[1].startswith("--from=build")]
    assert "ADD" not in named
    text = " ".join(" ".join(line) for line in lines)
    assert "--constraint constraints.txt" in text
    assert ".[server,postgres]" in text
    assert "--no-token" in text
    assert not re.search(r"(?i)(password|secret|token)=", text)


def test_a_build_sees_the_packages_own_files_and_nothing_else() -> None:
    said = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert said[0] == "*"
    wanted = {line.removeprefix("!") for line in said if line.startswith("!")}
    assert all((ROOT / name).exists() for name in wanted)
    copied = {word.removeprefix("./") for line in container() if line[0] == "COPY" for word in line[1:-1]}
    assert {word for word in copied if not word.startswith(("--", "/"))} == wanted


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [installed("hadolint"), str(DEPLOY / "Containerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


# --- what watches it --------------------------------------------------------------------------------------------------


def series() -> set[str]:
    """Every name that /metrics has, as the sources write them."""
    text = Path(metrics.__file__).read_text()
    found = set(re.findall(r'"(posttrain_[a-z_]+)"', text))
    counters = set(re.findall(r'Counter(?:MetricFamily)?\(\s*"(posttrain_[a-z_]+)"', text))
    return (found - counters) | {f"{name}_total" for name in counters} | {"posttrain_request_seconds_bucket"}


def test_alerts_ask_for_series_that_there_are() -> None:
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    known = series()
    assert len(rules) > 8
    for rule in rules:
        asked = set(re.findall(r"posttrain_[a-z_]+", rule["expr"]))
        assert asked <= known, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")


def test_the_pages_table_has_every_series() -> None:
    page = (ROOT / "docs" / "howto" / "operate.md").read_text()
    told = set(re.findall(r"`(posttrain_[a-z_]+)", page))
    assert told == series() - {"posttrain_request_seconds_bucket"}


def test_the_scrape_configuration_shows_a_token_from_a_file() -> None:
    said = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    (job,) = said["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert set(job["authorization"]) == {"credentials_file"}
    assert said["rule_files"] == ["alerts.yaml"]
    if tool := shutil.which("promtool"):
        for asked in (["check", "rules", "alerts.yaml"], ["check", "config", "--syntax-only", "prometheus.yaml"]):
            subprocess.run([tool, *asked], cwd=DEPLOY, check=True, capture_output=True)


def test_the_proxy_lets_streams_and_uploads_through() -> None:
    said = (DEPLOY / "nginx.conf").read_text()
    for wanted in (
        *("client_max_body_size 0;", "proxy_buffering off;", "proxy_request_buffering off;"),
        *("proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;", "proxy_set_header Host $http_host;"),
    ):
        assert wanted in said
