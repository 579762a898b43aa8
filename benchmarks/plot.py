"""Plot the committed results: times of one call as multiples of SDPA without convolution.

python benchmarks/plot.py        (needs matplotlib: pip install -e '.[bench]')
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    attention = json.loads((RESULTS / "h200_attention.json").read_text())
    decode = json.loads((RESULTS / "h200_decode.json").read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), width_ratios=(2.2, 1))
    names = list(attention["cases"])
    for offset, direction in ((-0.2, "forward"), (0.2, "backward")):
        ratios = [attention["cases"][name][f"{direction}/cudnn"] for name in names]
        bars = left.bar([i + offset for i in range(len(names))], ratios, 0.4, label=direction)
        left.bar_label(bars, fmt="%.1f", fontsize=8)
    left.axhline(1, color="black", linewidth=0.8)
    left.set_xticks(range(len(names)), names, fontsize=8)
    left.set_ylabel("time / SDPA cuDNN (no convolution)")
    left.set_title("N = 8192, 16 heads, causal, bf16", fontsize=10)
    left.legend()
    rows = decode["results"]
    bars = right.bar(range(len(rows)), [row["ratio"] for row in rows], 0.5, color="tab:green")
    right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.axhline(1, color="black", linewidth=0.8)
    labels = [f"B={row['batch']} d={row['dim']}\nNk={row['length'] // 1024}k" for row in rows]
    right.set_xticks(range(len(rows)), labels, fontsize=8)
    right.set_ylabel("time / SDPA flash decoding")
    right.set_title("(6, 11) decode, 16 heads, bf16", fontsize=10)
    environment = attention["environment"]
    caption = f"{environment['gpus'][0]['name']}, torch {environment['torch']}, triton {environment['triton']}, "
    figure.text(0.01, 0.01, caption + f"commits {attention['commit']}, {decode['commit']}", fontsize=7)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(RESULTS / "h200.png", dpi=130)


if __name__ == "__main__":
    main()
