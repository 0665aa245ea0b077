"""What the timed benchmarks share: the machine they ran on, and a JSON that grows case by case."""

import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(names),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_cases(
    cases: Iterable[Any],
    measure: Callable[[Any], dict[str, Any]],
    table: Callable[[dict[str, Any]], str],
    *,
    device: str = "cpu",
    output: Path | None = None,
) -> None:
    """Measure every case; print each, write what there is after each, and print the table."""
    report: dict[str, Any] = {"machine": machine(device), "command": sys.argv[1:], "cases": []}
    print(json.dumps(report["machine"]))
    for case in cases:
        report["cases"].append(measure(case))
        print(json.dumps(report["cases"][-1]), flush=True)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
