"""The command line. Commands import what they need when they run, so that ``--help`` is fast."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from .bench.suites import MAX_MATERIALISED, PATIENCE, SUITES
from .bench.tables import Table, open_console, print_table
from .errors import InputError, MtagenError, SpecError, explain
from .spec import DTYPES, KEY_PADDINGS, MASKS, Spec
from .version import __version__

if TYPE_CHECKING:
    from .planner import Backend


_BROKEN_PIPE = 141  # the status that shells report for a program ended by SIGPIPE


class _Group(TyperGroup):
    """Turn errors that a user can correct into one line and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader stopped early, as head does
            os.dup2(
                os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
            )  # so that flushing the buffer raises no second error
            raise typer.Exit(_BROKEN_PIPE) from None
        except (MtagenError, OSError) as error:
            typer.echo(f"mtagen: {error}", err=True)
            raise typer.Exit(2 if isinstance(error, MtagenError) else 1) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mtagen {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Plan, emit and check kernels for multi-token (convolutional) attention."""


def _spec(
    kernel: Annotated[
        str,
        typer.Option(
            help="Queries and keys of the filter before the softmax, such as 6,11; none: no convolution.",
            metavar="CQ,CK|none",
        ),
    ],
    head_dim: Annotated[int, typer.Option(help="Elements of a query or key vector: a multiple of 8 from 16 to 256.")],
    value_head_dim: Annotated[
        int | None, typer.Option(help="Elements of a value vector.", show_default="--head-dim")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--non-causal", help="Hide keys after the query, or show all keys.")
    ] = True,
    key_padding: Annotated[
        str, typer.Option(help="Sides on which the convolution pads the key axis.", metavar="|".join(KEY_PADDINGS))
    ] = "both",
    mask: Annotated[
        str,
        typer.Option(
            help="Query whose mask decides which scores the convolution counts as zero: "
            "the score's own (source) or the output's (output).",
            metavar="|".join(MASKS),
        ),
    ] = "source",
    dtype: Annotated[
        str, typer.Option(help="Data type of queries, keys and values.", metavar="|".join(DTYPES))
    ] = "bf16",
    mixed_heads: Annotated[
        int | None,
        typer.Option(help="Size of the groups of heads that are mixed before the softmax.", show_default="no mixing"),
    ] = None,
    post_kernel: Annotated[
        str,
        typer.Option(
            help="Queries and keys of the filter after the softmax; none: no convolution.", metavar="CQ,CK|none"
        ),
    ] = "none",
    post_mixed_heads: Annotated[
        int | None,
        typer.Option(help="Size of the groups of heads that are mixed after the softmax.", show_default="no mixing"),
    ] = None,
    dynamic_ranks: Annotated[
        tuple[int, int] | None,
        typer.Option(
            help="Ranks of the matrices that each query and each key add to the mixing before the softmax.",
            metavar="RANK_Q RANK_K",
            show_default="no such matrices",
        ),
    ] = None,
    post_dynamic_ranks: Annotated[
        tuple[int, int] | None,
        typer.Option(
            help="The same for the mixing after the softmax.",
            metavar="RANK_Q RANK_K",
            show_default="no such matrices",
        ),
    ] = None,
    window: Annotated[
        tuple[int, int],
        typer.Option(
            help="Number of keys that a query sees before and after its own position; -1: all.", metavar="LEFT RIGHT"
        ),
    ] = (-1, -1),
    scores: Annotated[
        str | None,
        typer.Option(
            help="What the first convolution takes, an expression in the score s, such as '50 * tanh(s / 50)'.",
            metavar="EXPRESSION",
            show_default="s",
        ),
    ] = None,
    convolved: Annotated[
        str | None,
        typer.Option(
            help="What is mixed over heads before the softmax, an expression in the score s.",
            metavar="EXPRESSION",
            show_default="s",
        ),
    ] = None,
    logits: Annotated[
        str | None,
        typer.Option(
            help="What the softmax takes, an expression in the score s.", metavar="EXPRESSION", show_default="s"
        ),
    ] = None,
    visible: Annotated[
        str | None,
        typer.Option(
            help="Which keys j a query at position i sees, besides the window, such as 'i // 64 == j // 64'.",
            metavar="CONDITION",
            show_default="all",
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            help="A tensor that expressions read, and its axes, such as slopes=h or table=h,65; may be repeated.",
            metavar="NAME=AXES",
            show_default="none",
        ),
    ] = None,
    constant: Annotated[
        list[str] | None,
        typer.Option(help="A parameter that needs no gradient; may be repeated.", metavar="NAME", show_default="none"),
    ] = None,
    sink: Annotated[
        bool, typer.Option("--sink/--no-sink", help="Add a logit without a value to each row's softmax.")
    ] = False,
    packed: Annotated[
        bool,
        typer.Option("--packed/--batched", help="Plan for packed documents, or for batches of equal lengths."),
    ] = False,
    dropout: Annotated[
        bool, typer.Option("--dropout/--no-dropout", help="Include dropout of attention probabilities.")
    ] = False,
    page_size: Annotated[
        int | None,
        typer.Option(help="Tokens of a page, to plan decode steps or packed chunks on pages.", show_default="none"),
    ] = None,
) -> Spec:
    options: dict[str, Any] = {**locals()}  # only the options are local so far
    given_parameters, constants = options.pop("parameter") or (), options.pop("constant") or ()
    if unnamed := [given for given in given_parameters if "=" not in given]:
        raise SpecError(explain("parameter", unnamed[0], "must be a name and axes", "NAME=AXES, such as table=h,65"))
    named = [given.partition("=")[::2] for given in given_parameters]
    extents = {name: _extents(name, options[name]) for name in ("kernel", "post_kernel")}
    return Spec(**options | extents | {"parameters": tuple(named), "constants": tuple(constants)})


def _extents(name: str, kernel: str) -> tuple[int, int] | None:
    if kernel == "none":
        return None
    try:
        cq, ck = map(int, kernel.split(","))
    except ValueError:
        raise SpecError(explain(name, kernel, "must be two integers", "CQ,CK, such as 6,11, or none")) from None
    return cq, ck


def _takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter ``spec`` of a command by the options of :func:`_spec`."""
    spec = inspect.signature(_spec, eval_str=True).parameters
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for name, parameter in signature.parameters.items() if name != "spec"]

    @wraps(command)
    def wrapper(**options: Any) -> None:
        command(spec=_spec(**{name: options.pop(name) for name in spec}), **options)

    wrapper.__signature__ = signature.replace(parameters=[*spec.values(), *own])  # type: ignore[attr-defined]
    return wrapper


_BACKENDS = "cuda|triton|torch|auto"
_Target = Annotated[str, typer.Option(help="GPU architecture to plan for, such as sm_90a.", metavar="NAME")]
_Backend = Annotated[
    str, typer.Option(help="Kernels to use; auto chooses the fastest for each pass.", metavar=_BACKENDS)
]
_Device = Annotated[
    str | None,
    typer.Option(help="Device to run on: cpu, cuda or cuda:N.", show_default="a GPU if there is one, else cpu"),
]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command()
@_takes_spec
def emit(
    *,
    spec: Spec,
    target: _Target = "sm_90a",
    backend: _Backend = "auto",
    out: Annotated[Path, typer.Option(help="Folder to write to; created if absent.", file_okay=False)],
) -> None:
    """Write the kernels of an operator: Triton kernels as a Python module, CUDA kernels as .cu files.

    The Triton module needs only torch and triton. With the .cu files comes a Python module that compiles and launches
    their kernels. It needs only torch, cuda-core and cuda-bindings.
    """
    from . import codegen, planner

    for path in codegen.emit(planner.plan(spec, target, cast("Backend", backend)), out):
        typer.echo(path)


@app.command()
@_takes_spec
def plan(*, spec: Spec, target: _Target = "sm_90a", backend: _Backend = "auto", as_json: _Json = False) -> None:
    """Show the plan of an operator: lowering, block sizes, pipeline stages, resources and cost."""
    from . import planner

    made = planner.plan(spec, target, cast("Backend", backend))
    if as_json:
        typer.echo(made.to_json())
    else:
        _print_table((), made.table(), made.name)


@app.command("list")
def list_entries() -> None:
    """List the kernels and tuned tables in the on-disk cache."""
    from .runtime.disk_cache import Cache

    cache = Cache()
    rows = [
        (
            entry.name,
            entry.arch,
            entry.version,
            f"{entry.size / 1024:.1f} KiB",
            datetime.fromtimestamp(entry.created).isoformat(" ", "minutes"),
        )
        for entry in cache.entries()
    ]
    if rows:
        _print_table(("name", "target", "mtagen", "size", "created"), rows)
    typer.echo(f"{len(rows)} in {cache.root}")


@app.command()
def show_config() -> None:
    """Show every environment variable that mtagen reads."""
    from .config import Config

    _print_table(("variable", "value", "default", "meaning"), Config.from_env().describe())


@app.command()
def collect_env(as_json: _Json = False) -> None:
    """Show the versions and hardware of this machine for a bug report."""
    from .environment import collect

    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print_table((), ((name, str(fact)) for name, fact in facts.items()))


@app.command()
def clear_cache(yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False) -> None:
    """Remove all kernels and tuned tables from the on-disk cache."""
    from .runtime.disk_cache import Cache

    cache = Cache()
    if not yes:
        typer.confirm(f"Remove all kernels and tuned tables in {cache.root}?", abort=True)
    count, freed = cache.clear()
    typer.echo(f"removed {count} ({freed / 1024:.1f} KiB) from {cache.root}")


@app.command()
@_takes_spec
def check(
    *,
    spec: Spec,
    target: Annotated[
        str | None,
        typer.Option(
            help="GPU architecture to plan for, such as sm_90a.", metavar="NAME", show_default="this machine's GPU"
        ),
    ] = None,
    backend: _Backend = "auto",
    device: _Device = None,
    as_json: _Json = False,
) -> None:
    """Build an operator and compare it with float64: forward, gradients and decode.

    An error may be up to twice that of eager PyTorch in the same dtype; for gradients, up to three times.

    The exit status is 1 if any error is larger.
    """
    import torch

    from . import build
    from .check import check as run

    if spec.page_size:
        rule = "check calls ops on keys that lie one after another"
        raise SpecError(explain("page_size", spec.page_size, rule, "no --page-size; op.paged is tested with it"))
    device = _present(device)
    if device == "cpu" and backend != "triton":  # Triton's interpreter may run kernels for any target
        target = target or "cpu"
    op = build(**spec.to_dict(), backend=cast("Backend", backend), target=target)
    rows = list(run(op, spec, torch.device(device)))
    failed = sum(not row.comparison.ok for row in rows)
    if as_json:
        facts = {"plan": op.plan.name, "backend": op.plan.backend, "device": device, "reason": op.plan.reason}
        typer.echo(json.dumps({**facts, "failed": failed, "rows": [row.to_dict() for row in rows]}, indent=1))
    else:
        typer.echo(f"{op.plan.name}, backend {op.plan.backend}, on {device}: {op.plan.reason}")
        typer.echo("largest absolute errors against float64:")
        _print_table(
            ("B H/Hkv Nq,Nk", "result", "of the op", "of eager", "allowed", "verdict"),
            (
                (
                    f"{sizes.batch} {sizes.heads}/{sizes.kv_heads} {sizes.nq},{sizes.nk}",
                    result,
                    *(f"{x:.1e}" for x in (judged.error, judged.eager_error, judged.allowed)),
                    "ok" if judged.ok else "FAILED",
                )
                for sizes, result, judged in rows
            ),
        )
        typer.echo(f"{failed} of {len(rows)} failed" if failed else f"all {len(rows)} within the rule")
    if failed:
        raise typer.Exit(1)


@app.command()
def bench(
    *,
    suite: Annotated[str, typer.Option(help="Set of cases to measure.", metavar="|".join(SUITES))] = "quick",
    kernel: Annotated[
        list[str] | None,
        typer.Option(help="Filter to measure instead of the suite's filters; repeatable.", metavar="CQ,CK"),
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Head dim to measure instead of the suite's head dims; repeatable.")
    ] = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a sequence or cache, instead of the suite's lengths; repeatable."),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="Implementation to measure, such as 'mtagen cuda' or eager; repeatable.", show_default="the suite's"
        ),
    ] = None,
    max_materialised: Annotated[
        int, typer.Option(help="Longest sequence, in tokens, for contenders that store all scores.", min=1)
    ] = MAX_MATERIALISED,
    patience: Annotated[
        float, typer.Option(help="Seconds that a call may take. A slower contender skips larger cases.", min=0)
    ] = PATIENCE,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the results to, as JSON.", metavar="FILE", dir_okay=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="File to draw the results to, .png or .svg.", metavar="FILE", dir_okay=False)
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="JSON file of an earlier run to compare with.", metavar="FILE", dir_okay=False, exists=True),
    ] = None,
    device: _Device = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Processes that compile GPU kernels.", min=1, show_default="one per core, at most 8"),
    ] = None,
) -> None:
    """Time mtagen, other implementations and plain attention at the same sizes on this machine.

    The result of each implementation (contender) is checked before it is timed. On a CPU the suites are smaller, in
    fp32, and have lengths at which eager PyTorch is faster.

    The exit status is 1 if a contender is wrong or breaks, or if --against finds a case that is more than 7 % slower.
    It is 130 if Ctrl-C ended the run; the cases measured until then are kept.
    """
    import torch

    from .bench import compare, contenders, plots, report, runs, suites
    from .bench.run import faults, run
    from .environment import collect

    where = torch.empty(0, device=_present(device)).device  # with its index
    chosen = suites.suite(
        suite, where.type, [_extents("kernel", one) for one in kernel or ()], head_dim or (), length or ()
    )
    entrants = contenders.entrants(suite, where, contender or (), max_materialised)
    _check_writable(json_file, plot)
    if plot:
        plots.check_path(plot)
    before = runs.load(against) if against else None
    if before:
        here = torch.cuda.get_device_name(where) if where.type == "cuda" else str(collect()["cpu"])
        compare.check_device(here, before)
        compare.check_shared(chosen, [entrant.name for entrant in entrants], before)
    given = {"kernel": kernel, "head-dim": head_dim, "length": length, "contender": contender}
    options = [f"--{name}={value}" for name, values in given.items() for value in values or ()]
    options += [f"--max-materialised={max_materialised}", f"--patience={patience:g}", f"--device={where}"]
    made = run(
        chosen,
        entrants,
        where,
        command=shlex.join(["mtagen", "bench", f"--suite={suite}", *options]),
        jobs=jobs or min(8, os.cpu_count() or 1),
        launches=suite == "overhead" or (suite == "serving" and where.type == "cuda"),
        patience=patience,
    )
    report.print_run(made)
    if json_file:
        json_file.write_text(json.dumps(made, indent=1) + "\n")
    for fault in faults(made):
        typer.echo(f"mtagen: {fault}", err=True)
    if made["interrupted"]:
        typer.echo(
            "mtagen: interrupted; the cases measured so far are kept, but neither plotted nor compared", err=True
        )
        raise typer.Exit(130)
    if plot:
        plots.plot_run(made, plot)
    slower = []
    if before:
        compared = compare.pairs(made, before)
        slower = compare.slower(compared)
        report.print_comparison(slower, len(compared))
    if faults(made) or slower:
        raise typer.Exit(1)


def _check_writable(*paths: Path | None) -> None:
    """Check that files can be written, before minutes of work."""
    for path in filter(None, paths):
        if not path.parent.is_dir():
            raise InputError(explain("file", str(path), "its folder does not exist", f"mkdir -p {path.parent} first"))
        is_new = not path.exists()
        with path.open("a"):  # raises if it cannot be written
            pass
        if is_new:
            path.unlink()


def _present(device: str | None) -> str:
    """Return the device asked for. By default it is a GPU if there is one, else the CPU."""
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    device = device or ("cuda" if gpus else "cpu")
    present = ("cpu", "cuda", *gpus) if gpus else ("cpu",)
    if device not in present:
        raise InputError(explain("device", device, "PyTorch finds no such device", present))
    return device


@app.command()
def tune(
    *,
    kernel: Annotated[
        list[str],
        typer.Option(
            help="Queries and keys of the filter before the softmax, such as 6,11; none: no convolution; repeatable.",
            metavar="CQ,CK|none",
        ),
    ],
    head_dim: Annotated[
        list[int],
        typer.Option(help="Elements of a query, key or value vector: a multiple of 8 from 16 to 256; repeatable."),
    ],
    causal: Annotated[
        bool, typer.Option("--causal/--non-causal", help="Hide keys after the query, or show all keys.")
    ] = True,
    dtype: Annotated[
        str, typer.Option(help="Data type of queries, keys and values.", metavar="|".join(DTYPES))
    ] = "bf16",
    mixed_heads: Annotated[
        int | None,
        typer.Option(help="Size of the groups of heads that are mixed before the softmax.", show_default="no mixing"),
    ] = None,
    post_kernel: Annotated[
        str,
        typer.Option(
            help="Queries and keys of the filter after the softmax; none: no convolution.", metavar="CQ,CK|none"
        ),
    ] = "none",
    post_mixed_heads: Annotated[
        int | None,
        typer.Option(help="Size of the groups of heads that are mixed after the softmax.", show_default="no mixing"),
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Backend to tune; repeatable.", metavar="cuda|triton", show_default="both")
    ] = None,
    limit: Annotated[
        int,
        typer.Option(help="Number of candidates to time for each decision, cheapest first by the cost model.", min=1),
    ] = 8,
    jobs: Annotated[int, typer.Option(help="Processes that compile Triton kernels.", min=1)] = 8,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Table file to add the fastest candidates to, in the format of the tables in the package.",
            dir_okay=False,
        ),
    ] = None,
    as_json: Annotated[
        Path | None,
        typer.Option("--json", help="File to write the time of every candidate to, as JSON.", dir_okay=False),
    ] = None,
) -> None:
    """Time the planner's candidates on this GPU and store the fastest, which later builds use.

    The table also shows how well the cost model predicted the order: Spearman's rank correlation of cost and time.
    """
    from rich.progress import Progress

    from . import tuning
    from .planner.choice import GENERATED
    from .planner.passes import describe
    from .runtime.devices import local_target

    _check_writable(as_json, table)
    if unknown := set(backend or ()) - set(GENERATED):
        raise SpecError(explain("backend", unknown.pop(), "has no kernels to tune", GENERATED))
    others: dict[str, Any] = {
        "mixed_heads": mixed_heads,
        "post_kernel": post_kernel,
        "post_mixed_heads": post_mixed_heads,
    }
    specs = [_spec(one, dim, causal=causal, dtype=dtype, **others) for one in kernel for dim in head_dim]
    target = local_target()
    tuning.check_backends(backend)  # before a bar is drawn
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("timing candidates", total=None)
        found = tuning.tune(
            specs,
            target,
            backends=backend,
            limit=limit,
            jobs=jobs,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _print_table(("decision", "fastest", "ms", "planned first", "ms", "rank correlation"), tuning.report(found))
    for failed in found.failed:
        typer.echo(f"did not run: {failed.key}, {describe(failed.fields)}: {failed.error}")
    typer.echo(f"mean rank correlation {tuning.mean_rank_correlation(found.timings):.2f}")
    try:
        tuning.keep(specs, target, found.table)
    finally:  # the times are useful even if the fastest candidate is not accurate
        if as_json:
            as_json.write_text(json.dumps(tuning.to_dict(found), indent=1) + "\n")
    if table:
        tuning.export(found.table, table)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    print_table(Table(title, columns, [*rows], keys=1), open_console())
