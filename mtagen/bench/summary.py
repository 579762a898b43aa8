"""Summaries of the runs on one device: tables of pages, each as Markdown, or empty if nothing was
measured.

``benchmarks/render.py`` defines the pages and the goals that they state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import NamedTuple

from ..measure.cases import LENGTH, PAPER, SCALES, Case, Sizes
from ..spec import Spec
from . import columns
from .columns import NOTHING, Column, figure, figures_of, number, ratio, table_of_cases
from .expressions import name_expression
from .names import (
    BACKENDS,
    FLEX,
    OURS,
    PEERS,
    SAME_MATH,
    SDPA,
    name_data,
    name_kernel,
    name_mask,
    name_size,
    short_name,
)
from .runs import (
    Measured,
    Results,
    Row,
    Rows,
    Run,
    fastest,
    is_a_layer,
    is_the_papers,
    merge,
    predicted,
    skipped,
    smallest_batches,
    source,
    typical_length,
)
from .tables import Table, to_markdown

PREDICTED = "predicted"  # a peer of goals: the contender's own time at the case's base, scaled by the pairs that count
AUTHORS = '"authors" is the order of operations of the authors\' code'


class Part(NamedTuple):
    """A part of a device's section.

    Attributes:
        write: returns the text for merged runs.
        key: the measurement that it shows.
        names: the contenders that should come from one run; () for all.
        suite: the suite whose runs are preferred.
    """

    write: Callable[[Results], str]
    key: str = "ms"
    names: Collection[str] = ()
    suite: str = ""


def written(runs: Collection[Run], parts: Iterable[Part]) -> list[str]:
    """Return the parts of a device's section for which its runs have measurements."""
    return [text for part in parts if (text := part.write(merge(runs, part.key, part.names, part.suite)))]


def figures_head(results: Results) -> str:
    """Return a description of the figures' case: a training step of the paper's kernel."""
    _, cases = _at_typical_length(_training_steps(results))
    if not cases:
        return ""
    case = _widest(cases)
    sizes = f"N = {case.sizes.nk}, B = {case.sizes.batch}, d = {case.spec.head_dim}, {_common(cases)}"
    return f"forward + backward of an op that convolves {name_kernel(case).replace(',', ' x ')} scores, causal, {sizes}"


def speedup_figure(results: Results) -> str:
    """Return the speedup of a training step of the paper's kernel over the fastest PyTorch
    contender.
    """

    def times(rows: Rows) -> str:
        return ratio(fastest(rows, SAME_MATH), _ours(rows), digits=0)

    return _figure(
        results, SAME_MATH, times, "**{value} times as fast** as PyTorch: {ours} ms instead of {peers}", "ms"
    )


def plain_figure(results: Results) -> str:
    """Return the time of a training step of the paper's kernel over that of the fastest plain
    attention.
    """

    def times(rows: Rows) -> str:
        return ratio(_ours(rows), fastest(rows, SDPA), digits=1)

    sentence = "**{value} times the time of plain attention**, which has no convolution: {ours} ms instead of {peers}"
    return _figure(results, SDPA, times, sentence, "ms")


def memory_figure(results: Results) -> str:
    """Return the peak memory of a training step of the paper's kernel."""

    def mebibytes(rows: Rows) -> str:
        return figure(_ours(rows), "peak_MiB")

    sentence = (
        "**{value} MiB** beyond inputs, output and gradients instead of {peers}: memory grows with N, not its square"
    )
    return _figure(results, SAME_MATH, mebibytes, sentence, "peak_MiB")


def paper_table(results: Results) -> str:
    """Return a table of the passes of the paper's kernel against plain attention and the machine's
    roofline.
    """
    cases = _select(results, lambda case: is_the_papers(case) and case.sizes.batch == 1 and not case.decodes)
    n, cases = _at_typical_length(cases)
    sdpa = _present(cases, SDPA)
    shown = [
        columns.HEAD_DIM,
        columns.PASS,
        Column("mtagen, ms", lambda case, rows: figure(_ours(rows))),
        Column("backend", lambda case, rows: short_name(_ours(rows)["contender"])),
        *(_ours_over(name) for name in sdpa),
        Column("of the roofline", lambda case, rows: _percent(_ours(rows).get("fraction"))),
    ]
    title = f"(6, 11), causal, N = {n}, B = 1, {_common(cases)}; medians, multiples of plain attention's "
    title += "time, and the fraction of the speed that this machine's roofline allows for the plan's flop and bytes"
    return _write_cases(title, shown, cases, (*OURS, *SDPA))


def peers_table(results: Results) -> str:
    """Return a table of training steps of the paper's kernel against contenders that materialise
    scores.
    """
    cases = {case: found for case, found in _training_steps(results).items() if fastest(found.rows, PEERS)}
    peers = _present(cases, PEERS)
    shown = [
        columns.HEAD_DIM,
        columns.LENGTH,
        columns.BATCH,
        Column("mtagen, ms", lambda case, rows: figure(_ours(rows))),
        *(figures_of(name, f"{name}, ms") for name in peers),
        Column("speed-up over the best of them", lambda case, rows: ratio(fastest(rows, PEERS), _ours(rows), digits=1)),
    ]
    title = f"Forward + backward against PyTorch, (6, 11), causal, {_common(cases)}"
    title += (
        ". Liger-Kernel's op is another operation: its convolution follows the softmax" if PEERS[-1] in peers else ""
    )
    return _write_cases(title, shown, cases, PEERS)


def layers_table(results: Results) -> str:
    """Return a table of the layers of the paper's models, which have other stages than a
    convolution before the softmax.
    """
    layers = _select(results, is_a_layer)
    cases = {case: found for case, found in layers.items() if fastest(found.rows, (*SAME_MATH, *SDPA))}
    plain = _present(cases, ("sdpa cudnn", "sdpa"))[:1]
    peers = _present(cases, SAME_MATH)
    best = Column("speed-up over the best of them", lambda case, rows: ratio(fastest(rows, SAME_MATH), _ours(rows), 1))
    dtypes = {case.spec.dtype for case in cases}
    shown = [
        columns.STAGES,
        *([Column("dtype", lambda case, rows: case.spec.dtype)] if len(dtypes) > 1 else []),
        columns.HEAD_DIM,
        columns.LENGTH,
        columns.BATCH,
        columns.PASS,
        Column("mtagen, ms", lambda case, rows: figure(_ours(rows))),
        *(_ours_over(name) for name in plain),
        *(figures_of(name, f"{name}, ms") for name in peers),
        *([best] if peers else []),
        *_our_memory(cases),
    ]
    title = f"Stages before | after the softmax, causal, {_common(cases)}"
    title += f"; {AUTHORS}" if "authors" in peers else ""
    return _write_cases(title, shown, cases, (*OURS, *SAME_MATH))


def slow_cases(results: Results) -> str:
    """Return a list of cases whose training step is slower than in plain PyTorch."""
    steps = _select(results, lambda case: case.pass_name == "forward+backward" and not _expression(case))
    compared = {case: found for case, found in steps.items() if fastest(found.rows, SAME_MATH)}
    if not compared:
        return ""
    slow = [
        f"{name_mask(case)} {name_size(case)} d={case.spec.head_dim} ({ratio(_ours(rows), plain)})"
        for case, (rows, *_) in compared.items()
        if (plain := fastest(rows, SAME_MATH)) and _ours(rows)["ms"] > plain["ms"]
    ]
    verdict = f"{len(slow) or 'none'} of {len(compared)} cases"
    listed = ":\n" + ",\n".join(slow) if slow else ""
    peers = " or ".join(_present(compared, SAME_MATH))
    return f"Forward + backward is slower than {peers} in {verdict}{listed}.\n\n{_sources(compared)}"


def kernels_table(results: Results) -> str:
    """Return a table of forward and backward of all kernels on each backend."""
    steps = ("forward", "backward")
    cases = _select(
        results,
        lambda case: (
            case.spec.weight_names == ("weight",)
            and case.pass_name in steps
            and case.sizes.batch == 1
            and case.base == case
        ),
    )
    n, cases = _at_typical_length(cases)
    backends, peer = _present(cases, BACKENDS), _present(cases, ("sdpa cudnn", "sdpa"))[:1]
    lines: dict[tuple[str, str, str], dict[str, str]] = {}
    for case, (rows, *_) in cases.items():
        line = lines.setdefault((str(case.spec.kernel), name_mask(case), str(case.spec.head_dim)), {})
        for name in backends:
            ours = rows.get(name)
            line[f"{case.pass_name}, {short_name(name)}"] = " ".join(
                [figure(ours), *(f"({ratio(ours, rows.get(plain))})" for plain in peer if ours)]
            )
    pivoted = [f"{step}, {short_name(name)}" for step in steps for name in backends]
    title = f"All kernels, N = {n}, B = 1, {_common(cases)}; ms" + "".join(f" (/ {name})" for name in peer)
    body = [[*key, *(line.get(column, NOTHING) for column in pivoted)] for key, line in lines.items()]
    return _write(Table(title, ["kernel", "mask", "d", *pivoted], body), cases, backends)


def lengths_table(results: Results) -> str:
    """Return a table of time and memory of training steps of the paper's kernel over N."""
    cases = _training_steps(results)
    d = _widest(cases).spec.head_dim if cases else 0
    cases = _select(cases, lambda case: case.spec.head_dim == d)
    plain = _present(cases, ("sdpa cudnn", "sdpa"))
    shown = [
        columns.LENGTH,
        columns.BATCH,
        Column("mtagen, ms", lambda case, rows: figure(_ours(rows))),
        *(figures_of(name, f"{name}, ms") for name in plain),
        *_our_memory(cases),
    ]
    title = f"Forward + backward over N, (6, 11), causal, d = {d}, {_common(cases)}"
    return _write_cases(title, shown, cases, plain)


def memory_table(results: Results) -> str:
    """Return a table of the peak memory of one sequence."""
    cases = _select(_training_steps(results), lambda case: case.sizes.batch == 1)
    names = _present(cases, (*OURS, *PEERS, *SDPA))
    shown = [columns.LENGTH, columns.HEAD_DIM, *(figures_of(name, name, "peak_MiB") for name in names)]
    title = "Peak MiB of forward + backward beyond inputs, output and gradients, (6, 11), causal, B = 1, "
    return _write_cases(title + _common(cases), shown, cases, names)


def decode_table(results: Results) -> str:
    """Return a table of decode on each backend against plain attention."""
    cases = _select(results, lambda case: is_the_papers(case) and case.decodes)
    backends, peer = _present(cases, BACKENDS), _present(cases, ("sdpa flash", "sdpa"))[:1]
    shown = [columns.BATCH, columns.CACHE_LENGTH, columns.HEAD_DIM, columns.KV_HEADS, columns.NEW_TOKENS]
    for name in backends:
        shown += [figures_of(name, f"{short_name(name)}, ms"), figures_of(name, "GB/s", "gbps")]
        shown += [_over(name, plain) for plain in peer]
    shown += [figures_of(plain, f"{plain}, ms") for plain in peer]
    return _write_cases(f"Decode, (6, 11), {_common(cases)}", shown, cases, (*backends, *peer))


def data_table(results: Results) -> str:
    """Return a table of windows and dropout against the cases without, and of packed documents
    against separate calls.
    """
    cases = _select(results, lambda case: case.base != case and not _expression(case))
    backends = _present(cases, BACKENDS)
    others = {name: _present(cases, (f"{name} one by one", f"{name} padded")) for name in backends}

    shown = [
        columns.STAGES,
        Column("data", lambda case, rows: name_data(case)),
        *(columns.HEAD_DIM, columns.LENGTH, columns.BATCH, columns.PASS),
    ]
    for name in backends:
        shown += [figures_of(name, f"{short_name(name)}, ms"), _over_base(PREDICTED, cases, methodcaller("get", name))]
        shown += [_over(name, peer)._replace(name=f"/ {short_name(peer)}") for peer in others[name]]
    title = (
        f"Windows, packed documents and dropout, causal, {_common(cases)}; predicted is the time without window and "
    )
    title += (
        "dropout, times the fraction of pairs (query, key) that count; the longest of B packed documents has N tokens"
    )
    return _write_cases(title, shown, cases, (*backends, *(peer for peers in others.values() for peer in peers)))


def scores_table(results: Results) -> str:
    """Return a table of score expressions and sinks against the cases without, FlexAttention, and
    plain PyTorch.
    """
    cases = _select(results, lambda case: bool(_expression(case)))
    peers = _present(cases, (FLEX, *SAME_MATH))

    shown = [
        Column("expression", lambda case, rows: _expression(case)),
        columns.KERNEL._replace(cell=lambda case, rows: name_kernel(case.base)),
        *(columns.HEAD_DIM, columns.PASS),
        Column("mtagen, ms", lambda case, rows: figure(_ours(rows))),
        Column("backend", lambda case, rows: short_name(_ours(rows)["contender"])),
        _over_base("without", cases, _ours),
    ]
    for name in peers:
        shown += [figures_of(name, f"{name}, ms"), _over_base("without", cases, methodcaller("get", name))]
    title = f"Score expressions and sinks, causal, B = 1, {_common(cases)}; FlexAttention computes plain attention only"
    return _write_cases(title, shown, cases, (*OURS, *peers))


def overhead_table(results: Results, max_cpu_us: float) -> str:
    """Return a table of the cost of a forward call on short sequences: CPU time, which has a goal,
    and CUDA-graph time.
    """
    cases = _select(results, lambda case: case.pass_name == "forward")
    if not cases:
        return ""
    lines = [
        [
            *(str(case.spec.kernel), str(case.spec.head_dim), str(case.sizes.nk), str(case.sizes.batch)),
            short_name(name),
            *(figure(rows[name], key) for key in ("ms", "graph_ms", "cpu_us")),
        ]
        for case, (rows, *_) in cases.items()
        for name in OURS
        if name in rows
    ]
    header = ["kernel", "d", "N", "B", "backend", "ms", "in a CUDA graph, ms", "us to issue a call"]
    served = ("mtagen auto", *BACKENDS)  # where auto equals a backend's contender it is none; on an H200, CUDA's
    longest = max(next(rows[name] for name in served if name in rows)["cpu_us"] for rows, *_ in cases.values())
    verdict = f"{'met' if longest <= max_cpu_us else '**not met**'}, up to {number(longest)} us"
    limit = f"the goal is that the CPU issues a call of auto in {max_cpu_us:g} us: {verdict}"
    return _write(Table(f"Forward of short sequences, {_common(cases)}; {limit}", header, lines), cases, ())


class Goal(NamedTuple):
    """An upper limit of a contender's time over a peer's, at the GPU's usual heads and dtype.

    The peer is a contender, or ``PREDICTED``.
    """

    contender: str
    step: str
    head_dim: int
    limit: float
    batch: int = 1
    n: int = LENGTH
    causal: bool = True
    kernel: tuple[int, int] | None = PAPER
    peer: str = "sdpa cudnn"
    mixed_heads: int | None = None
    post_kernel: tuple[int, int] | None = None
    post_mixed_heads: int | None = None
    window: tuple[int, int] = (-1, -1)
    packed: bool = False
    dropout: bool = False

    @property
    def case(self) -> Case:
        """The case at which both are timed; decode has one new token."""
        scale, rows = SCALES["cuda"], 1 if self.step == "decode" else self.n
        sizes = Sizes(self.batch, scale.heads, scale.heads, rows, self.n)
        spec = Spec(
            self.kernel,
            self.head_dim,
            causal=self.causal,
            dtype=scale.dtype,
            mixed_heads=self.mixed_heads,
            post_kernel=self.post_kernel,
            post_mixed_heads=self.post_mixed_heads,
            window=self.window,
            packed=self.packed,
            dropout=self.dropout,
        )
        return Case(spec, sizes, self.step)

    def times(self, found: Measured) -> tuple[Row | None, Row | None]:
        """Return the times of the contender and the peer from one run."""
        ours = found.rows.get(self.contender)
        if self.peer == PREDICTED:
            return ours, predicted(self.case, self.contender, found.cases)
        return ours, found.rows.get(self.peer)


def goals_table(results: Results, goals: Iterable[Goal]) -> str:
    """Return a table of the goals and whether they are met."""
    lines, cases = [], {}
    for goal in goals:
        found = results.get(goal.case)
        ours, peer = goal.times(found) if found else (None, None)
        measured, verdict = "not measured", NOTHING
        if found and ours and peer:
            cases[goal.case] = found
            measured = ratio(ours, peer, 2 if goal.limit >= 1 else 4)
            verdict = "yes" if ours["ms"] <= goal.limit * peer["ms"] else "**no**"
        step = ", ".join(filter(None, (goal.step, "" if goal.causal else name_mask(goal.case), name_data(goal.case))))
        sizes = [str(size) for size in (goal.head_dim, goal.batch, goal.n)]
        what = f"{goal.contender} / {goal.peer}"
        limit = f"{goal.limit:g}" if goal.limit >= 1 else f"1/{1 / goal.limit:g}"
        lines.append([what, name_kernel(goal.case), step, *sizes, limit, measured, verdict])
    header = ["times", "kernel, or stages", "pass", "d", "B", "N", "at most", "measured", "met"]
    return _write(Table("Goals, as multiples of a peer's time; causal, bf16", header, lines), cases, ())


def runs_table(runs: Mapping[Path, Run], link: Callable[[Path], str]) -> str:
    """Return a table of the runs with their command and machine;

    ``link`` returns the address of a run's file.
    """
    rows = [(f"[{run['name']}]({link(path)})", source(run), f"`{run['command']}`") for path, run in runs.items()]
    return to_markdown(Table("The runs", ("run", "device, versions, commit", "command"), rows)).rstrip()


def _select(results: Results, keep: Callable[[Case], bool]) -> Results:
    """Select from the cases at which mtagen was measured."""
    return {case: found for case, found in results.items() if keep(case) and fastest(found.rows, OURS)}


def _at_typical_length(results: Results) -> tuple[int, Results]:
    """Return one length, 0 without cases, and the cases with this length."""
    n = typical_length(results) if results else 0
    return n, {case: found for case, found in results.items() if case.sizes.nk == n}


def _training_steps(results: Results) -> Results:
    """Select forward + backward of the paper's kernel, causal, at the smallest batch of each
    length.
    """
    return smallest_batches(_select(results, lambda case: is_the_papers(case) and case.pass_name == "forward+backward"))


def _is_the_papers(case: Case) -> bool:
    return case.spec.kernel == PAPER and case.spec.convolves_only and case.causal and case.base == case


def _present(results: Results, names: Iterable[str]) -> list[str]:
    """Return the contenders that were measured at any of the cases."""
    return [name for name in names if any(name in found.rows for found in results.values())]


def _ours(rows: Rows) -> Row:
    """Return the fastest of mtagen's contenders at a selected case."""
    ours = fastest(rows, OURS)
    assert ours is not None
    return ours


def _figure(results: Results, peers: Sequence[str], value: Callable[[Rows], str], sentence: str, key: str) -> str:
    """Return a list item on a training step of the paper's kernel at the largest head dim; for
    others only the value.

    The sentence's fields are the value, and the ``key`` of ours and of the peers.
    """
    _, cases = _at_typical_length(_training_steps(results))
    compared = {case: found.rows for case, found in cases.items() if fastest(found.rows, peers)}
    if not compared:
        return ""
    case = _widest(compared)
    rows = compared[case]
    measured = " and ".join(f"{figure(rows[name], key)} ({name})" for name in peers if name in rows)
    told = sentence.format(value=value(rows), ours=figure(_ours(rows), key), peers=measured)
    others = [f"; {value(rows)} at d = {other.spec.head_dim}" for other, rows in compared.items() if other != case]
    return f"- {told}{''.join(others)}."


def _widest(cases: Iterable[Case]) -> Case:
    """Return the first case with the largest head dim."""
    return max(cases, key=lambda case: case.spec.head_dim)


def _our_memory(results: Results) -> list[Column]:
    """Return the column of mtagen's peak memory, if it was measured, as on a GPU."""
    measured = any(_ours(rows).get("peak_MiB") is not None for rows, *_ in results.values())
    return [Column("mtagen, peak MiB", lambda case, rows: figure(_ours(rows), "peak_MiB"))] if measured else []


def _ours_over(peer: str) -> Column:
    return Column(f"/ {peer}", lambda case, rows: ratio(_ours(rows), rows.get(peer)))


def _over(name: str, peer: str) -> Column:
    return Column(f"/ {peer}", lambda case, rows: ratio(rows.get(name), rows.get(peer)))


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _over_base(title: str, results: Results, row_of: Callable[[Rows], Row | None]) -> Column:
    """Return a column with a contender's time over what its time at the case's base predicts."""

    def cell(case: Case, rows: Rows) -> str:
        row = row_of(rows)
        return ratio(row, row and predicted(case, row["contender"], results[case].cases))

    return Column(f"/ {title}", cell)


def _expression(case: Case) -> str:
    return name_expression(case.spec, case.sizes.heads)


def _common(results: Results) -> str:
    """Return the number of heads and the dtypes of a table's cases; an empty string without cases."""
    if not results:
        return ""
    heads = next(iter(results)).sizes.heads
    return f"{heads} heads, {' or '.join(sorted({case.spec.dtype for case in results}))}"


def _write_cases(title: str, shown: Sequence[Column], results: Results, names: Iterable[str]) -> str:
    cases = {case: found.rows for case, found in results.items()}
    return _write(table_of_cases(title, shown, cases), results, names)


def _write(table: Table, results: Results, names: Iterable[str]) -> str:
    """Write a table, the skipped measurements of contenders ``names``, and the sources; empty
    without cases.
    """
    if not results:
        return ""
    return to_markdown(table._replace(notes=[*_skipped(results, names), _sources(results)]))


def _skipped(results: Results, names: Iterable[str]) -> list[str]:
    names = set(names)
    runs = {id(found.run): found.run for found in results.values()}.values()
    rows = [
        row
        for run in runs
        for row in run["results"]
        if row["contender"] in names and (found := results.get(Case.from_dict(row))) and found.run is run
    ]
    return [f"Skipped: {line}." for line in skipped(rows)]


def _sources(results: Results) -> str:
    """Return the runs that some cases are from."""
    names = dict.fromkeys(found.run["name"] for found in results.values())
    return f"({'Runs' if len(names) > 1 else 'Run'} {', '.join(names)}.)"
