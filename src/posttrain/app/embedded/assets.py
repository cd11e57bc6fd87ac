"""Assets, models, sweeps. What a verb needs is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.values import Asked
from posttrain.data.confining import is_confined

if TYPE_CHECKING:
    from posttrain.api.values import Exported, Marked, Point, Ranked, Submitted, Sweep
    from posttrain.app.workspace import Workspace
    from posttrain.data.importing import Curve, Imported
    from posttrain.domain.overrides import Override
    from posttrain.domain.records import Asset, AssetStatus


class Assets:
    """See `api.control.Assets`."""

    workspace: Workspace

    def add_dataset(
        self, path: Path, name: str, *more: Path, progress: Callable[[str], None] = lambda _: None
    ) -> Asset:
        """See `Assets.add_dataset`."""
        return self._sealed(self.workspace.catalog.add_dataset(path, name, *more, progress=progress))

    def add_external(self, uri: str, name: str, *, checksum: str, version: str) -> Asset:
        """See `Assets.add_external`."""
        from posttrain.store.external import external
        from posttrain.store.scratch import scratch

        place = external(uri, version)
        with scratch(self.workspace.root / "cache" / "scratch", "posttrain-external-") as scratched:
            return self._sealed(self.workspace.catalog.add_external(place, checksum, name, scratched))

    def add_model(self, folder: Path, name: str, *, progress: Callable[[str], None] = lambda _: None) -> Asset:
        """See `Assets.add_model`."""
        return self._sealed(self.workspace.catalog.add_model(folder, name, progress=progress))

    def add_reward(self, path: Path, name: str, *, entry: str | None, dialect: str, guideline: Path | None) -> Asset:
        """See `Assets.add_reward`."""
        add = self.workspace.catalog.add_reward
        return self._sealed(add(path, name, entry=entry, dialect=dialect, guideline=guideline))

    def create_model(self, name: str, config: Path, seed: int) -> tuple[Asset, str]:
        """See `Assets.create_model`."""
        from posttrain.app.models import create_model

        made = create_model(self.workspace, name, config, seed=seed)
        return made.asset, made.run_id

    def assets(self, kind: str | None) -> list[Asset]:
        """See `Assets.assets`."""
        return self.workspace.ledger.assets(kind)

    def asset(self, ref: str) -> Asset:
        """See `Assets.asset`."""
        return self.workspace.catalog.find(ref)

    def asset_status(self) -> list[AssetStatus]:
        """See `Assets.asset_status`."""
        return [said for said, _ in self.workspace.ledger.asset_status()]

    def recalled(self, *digests: str) -> dict[str, AssetStatus]:
        """See `Assets.recalled`."""
        from posttrain.control.recalls import recalled

        return recalled(self.workspace.ledger, digests)

    def mark(self, ref: str, status: str, reason: str) -> tuple[Asset, Marked]:
        """See `Assets.mark`."""
        from posttrain.app.assets import mark

        asset = self.workspace.catalog.find(ref)
        return asset, mark(self.workspace, asset, status, reason)

    def curves(self, history: Asset) -> list[Curve]:
        """See `Assets.curves`."""
        from posttrain.app.assets import history_curves

        return history_curves(self.workspace, history)

    def import_trl_output(self, folder: Path, name: str | None) -> Imported:
        """See `Assets.import_trl_output`."""
        from posttrain.app.assets import import_trl_output

        return self._imported(import_trl_output(self.workspace, folder, name))

    def import_mlflow(self, where: str, run: str | None, name: str | None) -> Imported:
        """See `Assets.import_mlflow`."""
        from posttrain.app.assets import import_carried, import_mlflow

        if is_confined():  # the client read it where the store is, and sent what it found
            return self._imported(import_carried(self.workspace, Path(where), name))
        return self._imported(import_mlflow(self.workspace, where, run, name))

    def import_wandb_export(self, folder: Path, name: str | None) -> Imported:
        """See `Assets.import_wandb_export`."""
        from posttrain.app.assets import import_wandb_export

        return self._imported(import_wandb_export(self.workspace, folder, name))

    def _sealed(self, asset: Asset) -> Asset:
        self.workspace.seal()
        return asset

    def _imported(self, imported: Imported) -> Imported:
        self.workspace.seal()
        return imported


class Models:
    """See `api.control.Models`."""

    workspace: Workspace

    def ask(
        self,
        model: str,
        prompts: Sequence[str],
        *,
        samples: int,
        max_new_tokens: int | None,
        temperature: float,
        seed: int,
        runtime: Mapping[str, Any],
        timeout: float | None,
        chat: bool | None,
        system: str | None,
        stop: Sequence[str] = (),
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Asked:
        """See `Models.ask`."""
        from posttrain.app.naming import named_model
        from posttrain.app.sampling import LONGEST_WAIT, Ask, ask_model, inference_runtime, prompt_row, usual_form

        where, wait = inference_runtime(**runtime), timeout or LONGEST_WAIT
        how = Ask(samples, max_new_tokens, temperature, seed, where, wait, stop, top_k, top_p, min_p)
        named = named_model(self.workspace, model)
        form, why = usual_form(self.workspace, named)
        if chat is not None:
            form, why = ("chat", "--chat") if chat else ("text", "--text")
        rows = [prompt_row(text, form, system) for text in prompts]
        return Asked(named.pinned.name, named.digest, form, why, ask_model(self.workspace, named, rows, how))

    def export(self, model: str, folder: Path, *, dtype: str | None, progress: Callable[[str], None]) -> Exported:
        """See `Models.export`."""
        from posttrain.app.export import export_model
        from posttrain.app.naming import named_model

        named = named_model(self.workspace, model)
        return export_model(self.workspace, named, folder, dtype=dtype, progress=progress)

    def plan_sweep(
        self, path: Path, overrides: Sequence[Override], *, seeds: int, metric: str | None, better: str | None
    ) -> Sweep:
        """See `Models.plan_sweep`."""
        from posttrain.app.sweeping import plan_sweep

        return plan_sweep(path, self.workspace, overrides, seeds=seeds, metric=metric, better=better)

    def submit_point(self, point: Point) -> Submitted:
        """See `Models.submit_point`."""
        from posttrain.app.sweeping import submit_point

        return submit_point(point, self.workspace)

    def rank(self, sweep: Sweep, runs: Mapping[tuple[int, int], str]) -> Ranked:
        """See `Models.rank`."""
        from posttrain.app.sweeping import rank_sweep

        return rank_sweep(sweep, runs, self.workspace)
