"""The options that several commands share, and how their text is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from attnlens.errors import CorpusError, UsageError

_PROMPTS = "Prompts"
_MODEL = "Model"
_CAPTURE = "Capture"
_OUTPUT = "Output"


def complete_plugins(incomplete: str) -> list[str]:
    """Offer the installed plugins, completing the last name of a comma-separated list."""
    from attnlens.plugins import discover

    done, comma, start = incomplete.rpartition(",")
    return [f"{done}{comma}{p.name}" for p in discover() if p.name.startswith(start)]


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub name or alias (gpt2-small, pythia-160m@step1000), a Hugging Face folder, or "
        "demo, the small model that comes with attnlens.",
        show_default=False,
    ),
]
Plugins = Annotated[
    str | None,
    typer.Option(
        "--plugins",
        "-p",
        metavar="A,B",
        help="Analyses to run, separated by commas; all built-in ones by default. "
        "See `attnlens plugins`.",
        autocompletion=complete_plugins,
        show_default=False,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="PLUGIN.OPTION=VALUE",
        help="Set an analysis's option, as in cp.rank=8 (repeatable). "
        "`attnlens plugins show cp` lists them.",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="Options from a file with a table for each analysis.",
        show_default=False,
    ),
]
NoPlugin = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Leave a plugin out (repeatable).", show_default=False),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="A prompt (repeatable).",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
TextFile = Annotated[
    Path | None,
    typer.Option(
        help="A UTF-8 file with a prompt on each line, or running text with --chunk.",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Chunk = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cut --text-file into prompts of this many tokens.",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:SPLIT[:COLUMN]]",
        help="A dataset of the Hugging Face hub, streamed, or a local json, csv or parquet file.",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Tokens = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.npy",
        help="Token ids, one row for each prompt, used exactly as given.",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Corpus = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A corpus that comes with attnlens: default (public-domain text) or "
        "repeated-random (random stretches said twice, for induction).",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Bos = Annotated[
    bool | None,
    typer.Option(
        "--bos/--no-bos",
        help="Begin each prompt with the beginning-of-text token; as the tokenizer has it by "
        "default.",
        rich_help_panel=_PROMPTS,
        show_default=False,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(min=1, help="Number of prompts.", rich_help_panel=_PROMPTS, show_default=False),
]
Length = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of each prompt.", rich_help_panel=_PROMPTS, show_default=False
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of everything random.")]
Twins = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Models with fresh random weights that tell what the numbers are by chance; three "
        "by default, one of a large model.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="0,2-5",
        help="Capture these layers alone.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
Heads = Annotated[
    str | None,
    typer.Option(
        metavar="0,2-5",
        help="Capture these heads alone.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        metavar="last|0,2-5",
        help="Capture these positions alone.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Prompts in one forward pass; fitted to the memory by default.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
Lean = Annotated[
    bool | None,
    typer.Option(
        "--lean/--no-lean",
        help="Run the model without attention matrices, as long prompts need, or refuse a model "
        "that cannot; by default from 1,024 tokens on, where everything can be had without.",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
StoreDtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--store-dtype",
        metavar="ACTIVATION=DTYPE",
        help="How an activation is stored: float16 or float32 (repeatable).",
        rich_help_panel=_CAPTURE,
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, mps; the best there is by default.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="float32 (default), float16 or bfloat16: how the model computes.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="Spread the model over devices, as Hugging Face does: auto, balanced.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
VerifyDevice = Annotated[
    bool,
    typer.Option(
        "--verify-device",
        help="Compare a short forward pass with the CPU's first, and warn loudly if it differs.",
        rich_help_panel=_MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        help="Branch, tag or commit of the model; the same as MODEL@REVISION.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code that comes with the model. Only for models that you trust.",
        rich_help_panel=_MODEL,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace what lies in --out.", rich_help_panel=_OUTPUT),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Finish what was interrupted in --out.", rich_help_panel=_OUTPUT),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print the plan and stop.", rich_help_panel=_OUTPUT),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the result alone.", rich_help_panel=_OUTPUT)
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print more.", rich_help_panel=_OUTPUT)
]
Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=_OUTPUT),
]


#: Arguments that need no reading.
_PASSED_ON = (
    "seed", "device", "dtype", "device_map", "revision", "trust_remote_code", "verify_device",
    "twins", "batch_size",
)  # fmt: skip


def names(text: str | None) -> list[str] | None:
    """Read a comma-separated list."""
    if text is None:
        return None
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise UsageError("--plugins names no analysis.", hint="For example --plugins cp,spectrum.")
    return found


def numbers(text: str | None, option: str) -> list[int] | None:
    """Read ``0,2-5``."""
    if text is None:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            found += range(int(first), int(last or first) + 1) if dash else [int(first)]
        except ValueError:
            raise UsageError(
                f"{option}: {part.strip()!r} is no number or range.", hint="For example 0,2-5."
            ) from None
    if not found:
        raise UsageError(f"{option}: {text!r} selects nothing.", hint="For example 0,2-5.")
    return sorted(set(found))


def positions(text: str | None) -> str | list[int] | None:
    """Read ``last`` or ``0,2-5``."""
    return text if text in (None, "last") else numbers(text, "--positions")


def dtypes(items: list[str] | None) -> dict[str, str]:
    """Read ``ACTIVATION=DTYPE`` items."""
    found = {}
    for item in items or ():
        name, equals, dtype = item.partition("=")
        if not equals or dtype not in ("float16", "float32"):
            raise UsageError(
                f"--store-dtype {item!r} is not of the form ACTIVATION=float16 or float32."
            )
        found[name] = dtype
    return found


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the options that `run` and `capture` share, from the command's arguments."""
    found = {name: given[name] for name in _PASSED_ON}
    return found | {
        "options": plugin_options(given["option"], given["config"]),
        "disabled": given["no_plugin"] or (),
        "corpus": corpus(given),
        "layers": numbers(given["layers"], "--layers"),
        "heads": numbers(given["heads"], "--heads"),
        "positions": positions(given["positions"]),
        "dtypes": dtypes(given["store_dtype"]),
        "lean": "auto" if given.get("lean") is None else given["lean"],
    }


def corpus(given: Mapping[str, Any]) -> Any:
    """Turn the prompt options into a corpus, refusing two sources at once."""
    from attnlens.corpora import CorpusSpec

    sources = ("corpus", "text", "text_file", "dataset", "tokens")
    named = [f"--{s.replace('_', '-')}" for s in sources if given[s]]
    if len(named) > 1:
        raise CorpusError(f"{' and '.join(named)} cannot be combined.", hint="Choose one.")
    if given["chunk"] is not None and given["text_file"] is None:
        raise CorpusError("--chunk cuts a --text-file, and none was given.")
    for option in ("text_file", "tokens"):
        # Told now rather than after the model has loaded.
        if given[option] is not None and not given[option].is_file():
            raise CorpusError(
                f"--{option.replace('_', '-')}: there is no file {str(given[option])!r}.",
                hint="Check the path.",
            )
    common = {name: given[name] for name in ("samples", "length", "seed", "bos")}
    if given["text"]:
        return CorpusSpec(name="text", texts=tuple(given["text"]), **common)
    if given["text_file"]:
        source = str(given["text_file"])
        return CorpusSpec(name="file", source=source, chunk=given["chunk"], **common)
    if given["dataset"]:
        return CorpusSpec(name="dataset", source=given["dataset"], **common)
    if given["tokens"]:
        return CorpusSpec(name="tokens", source=str(given["tokens"]), **common)
    return CorpusSpec(name=given["corpus"] or "default", **common)


def plugin_options(assignments: list[str] | None, config: Path | None) -> dict[str, dict[str, Any]]:
    """Merge the options of the configuration file and of the command line, which wins."""
    from attnlens.selection import read_assignments, read_config

    merged = read_config(config) if config else {}
    for plugin, given in read_assignments(assignments or ()).items():
        merged.setdefault(plugin, {}).update(given)
    return merged
