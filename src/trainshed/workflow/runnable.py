"""Whether a recipe can run on a cluster: the one check that every command makes before any work is done.

`run`, `train`, `verify`, `render`, `submit` and the worker call `check_runnable`, so that what one of them refuses all
refuse, in the same words. It needs neither torch nor the network. `check_model` and `check_layout` say what only the
architecture or the layout can tell; the planner's rules (`plan/legality`) and the adapters of foreign engines
(`engines/*`), which every job goes through as well, say the rest. `tests/workflow/test_every_key.py` walks all keys of
a recipe and finds each honoured or refused.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from trainshed.data.chat.template import catalog_names
from trainshed.data.recipe_keys import flags_to_recipe_keys
from trainshed.data.text.formats import refused_file
from trainshed.data.text.splits import parse_split
from trainshed.engines.megatron.layout_args import uses_fsdp
from trainshed.errors import InputError, MissingExtra, RecipeError
from trainshed.launch.job import JobFile
from trainshed.models.export_support import check_float8, gguf_architecture
from trainshed.models.parameter_groups import group_problems
from trainshed.models.parameters import all_projections, lora_parameters, parameters
from trainshed.plan import RankLayout
from trainshed.recipe import Cluster, Layout, ModelConfig, Recipe
from trainshed.recipe.cluster import check_cluster
from trainshed.recipe.evaluation import VALIDATION, load_questions
from trainshed.recipe.load import to_plain
from trainshed.recipe.notify import WebhookSecret
from trainshed.recipe.registered import registered_class
from trainshed.recipe.secret_detection import find_secret, secret_arguments, secret_texts
from trainshed.recipe.section import Problem
from trainshed.recipe.train import NF4_BLOCK
from trainshed.recipe.validation import recipe_error
from trainshed.recipe.yaml_io import KeyPath
from trainshed.redaction import shown_address
from trainshed.storage import parse
from trainshed.storage.hub_upload import hub_token


def check_runnable(recipe: Recipe, cluster: Cluster) -> None:
    """Raise one error with everything that the recipe asks for and its engine or this cluster cannot do."""
    check_cluster(cluster)
    problems = [
        *_engine_problems(recipe),
        *_staging_problems(recipe, cluster),
        *_text_problems(recipe),
        *_preference_problems(recipe),
        *_plugin_problems(recipe),
        *_target_problems(recipe, cluster),
        *_file_problems(recipe),
        *_address_problems(recipe, cluster),
        *_secret_problems(recipe),
        *_tracker_problems(recipe, cluster),
        *_notify_problems(recipe, cluster),
        *_evaluation_problems(recipe, cluster),
    ]
    if problems:
        raise recipe_error(problems, recipe.places)
    check_notify_secrets(cluster)
    if cluster.target == "local":
        check_store(recipe, cluster)


def check_store(recipe: Recipe, cluster: Cluster) -> None:
    """Refuse a store that is not a folder of this machine."""
    root = parse(recipe.store or cluster.store_root)
    if root.scheme != "file":
        raise InputError(
            f"{root}: a run keeps its store on a local or mounted disk for now",
            where=recipe.where("store") if recipe.store else cluster.where("store"),
            hint="write a path; `checkpoint.to` may be a bucket, and `trainshed data prepare --output s3://…` writes "
            "tokens to one",
        )


def check_model(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse what only the architecture can tell: parameter groups without a tensor, formats that cannot hold it."""
    _check_groups(recipe, config)
    _check_export_format(recipe, config)


def check_layout(recipe: Recipe, config: ModelConfig, layout: RankLayout) -> None:
    """Refuse what only the layout can tell; whether it is legal at all is a rule of `plan/legality`."""
    _check_ranks(recipe, layout.world_size)
    _check_loss(recipe, layout)
    _check_adapters(recipe, config, layout)
    if problems := list(_overlap_problems(recipe, layout)):
        raise recipe_error(problems, recipe.places)
    _check_foreign_export(recipe, layout)


def _check_ranks(recipe: Recipe, world_size: int) -> None:
    """Refuse keys that name ranks which a layout does not have."""
    profile = recipe.observe.profile
    if profile is not None and max(profile.ranks) >= world_size:
        raise RecipeError(
            f"there is no rank {max(profile.ranks)}: the layout has {world_size}, counted from 0",
            where=recipe.where("observe.profile.ranks"),
            hint="write ranks below it",
        )


def _check_loss(recipe: Recipe, layout: RankLayout) -> None:
    """Refuse a layout that the loss of a plugin cannot be computed on."""
    loss = recipe.train.loss
    rule = registered_class("loss", loss.name if loss is not None else None)
    if rule is not None and layout.tp > 1 and not rule.vocabulary_parallel:
        assert loss is not None
        raise RecipeError(
            f"the loss {loss.name} needs whole rows of logits, and tp: {layout.tp} shares the vocabulary out",
            where=recipe.where("train.loss"),
            hint="write `layout.tp: 1`, or compute it by the methods of VocabularyLogits (docs/plugins.md)",
        )


def _check_adapters(recipe: Recipe, config: ModelConfig, layout: RankLayout) -> None:
    """Refuse a layout that cuts what shares a scale in `quantize: nf4`; the rest is a rule of `plan/legality`."""
    lora = recipe.train.lora
    if lora is None or lora.quantize != "nf4" or recipe.engine.name != "torch":
        return
    columns = [adapted.inputs for adapted in all_projections(config, 0) if adapted.row_parallel]
    if any(width % (NF4_BLOCK * layout.tp) for width in columns):
        raise RecipeError(
            f"tp: {layout.tp} cuts blocks of {NF4_BLOCK} columns, which share a scale in nf4: "
            f"{' and '.join(str(width) for width in sorted(set(columns)))} columns are cut over tp",
            where=recipe.where("layout.tp"),
            hint="write a smaller tp, or `quantize: int8`",
        )


def _check_groups(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse patterns of `train.optimizer.groups` that name no trained tensor of the model."""
    groups, lora = recipe.train.optimizer.groups, recipe.train.lora
    if not groups or recipe.engine.name != "torch":
        return
    trained = list(parameters(config) if lora is None else lora_parameters(config, lora))
    buffers = [parameter.name for parameter in trained if parameter.buffer]
    names = [parameter.name for parameter in trained if not parameter.buffer]
    problems = [
        Problem(("train", "optimizer", "groups", *problem.path), problem.what, problem.hint)
        for problem in group_problems(groups, names, buffers)
    ]
    if problems:
        raise recipe_error(problems, recipe.places)


def _check_foreign_export(recipe: Recipe, layout: RankLayout) -> None:
    """Refuse an export that would fail when the GPUs are done: of checkpoints that are not read here."""
    if recipe.export is None:
        return
    lora = recipe.train.lora
    if recipe.engine.name == "torchtune" and lora is not None and lora.dora:
        raise RecipeError(
            "torchtune saves the magnitudes of DoRA in its own order of heads, and does not say that they are there",
            where=recipe.where("train.lora.dora"),
            hint="delete `export`, or write `engine: torch`",
        )
    if recipe.engine.name == "nemo":
        raise RecipeError(
            f"checkpoints of {recipe.engine.name} are not converted here",
            where=recipe.where("export"),
            hint="delete it, or write `engine: torch`, `megatron` or `torchtune`",
        )
    if recipe.engine.name == "megatron" and uses_fsdp(layout):
        raise RecipeError(
            f"checkpoints of Megatron's FSDP (shard: {layout.shard}) are not converted here",
            where=recipe.where("export"),
            hint="write `layout.shard: zero1`, or delete `export`",
        )


def check_publishing(recipe: Recipe, cluster: Cluster) -> None:
    """Refuse an export to the Hub that the jobs of a cluster have no token for."""
    if recipe.publishes and "HF_TOKEN" not in cluster.secrets:
        raise RecipeError(
            f"the jobs of {cluster.name} have no token to publish with",
            where=recipe.where("export.to"),
            hint="write `HF_TOKEN: {env: HF_TOKEN}` below `secrets` in the cluster file",
        )


def _check_export_format(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse a model that cannot be exported as the recipe asks, before it is trained."""
    export = recipe.export
    if export is None:
        return
    try:
        if export.format == "gguf":
            gguf_architecture(config)
        elif export.dtype == "fp8":
            check_float8(config)
    except InputError as error:
        raise RecipeError(error.what, where=recipe.where(f"export.{error.where}"), hint=error.hint) from None


def check_export_installed(recipe: Recipe) -> None:
    """Refuse an export that this machine lacks a package for, or a place it cannot write to, before it is trained."""
    targets = {"checkpoint.to": recipe.checkpoint.to, "export.to": recipe.export.to if recipe.export else None}
    for key, address in targets.items():
        if address is not None and "://" not in address and (why := _unwritable(Path(address))) is not None:
            raise RecipeError(why, where=recipe.where(key), hint="write another path, or check who may write there")
    if recipe.export is not None and recipe.export.format == "gguf" and find_spec("gguf") is None:
        raise MissingExtra.named("gguf", "`export.format: gguf`")
    if recipe.publishes:
        hub_token()


def _unwritable(path: Path) -> str | None:
    """Say why nothing can be written to a folder that may not be there yet; None if nothing prevents it."""
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written to"


def check_plugins(recipe: Recipe, job: JobFile) -> None:
    """Raise where a node finds other plugins than those that the job was written with."""
    for source in recipe.plugin_sources:
        if job.plugins.get(source.name, source.sha256) != source.sha256:
            raise RecipeError(
                f"the plugin `{source.name}` is another one on this node ({source.place}) than where the job was "
                "written",
                where=recipe.where("plugins"),
                hint="submit it again; an installed module of the same name must be the same everywhere",
            )


def check_engine(recipe: Recipe) -> None:
    """Raise an error that names everything in a recipe which our own engine cannot do on any cluster."""
    problems = [*_foreign_problems(recipe), *_engine_problems(recipe), *_preference_problems(recipe)]
    if problems:
        raise recipe_error(problems, recipe.places)


def _foreign_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.engine.name != "torch":
        yield Problem(
            ("engine",),
            f"the engine {recipe.engine.name} is not ours, and runs in its own image on a cluster",
            "`trainshed submit RECIPE --on CLUSTER` sends it there; write `engine: torch` to train here",
        )


def _overlap_problems(recipe: Recipe, layout: Layout | RankLayout) -> Iterator[Problem]:
    if layout.overlap == "tp" and recipe.train.precision == "fp8":
        yield Problem(
            ("layout", "overlap"),
            "products in fp8 are not cut into parts that hide the communication of tp",
            "write `precision: bf16`, or delete `overlap`",
        )


def _engine_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what our own engine does not do on any target; each adapter does the same for its engine."""
    if recipe.engine.name != "torch":
        return
    train = recipe.train
    if not isinstance(recipe.layout, str):
        yield from _overlap_problems(recipe, recipe.layout)
    if train.lora is not None and train.lora.quantize is not None and train.precision == "fp8":
        yield Problem(
            ("train", "lora", "quantize"),
            f"weights that are held as {train.lora.quantize} are multiplied in bf16, not in fp8",
            "write `precision: bf16`, or delete `quantize`: fp8 products take whole weights",
        )
    if recipe.data.stage != "direct" and recipe.data.synthetic:
        yield Problem(
            ("data", "stage"),
            "synthetic tokens are made by the ranks: there is nothing to copy",
            "write `stage: direct`",
        )


def _staging_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield why tokens cannot be copied to the nodes; adapters of engines that cannot have it refuse it themselves."""
    path = ("data", "stage")
    if recipe.data.stage != "nvme" or recipe.data.synthetic or recipe.engine.name not in ("torch", "nemo"):
        return
    if cluster.node_disk is None:
        hosts = [volume.mount for volume in cluster.volumes if volume.host is not None]
        what = f"{cluster.name} names no disk of its nodes"
        if hosts:
            what = f"{cluster.name} has no single writable volume of its nodes ({', '.join(hosts)})"
        yield Problem(path, what, "write `local_disk: /ssd` in the cluster file, the folder as jobs see it")
    elif cluster.target == "kubernetes":
        disk = posixpath.normpath(cluster.node_disk)
        mounts = [posixpath.normpath(volume.mount) for volume in cluster.volumes if volume.host is not None]
        if not any(disk == mount or disk.startswith(f"{mount}/") for mount in mounts):
            yield Problem(
                path,
                f"`local_disk: {cluster.node_disk}` is in no volume of the nodes, and a pod's own disk is small",
                "add `volumes: [{mount: /ssd, host: /mnt/disks/ssd}]` to the cluster file, and name its mount",
            )


def _text_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield splits and chat templates that nobody could read."""
    for path, source in recipe.sources():
        try:
            parse_split(source.split or "train")
        except InputError as error:
            yield Problem((*path, "split"), error.what, error.hint)
    template = recipe.data.template
    if template is not None and not template.endswith(".jinja") and template not in catalog_names():
        known = ", ".join(catalog_names())
        yield Problem(
            ("data", "template"), f"there is no chat template `{template}`", f"write {known}, or a .jinja file"
        )


def _preference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield what cannot be had together with `mode: dpo`."""
    train = recipe.train
    if train.mode != "dpo":
        return
    if recipe.engine.name != "torch":
        yield Problem(("train", "mode"), f"{recipe.engine.name} is not rendered for `mode: dpo`", "engine: torch")
    if train.loss is not None:
        yield Problem(("train", "loss"), "`mode: dpo` compares answers, and has no other loss", "delete it")
    if train.z_loss:
        yield Problem(("train", "z_loss"), "the loss of `mode: dpo` has no z-loss", "delete it")


_FOREIGN_KINDS = ("text format", "serving engine")
"""Kinds of registered classes that work beside a foreign engine: our own stages use them."""


def _plugin_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield classes of plugins that a foreign engine cannot use, since it trains by its own code."""
    if recipe.engine.name == "torch":
        return
    for path, kind, name in recipe.registered_names():
        own = registered_class(kind, name) is not None
        if own and (kind not in _FOREIGN_KINDS or (kind == "text format" and recipe.engine.name == "torchtune")):
            yield Problem(
                path, f"`{name}` is the {kind} of a plugin, which {recipe.engine.name} does not know", "engine: torch"
            )


def _target_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield what the cluster's target cannot do for this recipe."""
    if cluster.target == "local":
        yield from _foreign_problems(recipe)
        if (recipe.resources.nodes or 1) > 1:
            yield Problem(
                ("resources", "nodes"),
                f"this machine is one node, and the recipe asks for {recipe.resources.nodes}",
                "add resources.nodes=null to the command to train here, or --on CLUSTER to train there",
            )
    if recipe.plugins and "plugins" in cluster.locked:
        yield Problem(("plugins",), "`plugins` is locked by whoever runs this cluster", "delete it")
    if recipe.engine.image is not None and "image" in cluster.locked:
        yield Problem(("engine", "image"), "`image` is locked by whoever runs this cluster", "delete it")
    elif recipe.engine.image is not None and (why := _no_image(cluster)) is not None:
        yield Problem(("engine", "image"), f"is not read: {why}", "delete it")
    if recipe.elastic is not None and (why := _not_elastic(recipe, cluster)) is not None:
        yield Problem(("elastic",), why, "delete it: a lost node ends the attempt, and the run goes on with another")


def _no_image(cluster: Cluster) -> str | None:
    if cluster.target == "local":
        return "ranks run in this machine's own environment"
    if cluster.target == "ray":
        return "the nodes of a running Ray cluster have their image already"
    if (target := registered_class("target", cluster.target)) is not None and "image" not in target.reads:
        return f"the target {cluster.target} chooses no image"
    if cluster.target == "slurm" and cluster.on_slurm.container == "none":
        return f"{cluster.name} has no containers (slurm.container)"
    return None


def _not_elastic(recipe: Recipe, cluster: Cluster) -> str | None:
    """Say why a run cannot go on with other or fewer nodes there; None where its agents see to it."""
    if recipe.engine.name != "torch":
        return f"{recipe.engine.name} is started with a fixed number of nodes, and knows no spare ones"
    if cluster.target == "local":
        return "this machine is one node: none can be lost or stand in"
    if registered_class("target", cluster.target) is not None:
        return f"the target {cluster.target} starts a job with a fixed number of nodes"
    return None


def _file_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield files of text that no stage could read, by their names."""
    for path, source in recipe.sources():
        for address in source.path or ():
            if source.format is None and (refused := refused_file(address)) is not None:
                what, hint = refused
                yield Problem((*path, "path"), f"`{shown_address(address)}`: {what}", flags_to_recipe_keys(hint))


def _address_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield addresses that mean something else, or nothing, on the nodes of another machine."""
    if cluster.target == "local":
        return
    for path, address, written in _addresses(recipe):
        if "://" in address:
            continue
        if not address.startswith("/"):
            yield Problem(
                path,
                f"`{address}` is relative to this machine's folder, which the cluster's nodes do not have",
                "write an absolute path that they mount, or an address in a store (s3://, gs://, az://, hf://)",
            )
        elif (mounts := _mounts(cluster, recipe, writable=written)) is not None and not _on_one(address, mounts):
            what = "no volume that jobs may write to" if written else "no volume that jobs mount"
            there = ", ".join(mounts) or "none"
            yield Problem(
                path,
                f"{address} lies on {what} ({there})",
                f"write a path on one of them, or add it to `volumes` of {cluster.where('volumes')}",
            )


def _addresses(recipe: Recipe) -> Iterator[tuple[KeyPath, str, bool]]:
    """Yield every address that nodes open, at its key, and whether they write there."""
    for path, source in recipe.sources():
        for key in ("path", "tokens"):
            yield from (((*path, key), address, False) for address in getattr(source, key) or ())
    if recipe.model.from_ is not None:
        yield ("model", "from"), recipe.model.from_, False
    if isinstance(recipe.tokenizer, str):
        yield ("tokenizer",), recipe.tokenizer, False
    if recipe.checkpoint.to is not None:
        yield ("checkpoint", "to"), recipe.checkpoint.to, True
    if recipe.export is not None and recipe.export.to is not None and not recipe.publishes:
        yield ("export", "to"), recipe.export.to, True
    mlflow = recipe.observe.mlflow
    if mlflow is not None and not mlflow.uri.startswith("databricks"):
        yield ("observe", "mlflow", "uri"), mlflow.uri.removeprefix("file://"), True
    if recipe.eval is not None:
        for number, tokens in enumerate(recipe.eval.perplexity or ()):
            if tokens != VALIDATION:
                yield ("eval", "perplexity", number), tokens, False
        if recipe.eval.include_path is not None:
            yield ("eval", "include_path"), recipe.eval.include_path, False
    adapters = recipe.serve.adapters if recipe.serve is not None else None
    yield from ((("serve", "adapters", name), address, False) for name, address in (adapters or {}).items())


def _mounts(cluster: Cluster, recipe: Recipe, *, writable: bool) -> list[str] | None:
    """Return the folders that jobs see besides their image; None where they see the node's own disks."""
    registered = registered_class("target", cluster.target) is not None
    if registered or cluster.target == "ray" or (cluster.target == "slurm" and cluster.on_slurm.container == "none"):
        return None
    volumes = [volume.mount for volume in cluster.volumes if not (writable and volume.read_only)]
    # Our scripts have Pyxis mount the store too.
    store = [recipe.store or cluster.store or ""] if cluster.target == "slurm" else []
    return [posixpath.normpath(mount) for mount in (*store, *volumes) if mount]


def _on_one(path: str, mounts: list[str]) -> bool:
    return any(is_inside(posixpath.normpath(path), mount) for mount in mounts)


def _secret_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield texts that hold a secret: they would be written into scripts, manifests and the run."""
    arguments = [(("engine", "args", name), name, value) for name, value in recipe.engine.args.items()]
    if recipe.serve is not None:
        arguments += [(("serve", "args", name), name, value) for name, value in recipe.serve.args.items()]
    for path, name, value in arguments:
        texts = value if isinstance(value, list) else [value]
        what = next((what for text in texts if isinstance(text, str) and (what := find_secret(name, text))), None)
        if what is not None:
            how = "write `serve: {api_key: NAME}`, and" if path[0] == "serve" else "delete it here, and write"
            hint = f"{how} `NAME: {{env: NAME}}` (or file, k8s) below `secrets` of the cluster file"
            yield Problem(path, f"holds {what}, which would stand in scripts and manifests in clear", hint)
    named = {path for path, _, _ in arguments}
    shaped = {path: what for path, what in secret_texts(to_plain(recipe, defaults=False)) if path[:3] not in named}
    for path, words in _programs(recipe):
        shaped |= {(*path, number): what for number, what in secret_arguments(words)}
    for path, what in shaped.items():
        yield Problem(
            path,
            f"holds {what}, and a recipe is kept with every run",
            "delete it: programs read it from their environment (`NAME: {env: NAME}` below `secrets` of the cluster "
            "file; on this machine export it), and a webhook is `{secret: NAME}`",
        )


def _programs(recipe: Recipe) -> Iterator[tuple[KeyPath, Sequence[str]]]:
    """Yield the words of every program that a recipe starts, with the key they stand at."""
    yield from (((*path, "args"), source.args) for path, source in recipe.sources() if source.args)
    yield from (
        (("notify", number, "command"), entry.command)
        for number, entry in enumerate(recipe.notify or ())
        if entry.command
    )


def _tracker_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield tools that figures cannot be sent to from there: by a foreign engine, or without what lets one in."""
    observe = recipe.observe
    if recipe.engine.name != "torch":
        return  # `unhonoured_problems` of the adapters
    if observe.wandb is not None and observe.wandb.mode == "online":
        yield from _missing_secret(("observe", "wandb", "mode"), "WANDB_API_KEY", cluster, _is_logged_in("wandb"))
    if observe.trackio is not None and observe.trackio.space is not None:
        yield from _missing_secret(("observe", "trackio", "space"), "HF_TOKEN", cluster, _is_logged_in("trackio"))
    if cluster.target == "local":
        return
    if observe.trackio is not None and observe.trackio.space is None:
        yield Problem(
            ("observe", "trackio", "space"),
            "is missing: what trackio keeps on a node's own disk is gone when the job has ended",
            "write `space: USER/NAME`; or delete it, and later `trainshed export-figures RUN --to trackio`",
        )


def _is_logged_in(tool: str) -> bool:
    """Whether the tool's own login on this machine lets it in."""
    if tool == "trackio":
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
        return (home / "token").is_file()
    netrc = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


def _missing_secret(path: KeyPath, variable: str, cluster: Cluster, logged_in: bool = False) -> Iterator[Problem]:
    """Yield that a secret does not reach the processes that need it."""
    if cluster.target == "local":
        if not logged_in and not os.environ.get(variable):
            yield Problem(path, f"needs {variable}, and this environment has none", f"export {variable}=…")
    elif variable not in cluster.secrets:
        how = "{k8s: NAME/KEY}" if cluster.target == "kubernetes" else f"{{env: {variable}}}"
        yield Problem(
            path,
            f"needs the secret {variable}, and the cluster {cluster.name} has none of that name",
            f"write `{variable}: {how}` below `secrets` of {cluster.where('secrets')}",
        )


def _notify_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield why the recipients of `notify` would get no message."""
    if recipe.notify and recipe.engine.name != "torch":
        yield Problem(
            ("notify",),
            f"messages are sent by the agent on the first node, and {recipe.engine.name} runs without it",
            "delete it; Slurm's own mails are `options: [--mail-type=END]` below `slurm` of the cluster file",
        )
        return
    for number, entry in enumerate(recipe.notify or ()):
        if isinstance(entry.webhook, WebhookSecret):
            yield from _missing_secret(("notify", number, "webhook", "secret"), entry.webhook.secret, cluster)


def _evaluation_problems(recipe: Recipe, cluster: Cluster) -> Iterator[Problem]:
    """Yield what `eval` asks for and the target cannot do, or what is not there to ask."""
    section = recipe.eval
    if section is None:
        return
    if section.questions is not None:
        try:
            load_questions(recipe.folder / section.questions)
        except InputError as error:
            yield Problem(("eval", "questions"), f"{error.where}: {error.what}", error.hint or "write the file")
    if cluster.target == "local":
        if section.every is not None and recipe.checkpoint.to is not None:
            yield Problem(
                ("eval", "every"),
                "checkpoints in a bucket cannot be held while they are evaluated beside the training",
                "delete `checkpoint.to`, or `eval.every`: the last checkpoint is evaluated in any case",
            )
        return
    if section.every is not None and recipe.checkpoint.keep is not None:
        yield Problem(
            ("eval", "every"),
            f"on {cluster.name} checkpoints are evaluated after training, and `checkpoint.keep: "
            f"{recipe.checkpoint.keep}` has removed most of them by then",
            "write `checkpoint.keep: null`, or delete `eval.every`",
        )
    if section.gpus and cluster.target != "slurm":
        yield Problem(
            ("eval", "gpus"),
            f"a stage with GPUs is started as a training on {cluster.target}",
            "write `gpus: 0`, or serve the export and ask the server: `trainshed eval RUN --url http://…`",
        )
    elif section.gpus and cluster.gpu_machine is None:
        yield Problem(("eval", "gpus"), f"the nodes of {cluster.name} have no GPUs (machine: cpu)", "write `gpus: 0`")


def check_notify_secrets(cluster: Cluster) -> None:
    """Refuse webhooks of a cluster file whose secret nothing brings to its jobs."""
    problems = [
        problem
        for number, entry in enumerate(cluster.notify or ())
        if isinstance(entry.webhook, WebhookSecret)
        for problem in _missing_secret(("notify", number, "webhook", "secret"), entry.webhook.secret, cluster)
    ]
    if problems:
        raise recipe_error(problems, cluster.places)


def is_inside(path: str, mount: str) -> bool:
    """Whether a path is a folder or inside it."""
    return path == mount or path.startswith(mount.rstrip("/") + "/")


def shared_store(cluster: Cluster, recipe: Recipe | None = None) -> str:
    """Return the root of artefacts and runs as nodes see it: a path that every node mounts."""
    own = recipe.store if recipe is not None else None
    where = recipe.where("store") if recipe is not None and own else cluster.where("store")
    root = own or cluster.store
    if own and "store" in cluster.locked:
        raise RecipeError("`store` is locked by whoever runs this cluster", where=where, hint="delete it")
    if root is None:
        raise RecipeError(
            f"where do the jobs of {cluster.name} keep artefacts and runs?",
            where=where,
            hint="write `store: /data`, a path that every node mounts",
        )
    if "://" in root or not root.startswith("/"):
        raise RecipeError(
            f"{root} is not a path that every node mounts",
            where=where,
            hint="write an absolute path on a shared disk or volume; `checkpoint.to` may be a bucket",
        )
    root = posixpath.normpath(root)
    mounts = [posixpath.normpath(volume.mount) for volume in cluster.volumes if not volume.read_only]
    if cluster.target == "kubernetes" and not _on_one(root, mounts):
        raise RecipeError(
            f"{root} lies on no volume that pods mount, so that it would be gone with them",
            where=where,
            hint=f"write `volumes: [{{mount: {root}, pvc: NAME}}]`",
        )
    return root
