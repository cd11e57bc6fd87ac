"""The registry of versioned assets: addition, inspection, and resolution of refs to pinned inputs.

The refs of a run file resolve to pinned inputs. A data set is inspected before it is registered: each row is read once,
with one row in memory at a time. The bytes of a data set may be external; if so, the registered version records their
location and digest.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from posttrain.data.assets import (
    ModelLimits,
    inspect_adapter,
    inspect_called,
    inspect_imported,
    inspect_model,
    inspect_recipe,
    inspect_reward,
    is_adapter,
    shapes_of,
)
from posttrain.data.files import data_files, file_format, together
from posttrain.data.refs import (
    NAME,
    SOURCE,
    UNCONFINED,
    AssetRef,
    Source,
    imported_reward,
    local_path,
    parse_ref,
    refuse_afar,
    refuse_elsewhere,
)
from posttrain.data.rows import each_row, has_answer, prompt_text
from posttrain.domain.adapters import CONFIG as ADAPTER, FOLDER, WEIGHTS, has_adapter
from posttrain.domain.canonical import DIGEST_PREFIX, canonical_json, digest_bytes, digest_json, is_digest
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, PosttrainError, nearest
from posttrain.domain.harnesses import FACTS, PACKAGES, read_facts
from posttrain.domain.kinds import HARNESS
from posttrain.domain.manifest import InputRef, Manifest
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import IMPORTED, Asset
from posttrain.domain.rewards import AS_FOUND, AUTO, Called, source_name
from posttrain.store.atomic import make_folder
from posttrain.store.external import EXTERNAL, URI, VERSION, ChangedError, External, check_external, fetch_external
from posttrain.store.ledger import Ledger
from posttrain.store.trees import (
    TreeFile,
    beside_model,
    file_digest,
    files_digest,
    is_byproduct,
    materialise,
    not_taken,
    put_extended,
    put_files,
    put_listing,
    put_tree,
    stored_sizes,
    tree_digest,
    tree_listing,
)

_TELL = 10_000  # rows between two progress reports
Form = Literal["file", "tree"]
_CALLED_BY = ("entry", "dialect", "source")  # keys in `meta` that say how a reward is called
_OF_THE_BASE = ("run",)  # metadata that an adapter does not share with its base


def inspect_dataset(
    data: Path | Mapping[str, Path], *, name: str = "", progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Return `{"rows", "columns", "format", "files", "prompts", "prompts_digest", "answers", "characters"}` of data.

    `format` lists the formats of the files (see `data.files.file_format`), sorted and separated by spaces. `files`,
    `prompts` and `answers` are the numbers of files, of distinct prompts, and of rows with an answer with which a
    response can be compared. `characters` is {min, mean, max} of prompt lengths.

    Args:
        data: a file, a folder or a pattern (`data.files`), or name → file.
        progress: called with the number of rows read so far.

    Raises:
        NotFoundError: there is no such file.
        InputError: there are no rows, a line (`file:line`) or row is malformed, or the files do not form one data set.
    """
    files = data if isinstance(data, Mapping) else data_files(data)
    rows = answers = characters = longest = 0
    shortest, columns, prompts = sys.maxsize, set[str](), set[str]()
    for _, row in each_row(files, name=name):
        text = prompt_text(row)
        rows, answers, characters = rows + 1, answers + has_answer(row), characters + len(text)
        shortest, longest = min(shortest, len(text)), max(longest, len(text))
        columns |= row.keys()
        prompts |= prompt_digests([text])
        if rows % _TELL == 0:
            progress(f"{rows} rows")
    return {
        "rows": rows,
        "columns": sorted(columns),
        "format": " ".join(sorted({file_format(path) for path in files.values()})),
        "files": len(files),
        "prompts": len(prompts),
        "prompts_digest": digest_json(sorted(prompts)),
        "answers": answers,
        "characters": {"min": shortest, "mean": round(characters / rows, 1), "max": longest},
    }


def prompt_digests(texts: Iterable[str]) -> frozenset[str]:
    """Return the digests of prompts without whitespace at both ends; equal digests mean the same task."""
    return frozenset(digest_bytes(text.strip().encode()) for text in texts)


class Resolver(Protocol):
    """Resolves refs of a run file."""

    def __call__(self, kind: str, text: str, called: Called = AS_FOUND) -> InputRef:
        """Return the pinned input of a ref.

        Args:
            called: for a reward, the settings in the run file for the reward's function.
        """


class Catalog:
    """Assets of one workspace. Versions are immutable; equal content under the same name is one version."""

    def __init__(self, ledger: Ledger, blobs: BlobStore, actor: str, limits: ModelLimits | None = None) -> None:
        self._ledger, self._blobs, self._actor, self._limits = ledger, blobs, actor, limits
        self._local: dict[str, tuple[Path, Callable[[], str]]] = {}  # digest → path and function that publishes it
        self.not_taken: dict[str, str] = {}  # digest of a model's folder → note about files left out

    def add_dataset(
        self, path: Path, name: str, *more: Path, progress: Callable[[str], None] = lambda _: None
    ) -> Asset:
        """Register a data set, which is a file, a folder or several files.

        One file is stored unchanged; several files are stored as a tree.

        Args:
            progress: called with the number of rows read so far.

        Raises:
            NotFoundError: there is no such file.
            InputError: there are no rows, a line (`file:line`) or row is malformed, the files do not form one data set,
                or the name is invalid.
        """
        files = together((path, *more), f"dataset:{name}") if more else data_files(path)
        meta = inspect_dataset(files, progress=progress)
        return self._register("dataset", name, path, meta, form=_form(files), files=files)

    def add_external(self, place: External, checksum: str, name: str, scratched: Path) -> Asset:
        """Register an external data set, which is read once, hashed and checked; none of its bytes are stored.

        Args:
            checksum: the checksum of the data set's bytes, `sha256:…`.
            scratched: a folder for the file while its rows are read.

        Raises:
            InputError: the checksum is missing or does not match the bytes, there are no rows, a line (`file:line`) or
                row is malformed, or the name is invalid.
            NotFoundError: the object does not exist.
            InfrastructureError: the object's store does not respond.
        """
        if place.uri.startswith("file:"):
            refuse_afar(f"{place.uri[:120]!a}: a server does not register files of its machine; send the file itself")
        refuse_name("dataset", name)
        if not is_digest(checksum):
            raise InputError(
                f"checksum must be `sha256:` followed by 64 hex digits, got {checksum!r}; run sha256sum FILE"
            )
        path = scratched / place.name
        try:
            fetch_external(place, checksum, path)
        except ChangedError as error:
            raise InputError(f"{error}; check the URI, or write --checksum {error.found}") from error
        where = {URI: place.uri, **({VERSION: place.version} if place.version else {})}
        meta = {**inspect_dataset({place.name: path}), **where}
        new = self.version("dataset", name, checksum, EXTERNAL, meta)
        with self._ledger.transaction(self._actor) as transaction:
            return transaction.insert_asset(new, {checksum: path.stat().st_size})

    def add_reward(
        self, path: Path, name: str, *, entry: str | None = None, dialect: str = "auto", guideline: Path | None = None
    ) -> Asset:
        """Register a reward's source with the guideline that it implements. The source is parsed, never executed.

        Raises:
            NotFoundError: there is no such source, function or guideline file.
            InputError: the source is not Python, the entry is unclear, the dialect is unknown, or the name is invalid.
        """
        meta = inspect_reward(path, entry, dialect=dialect, guideline=guideline)
        return self._register("reward", name, path, meta, form="tree" if path.is_dir() else "file")

    def add_harness(self, folder: Path, name: str) -> Asset:
        """Register a harness that `posttrain harness fetch` put into a folder.

        Raises:
            NotFoundError: there is no such folder, or it lacks the facts or the packages.
            InputError: the facts are not those of a harness, or the name is invalid.
        """
        for lacking in (FACTS, PACKAGES):
            if not (folder / lacking).is_file():
                raise NotFoundError(f"{folder}: a harness must have {lacking}; make it with posttrain harness fetch")
        facts = read_facts((folder / FACTS).read_bytes(), f"{folder.name}/{FACTS}")
        return self._register(HARNESS, name, folder, facts.to_json())

    def add_model(
        self,
        folder: Path,
        name: str,
        *,
        base: str | None = None,
        progress: Callable[[str], None] = lambda _: None,
        origin: dict[str, Any] | None = None,
        parents: tuple[str, ...] = (),
    ) -> Asset:
        """Register a model folder in Hugging Face format with safetensors weights, or an adapter of peft.

        Args:
            base: the registered model of which the folder has an adapter.
            origin: what made the model, for example `{"run": "tiny-sort-1f2e3d4c"}`.
            parents: digests of the artifacts from which the model was made.
            progress: called with the number of stored files and bytes.

        Raises:
            NotFoundError: there is no such folder, config.json or weights, or a shard is missing.
            InputError: the model is not acceptable (see `inspect_model`), or the name is invalid; an adapter without
                `base`, or `base` for a whole model; an adapter that does not fit its base.
        """
        if is_adapter(folder) or base is not None:
            return self._add_adapter(folder, name, base)
        meta = {**inspect_model(folder, self._limits), **(origin or {})}
        if line := not_taken(folder):
            progress(line)
        return self._register("model", name, folder, meta, parents=parents, progress=progress)

    def _add_adapter(self, folder: Path, name: str, base: str | None) -> Asset:
        if base is None:
            raise InputError(
                f"{folder.name} has an adapter and no whole model, so its base must be given; add --base "
                "model:NAME@VERSION"
            )
        if not is_adapter(folder):
            raise InputError(f"{folder.name} has a whole model, which needs no base, got {base}; leave --base out")
        refuse_name("model", name)
        below = self.find(base, "model")
        listing = tree_listing(self._blobs, below.digest)
        if has_adapter(listing):
            raise InputError(f"base must be a whole model, got {below.ref}, which has an adapter; merge it first")
        saved, found = inspect_adapter(folder, below.ref, below.digest, shapes_of(self._blobs, listing))
        meta = {**{key: value for key, value in below.meta.items() if key not in _OF_THE_BASE}, **found}
        with self._blobs.holding():
            config = canonical_json(saved.to_json())  # as a job writes it, so that the same adapter has the same digest
            own = put_files(self._blobs, {f"{FOLDER}/{WEIGHTS}": folder / WEIGHTS})
            files = {
                **tree_listing(self._blobs, own),
                f"{FOLDER}/{ADAPTER}": TreeFile(self._blobs.put(config), len(config)),
            }
            digest = put_extended(self._blobs, below.digest, put_listing(self._blobs, files))
            return self.add_together(self.version("model", name, digest, "tree", meta, (below.digest,)))[0]

    def _register(
        self,
        kind: str,
        name: str,
        path: Path,
        meta: dict[str, Any],
        *,
        form: str = "tree",
        files: Mapping[str, Path] | None = None,
        parents: tuple[str, ...] = (),
        progress: Callable[[str], None] = lambda _: None,
    ) -> Asset:
        refuse_name(kind, name)
        with self._blobs.holding():
            digest = self._put(path, form, files, skip=_beside(kind), progress=progress)
            return self.add_together(self.version(kind, name, digest, form, meta, parents))[0]

    def version(
        self, kind: str, name: str, digest: str, form: str, meta: Mapping[str, Any], parents: tuple[str, ...] = ()
    ) -> Asset:
        """Return a version of stored bytes, not registered: the next one, or the latest if its content is equal."""
        return Asset(kind, name, 0, digest, form, self._ledger.clock.now(), self._actor, meta, parents)

    def has(self, kind: str, digest: str) -> bool:
        """Return whether these bytes are registered, under any name."""
        return any(asset.kind == kind for asset in self._ledger.assets_by_digest(digest))

    def add_together(self, *versions: Asset) -> list[Asset]:
        """Register versions in one transaction."""
        forms = {version.digest: version.form for version in versions}
        forms |= {str(version.meta[IMPORTED]): "file" for version in versions if IMPORTED in version.meta}
        sizes = stored_sizes(self._blobs, forms)
        with self._ledger.transaction(self._actor) as transaction:
            return [transaction.insert_asset(version, sizes) for version in versions]

    def _put(
        self,
        path: Path,
        form: str,
        files: Mapping[str, Path] | None = None,
        *,
        hub: bool = False,
        skip: Callable[[str], bool] = is_byproduct,
        progress: Callable[[str], None] = lambda _: None,
    ) -> str:
        """Store a file, a data set's files, or a folder."""
        if files is not None:
            return put_files(self._blobs, files) if form == "tree" else self._blobs.put_file(*files.values())
        if form == "tree":
            return put_tree(self._blobs, path, follow_links=hub, skip=skip, progress=progress)
        return self._blobs.put_file(path)

    def find(self, ref: str, kind: str | None = None) -> Asset:
        """Return the asset that `kind:name[@version]` names.

        Raises:
            InputError: the ref is malformed.
            NotFoundError: the name or version is unknown; the message contains the most similar known name.
        """
        named = parse_ref(ref, kind or ref.partition(":")[0])
        if named.source is not Source.REGISTRY:
            raise InputError(f"ref {ref!r}: must name a registered asset such as dataset:sort-train@1")
        return self._registered(named)

    def resolver(self, base: Path, *, boxed: bool = False) -> Resolver:
        """Return a resolver for the refs of a run file in the folder `base`. The resolver writes nothing.

        Args:
            boxed: whether the jobs run in an image; if so, recipes from remote clients are allowed.
        """

        def resolve(kind: str, text: str, called: Called = AS_FOUND) -> InputRef:
            if kind == "recipe":
                if not boxed:
                    refuse_afar(f"recipe {text[:80]!a}: {UNCONFINED}")
                return self._recipe(text, base)
            if kind == "file":
                return self._file(text, base)
            if kind == HARNESS:
                return self._pinned(self.find(text, kind))
            ref = parse_ref(text, kind)
            if ref.source is Source.MODULE:
                return self._imported(ref.name, called)
            if ref.source is Source.REGISTRY:
                return self._pinned(self._registered(ref), called)
            return self._from_files(ref, local_path(ref, base), called)

        return resolve

    def _recipe(self, text: str, base: Path) -> InputRef:
        """Return the input for a user's algorithm, `my_module:MyAlgorithm` in `my_module.py` next to the run file."""
        module, _, entry = text.partition(":")
        if not entry:
            raise InputError(f"recipe {text!r} must name a module and its class, got no class; write {text}:NAME")
        path = base / f"{module}.py"
        refuse_elsewhere(f"{module}.py", path)
        found = inspect_recipe(path, entry)
        return self._planned(
            f"path:{path.name}", file_digest(path), "file", path, partial(self._put, path, "file"), found
        )

    def _file(self, text: str, base: Path) -> InputRef:
        """Return the input for a file or folder next to the run file that a reward's code reads."""
        path = base / Path(text).expanduser()
        refuse_elsewhere(text, path)
        if not path.exists():
            raise NotFoundError(f"file {text}: no such file or folder ({path}); check the path")
        form: Form = "tree" if path.is_dir() else "file"
        digest = tree_digest(path, skip=is_byproduct) if form == "tree" else file_digest(path)
        return self._planned(f"path:{path.name}", digest, form, path, partial(self._put, path, form))

    def _planned(
        self,
        name: str,
        digest: str,
        form: Form,
        path: Path,
        put: Callable[[], str],
        meta: Mapping[str, Any] | None = None,
    ) -> InputRef:
        """Return an input whose bytes are at a path; `put` stores the bytes and returns their digest."""
        self._local[digest] = (path, put)
        return InputRef(source="asset", name=name, digest=digest, form=form, meta=meta or {})

    def _registered(self, ref: AssetRef) -> Asset:
        versions = self._ledger.assets(ref.kind, ref.name)
        if not versions:
            known = {asset.name for asset in self._ledger.assets(ref.kind)}
            made = f", or create one: posttrain asset create {ref.kind}:{ref.name} FILE" if ref.kind == "model" else ""
            add = f"; register it: posttrain asset add {ref.kind}:{ref.name} PATH{made}"
            hint = nearest(ref.name, known) if known else add
            if ref.kind == HARNESS:
                hint = f"{nearest(ref.name, known) if known else ''}; fetch it: posttrain harness fetch PROGRAM TASK"
            raise NotFoundError(f"{ref}: no {ref.kind} of that name is registered{hint}")
        if ref.version is None:
            return versions[-1]
        found = next((asset for asset in versions if asset.version == ref.version), None)
        if found is None:
            raise NotFoundError(f"{ref}: version {ref.version} does not exist; the latest is {versions[-1].version}")
        return found

    def _pinned(self, asset: Asset, called: Called = AS_FOUND) -> InputRef:
        if asset.form == EXTERNAL:  # readers verify its bytes; its location does not affect results
            return InputRef(source="asset", name=asset.ref, digest=asset.digest, form="file")
        if not self._blobs.has(asset.digest):
            raise NotFoundError(
                f"{asset.ref}: its bytes ({asset.digest}) are missing from the store; register it again"
            )
        meta = {key: asset.meta[key] for key in _CALLED_BY if key in asset.meta}
        if asset.kind == HARNESS:
            meta = {**asset.meta, "packages": {}}  # their digests are those of the bytes
        meta = self._called(asset, called) if called else meta
        return InputRef(source="asset", name=asset.ref, digest=asset.digest, form=cast(Form, asset.form), meta=meta)

    def _called(self, asset: Asset, called: Called) -> dict[str, Any]:
        """Return the entry, dialect and source of a registered reward.

        The run file's settings override the registered ones. The registered dialect applies only to the registered
        function.
        """
        meta, whole = asset.meta, asset.form == "tree"
        file, _, function = (called.entry or str(meta["entry"])).rpartition(":")
        source, digest = str(meta["source"]), asset.digest
        if whole:
            listing = tree_listing(self._blobs, asset.digest)
            known = str(meta["entry"]).rpartition(":")[0]
            source = source_name({n for n in listing if n.endswith(".py") and "/" not in n}, file or known, asset.name)
            digest = listing[source].digest
        elif file:
            raise InputError(f"{asset.ref} is one file, so entry must be a function's name, got {called.entry!r}")
        own = f"{source}:{function}" if whole else function
        dialect = called.dialect or (str(meta["dialect"]) if own == meta["entry"] else AUTO)
        return inspect_called(self._blobs.get(digest), source, function, dialect, whole=whole)

    def _from_files(self, ref: AssetRef, path: Path, called: Called) -> InputRef:
        if ref.kind == "dataset":
            return self._dataset(ref, path)
        if ref.kind == "model":
            found = inspect_model(path, self._limits)
        elif path.is_file() and ":" in (called.entry or ""):
            raise InputError(f"{path.name} is one file, so entry must be a function's name, got {called.entry!r}")
        else:
            found = inspect_reward(path, called.entry, dialect=called.dialect or AUTO)
        form: Form = "tree" if path.is_dir() else "file"
        hub, skip = ref.source is Source.HUB, _beside(ref.kind)  # files in the hub's cache are links
        digest = tree_digest(path, follow_links=hub, skip=skip) if form == "tree" else file_digest(path)
        if ref.kind == "model" and (line := not_taken(path)):
            self.not_taken[digest] = line
        meta = {key: found[key] for key in _CALLED_BY if ref.kind == "reward" and key in found}
        put = partial(self._put, path, form, hub=hub, skip=skip)
        return self._planned(str(ref) if hub else f"path:{path.name}", digest, form, path, put, meta)

    def _imported(self, word: str, called: Called) -> InputRef:
        """Return the input for a reward in an installed package."""
        found = imported_reward(word)
        put, meta = partial(self._blobs.put, found.source), inspect_imported(found, called)
        return self._planned(word, digest_bytes(found.source), "file", Path(SOURCE), put, meta)

    def _dataset(self, ref: AssetRef, path: Path) -> InputRef:
        files = data_files(path, str(ref))
        inspect_dataset(files)
        form = _form(files)
        digest = files_digest(files) if form == "tree" else file_digest(*files.values())
        name = str(ref) if ref.source is Source.HUB else f"path:{path.name}"
        return self._planned(name, digest, form, path, partial(self._put, path, form, files))

    def located(self, ref: InputRef, cache: Path) -> Path | bytes:
        """Return the path of a planned input, or the bytes of a file that is not on disk.

        Raises:
            NotFoundError: the bytes are missing.
            IntegrityError: the bytes are corrupt.
        """
        digest = str(ref.digest)
        path, _ = self._local.get(digest, (None, None))
        if ref.form == "tree":
            return path or materialise(self._blobs, digest, cache)
        if path == Path(SOURCE):
            return imported_reward(ref.name).source
        return path or self._blobs.get(digest)

    def publish(self, manifest: Manifest) -> None:
        """Put the inputs that a manifest names by path into the store, before the run is recorded.

        Raises:
            InputError: a file has changed since the run was planned.
        """
        for _, _, ref in manifest.assets():
            if ref.digest not in self._local:
                continue
            path, put = self._local[ref.digest]
            digest = put()
            if digest != ref.digest:
                raise InputError(f"{path}: changed during the submission ({ref.digest} → {digest}); submit again")


def refuse_name(kind: str, name: str) -> None:
    """Raise InputError if an asset name is invalid."""
    if not NAME.fullmatch(name):
        raise InputError(f"{kind} name must match {NAME.pattern}, got {name!r}")


def _form(files: Mapping[str, Path]) -> Form:
    return "file" if len(files) == 1 else "tree"


def _beside(kind: str) -> Callable[[str], bool]:
    """Return a function that returns whether a path in an asset's folder is not part of the asset."""
    return beside_model if kind == "model" else is_byproduct


def place_of(asset: Asset) -> External:
    """Return the location of the bytes of an external version."""
    return External(str(asset.meta[URI]), str(asset.meta.get(VERSION, "")))


def external_versions(registered: Iterable[Asset], digest: str, name: str = "") -> list[Asset]:
    """Return the external versions with these bytes: first the version `name`, then the others, newest first."""
    found = [asset for asset in registered if asset.digest == digest and asset.form == EXTERNAL]
    return sorted(found, key=lambda asset: (asset.ref != name, -asset.created_at))


def cached_file(cache: Path, digest: str) -> Path:
    """Return the path of a file in the cache; a job verifies its hash, or requests the file from the store."""
    return cache / "files" / digest.removeprefix(DIGEST_PREFIX)


def local_copy(versions: Iterable[Asset], cache: Path) -> Path:
    """Return the path of a copy of an external version's bytes below `cache`; fetch a missing or damaged copy.

    Args:
        versions: at least one version, all with the same digest; the first readable one is used.

    Raises:
        IntegrityError: the object has changed; the message contains both checksums and the next action.
        NotFoundError: the object does not exist.
        InfrastructureError: the object's store does not respond.
    """
    troubles: list[PosttrainError] = []
    for asset in versions:
        path = cached_file(cache, asset.digest)
        if path.is_file() and file_digest(path) == asset.digest:
            return path
        make_folder(path.parent)
        try:
            fetch_external(place_of(asset), asset.digest, path)
            return path
        except PosttrainError as error:
            troubles.append(_told(asset, error))
    raise troubles[0]


def check_where_it_lies(asset: Asset) -> int:
    """Return the number of bytes of an external version, after hashing them at their URI.

    Raises:
        IntegrityError: the object has changed.
        NotFoundError: the object does not exist.
        InfrastructureError: the object's store does not respond.
    """
    try:
        return check_external(place_of(asset), asset.digest)
    except PosttrainError as error:
        raise _told(asset, error) from error


def _told(asset: Asset, error: PosttrainError) -> PosttrainError:
    """Return the error with the affected version and the remedy."""
    version = f" --version {asset.meta[VERSION]}" if asset.meta.get(VERSION) else ""
    again = f"posttrain asset add {asset.kind}:{asset.name} --external {asset.meta[URI]}{version}"
    if isinstance(error, ChangedError):
        way = f"restore it, or register the current bytes: {again} --checksum {error.found}"
        return IntegrityError(f"{asset.ref}: {error}; {way}")
    if isinstance(error, NotFoundError):
        return NotFoundError(f"{asset.ref}: {error}; restore it, or register the data set from its new place")
    return type(error)(f"{asset.ref}: {error}")
