"""One setting of a stage with its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.planner.residency import gib


@dataclass(frozen=True, slots=True)
class Size:
    """One setting of a stage: `Size("kv_cache", 44023414784, "bytes", True, "…")`."""

    name: str  # as in run.yaml
    value: float
    unit: str  # tokens | switch | bytes | seconds
    chosen: bool  # else it was written
    why: str  # its arithmetic

    @property
    def said(self) -> str:
        """As a person reads it: `16384 tokens`, `on`, `41.0 GiB`, `51.2 s`."""
        if self.unit == "switch":
            return "on" if self.value else "off"
        return gib(int(self.value)) if self.unit == "bytes" else f"{self.value:g} {self.unit.replace('seconds', 's')}"
