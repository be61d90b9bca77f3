"""The plot: time and bus bandwidth against size, a line for each library."""

from __future__ import annotations

from pathlib import Path

from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import Case
from mpicomm.bench.results import Results

_STYLES = {"out-of-place": "-", "in-place": "--"}


def lines_of(results: Results) -> dict[tuple[str, str], list[tuple[Case, Outcome]]]:
    """Return the points of each line, mpicomm's line first, by contender and place."""
    found: dict[tuple[str, str], list[tuple[Case, Outcome]]] = {}
    for row in results.rows:
        for place, outcomes in row.outcomes.items():
            for name, outcome in outcomes.items():
                found.setdefault((name, place), []).append((row.case, outcome))
    return dict(sorted(found.items(), key=lambda entry: entry[0][0] != results.own))


def draw(results: Results, path: Path, title: str) -> None:
    """Draw into a file. Its suffix names the format."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    figure, (times, bandwidths) = pyplot.subplots(1, 2, figsize=(14, 6))
    colors: dict[str, str] = {}
    for (name, place), points in lines_of(results).items():
        color = colors.setdefault(name, f"C{len(colors)}")
        style = {
            "color": color,
            "linestyle": _STYLES[place],
            "marker": ".",
            "label": f"{name} {place}",
            "linewidth": 2.5 if name == results.own else 1.2,
        }
        sizes = [case.nbytes for case, _ in points]
        times.plot(sizes, [outcome.time_us for _, outcome in points], **style)
        bandwidths.plot(sizes, [case.busbw_gb_s(outcome.time_us) for case, outcome in points], **style)
    for axes, label in ((times, "time (us)"), (bandwidths, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("size (bytes)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    times.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
