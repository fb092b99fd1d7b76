"""A plan as text: the table of its workers, what shards cut, and the memory sheet."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from raypar.plan.ownership import STATE_KIND_NOUNS
from raypar.plan.wording import align_columns, count_noun
from raypar.planner.memory_sheet import KEPT_NOUNS
from raypar.schedule.offloading import describe_stages_not_worth_offloading
from raypar.schedule.recomputation import describe_stages_not_worth_recomputing

MOST_WHOLE_GROUPS = 8
"""Groups of layers that the line on what shards hold whole names; it says how many more there are."""
MOST_REASONS = 3
"""Most lines on why layers stay whole."""


SHARED_CACHES = (
    "layers were timed one at a time: workers that compute at once on one machine share its caches and memory bandwidth, and "
    "each is slower (measured: by 8 % for VGG, by 20 % for an Inception block)"
)
"""What a prediction does not count."""


def plan_as_text(found: dict[str, Any]) -> str:
    """The plan as text for the terminal. `found`: from `launch.plan_as_dict`."""
    workers = found["workers"]
    lines = [
        f"{found['plan']}, schedule {found['schedule']}, {found['microbatches']} microbatches in "
        f"{found['virtual_replicas']} blocks, {found['parameters']:,} parameters"
    ]
    rows: list[tuple[str, ...]] = [
        ("worker", "stages", "replica", "shard", "layers", "parameters", "MiB", "microbatches", "memory MiB")
    ]
    for worker in workers:
        layers = " + ".join(c[0] if len(c) == 1 else f"{c[0]} .. {c[-1]} ({len(c)})" for c in worker["layers"])
        memory = f"{found['memory_bytes'][worker['rank']] / 2**20:.1f}" if "memory_bytes" in found else ""
        rows.append(
            (
                str(worker["rank"]),
                " + ".join(",".join(map(str, role["stages"])) for role in worker["roles"]),
                " + ".join(str(role["replica"]) for role in worker["roles"]),
                " + ".join(map(shard_text, worker["roles"])) if any(map(is_cut, worker["roles"])) else "",
                layers,
                f"{worker['parameters']:,}",
                f"{worker['parameter_bytes'] / 2**20:.1f}",
                " + ".join(str(role["microbatches"]) for role in worker["roles"]),
                memory,
            )
        )
    if not any(is_cut(role) for worker in workers for role in worker["roles"]):
        rows = [row[:3] + row[4:] for row in rows]
    lines += align_columns(rows)
    lines += shard_lines(found)
    lines += recomputation_lines(found)
    lines += offloading_lines(found)
    if found["imbalance"] > 0.005:
        lines.append(
            f"the busiest worker has {100 * found['imbalance']:.0f} % more microbatches than its replicas have on average: "
            "let replicas divide microbatches and virtual_replicas"
        )
    idle = sum(all(role["microbatches"] == 0 for role in worker["roles"]) for worker in workers)
    if idle:
        lines.append(
            f"{idle} workers have no block: there are more replicas than virtual_replicas ({found['virtual_replicas']})"
        )
    if "predicted_ms" in found:
        lines.append(
            f"predicted step {found['predicted_ms']:.1f} ms, bubble {100 * found['bubble_of_total']:.1f} % of all time "
            f"(for {found['predicted_for']}; layers timed on this machine; {found['latency_ms']:.2f} ms and "
            f"{found['bandwidth_bytes_per_ms'] / 1e6:.2f} GB/s between workers)"
        )
        lines += [SHARED_CACHES] * found.get("workers_share_caches", False)
        lines += [*virtual_shards_lines(found), *branch_lines(found)]
        lines += ["", *memory_sheet_lines(found)]
    return "\n".join(lines)


def shard_lines(found: dict[str, Any]) -> list[str]:
    """What shards divide, what travels between them, and what is whole on each. `found`: from `launch.plan_as_dict`."""
    lines: list[str] = []
    if found.get("divides_samples"):
        mib = found["parameter_bytes"] / 2**20
        lines.append(
            "the shards divide the samples of each microbatch: every shard has all parameters, whose gradients (C_in C_out of "
            f"each layer, {mib:.1f} MiB in all) are summed once a step; outputs are gathered for the loss"
        )
    if found.get("cut"):
        lines.append(f"cut over shards (tensor parallel): {', '.join(group_similar_layers(found['cut']))}")
    lines += traffic_lines(found.get("travels", []))
    if any(role["shards"] > 1 for worker in found["workers"] for role in worker["roles"]):
        lines += stage_message_lines(found.get("between_stages", []))
    if found.get("whole_on_every_shard") and not found.get("divides_samples"):
        lines.append(whole_on_shards_line(found["whole_on_every_shard"], found["parameter_bytes"]))
        lines += why_whole_lines(found["whole_on_every_shard"], found["why_whole"])
    return lines


def is_cut(role: Mapping[str, Any]) -> bool:
    """Whether the layers of a role are cut into parts."""
    return role["shards"] > 1 or len(role["virtual_shards"]) > 1


def shard_text(role: Mapping[str, Any]) -> str:
    """Which shard a role is: `1 of 2`, with several virtual shards `1 of 2: 2 to 3`."""
    parts = role["virtual_shards"]
    shard = f"{role['shard']} of {role['shards']}" if is_cut(role) else "whole"
    return f"{shard}: {parts[0]} to {parts[-1]}" if len(parts) > 1 else shard


def virtual_shards_lines(found: dict[str, Any]) -> list[str]:
    """The line on what virtual shards cost; none where that was not measured. `found`: from `launch.plan_as_dict`."""
    if (price := found["price_of_virtual_shards"]) is None:
        return []
    return [
        f"virtual shards: a worker that computes all {found['virtual_shards']} takes {price:.2f} times as long for a "
        "microbatch as with whole layers (measured here)"
    ]


def recomputation_lines(found: dict[str, Any]) -> list[str]:
    """The line that says what is recomputed; none without recomputation. `found`: from `launch.plan_as_dict`."""
    if not found["recomputed"]:
        return []
    kept = describe_stages_not_worth_recomputing(found["stages_that_keep_activations"])
    return [f"plan.recompute names {found['recomputed']}{f'; {kept}' if kept else ''}"]


def offloading_lines(found: dict[str, Any]) -> list[str]:
    """The line that says what is offloaded; none without offloading. `found`: from `launch.plan_as_dict`."""
    if not found["offloaded"]:
        return []
    kept = describe_stages_not_worth_offloading(found["stages_that_offload_nothing"])
    return [f"plan.activations_in has activations of {found['offloaded']}{f'; {kept}' if kept else ''}"]


MUCH_FASTER = 1.03
"""Branches side by side are spoken of if they are so many times as fast as the plan."""


def branch_lines(found: Mapping[str, Any]) -> list[str]:
    """A line on parallel branches beside replicas, where the model has branches and one of them would be faster than the plan.

    `found`: from `launch.plan_as_dict`.
    """
    advice = found.get("branches")
    if advice is None:
        return []
    workers, count = advice["workers"], advice["microbatches"]
    branches_ms, replicas_ms, plan_ms = advice["branches_ms"], advice["replicas_ms"], advice["plan_ms"]
    few = f"there are fewer microbatches ({count}) than workers"
    many = f"there are as many microbatches ({count}) as workers, or more" if count >= workers else few
    if advice["is_placed"]:
        side_by_side = "this plan computes parallel branches side by side"
        because = f", for {many}" if advice["replicas_win"] == (count >= workers) else ""
        line = f"{side_by_side}: {workers} replicas would take {replicas_ms:.1f} ms a step{because}"
        if not advice["replicas_win"] and plan_ms >= MUCH_FASTER * branches_ms:
            line += f"; placed otherwise (plan.placements; --json names them), branches would take {branches_ms:.1f} ms"
        return [line]
    side_by_side = f"parallel branches, computed side by side by {workers} workers"
    if advice["replicas_win"]:
        return [f"{side_by_side}, would take {branches_ms:.1f} ms a step, {workers} replicas take {replicas_ms:.1f}: {many}"]
    if plan_ms < MUCH_FASTER * branches_ms:
        return []
    return [
        f"{side_by_side} (plan.placements; --json names them), would take {branches_ms:.1f} ms a step in the place of "
        f"{plan_ms:.1f}: {workers} replicas take {replicas_ms:.1f} ms, for {many}"
    ]


def memory_sheet_lines(found: dict[str, Any]) -> list[str]:
    """The memory sheet as a table, a line per worker; then what would fit, if the plan does not. `found`: from
    `launch.plan_as_dict`."""
    nouns: dict[str, str] = {**{str(kind): noun for kind, noun in STATE_KIND_NOUNS.items()}, **KEPT_NOUNS}
    sheets: list[dict[str, int]] = found["memory_sheet"]
    kinds = [kind for kind in sheets[0] if any(sheet[kind] for sheet in sheets)]
    rows = [("memory in MiB", *(nouns[kind] for kind in kinds), "in all")]
    for rank, sheet in enumerate(sheets):
        numbers = (*(sheet[kind] for kind in kinds), sum(sheet.values()))
        rows.append((f"worker {rank}", *(f"{nbytes / 2**20:.1f}" for nbytes in numbers)))
    lines = align_columns(rows, right_from=1)
    if in_files := max(found["mirror_file_bytes"]):
        lines.append(
            f"the mirror's copies lie in files (elastic.mirror_in): at most {in_files / 2**20:,.1f} MiB of a worker, no part "
            "of its memory"
        )
    if in_files := max(found["optimizer_file_bytes"]):
        lines.append(
            f"optimizer state lies in files (plan.optimizer_in): at most {in_files / 2**20:,.1f} MiB of a worker, of which the "
            "sheet has what is stepped together"
        )
    lines += gather_lines(found["gathers"])
    if in_files := max(found["activation_file_bytes"]):
        lines.append(
            f"activations lie in files (plan.activations_in): at most {in_files / 2**20:,.1f} MiB of a worker, no part of its "
            "memory"
        )
    lines += host_lines(found["activation_host_bytes"])
    lines += found["about_offloading"]
    lines += holders_lines(found["holders"])
    lines += [found["why_zero"]] if "why_zero" in found else []
    lines += found.get("about_saving", [])
    lines += gradient_lines(found)
    if "does_not_fit" in found:
        most, has = max(found["memory_bytes"]), found["does_not_fit"]["worker_bytes"]
        lines.append(
            f"this plan does not fit: worker {found['memory_bytes'].index(most)} needs {most / 2**20:,.1f} MiB, a worker has "
            f"{has / 2**20:,.1f} MiB; {found['does_not_fit']['advice']}"
        )
    return lines


def host_lines(on_host: Sequence[int]) -> list[str]:
    """The line on offloaded activations in the memory of GPUs' hosts. `on_host`: by worker, their bytes."""
    if not any(on_host):
        return []
    most, all_together = max(on_host) / 2**20, sum(on_host) / 2**20
    return [
        f"activations lie in the memory of the host (plan.activations_in: host), pinned: at most {most:,.1f} MiB of a worker, "
        f"{all_together:,.1f} MiB of all workers together, no part of a GPU's memory"
    ]


def gradient_lines(found: Mapping[str, Any]) -> list[str]:
    """A line on what scattered gradients send, and folded ones would; none of others. `found`: from `launch.plan_as_dict`."""
    sent = found.get("gradient_bytes")
    if sent is None or sent["route"] != "scatter":
        return []
    scatter, fold = (sent[route] / 2**20 for route in ("scatter", "fold"))
    return [f"gradients are scattered: replicas send {scatter:,.1f} MiB a step, {fold:,.1f} with plan.gradients=fold"]


def gather_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The line on what the gathers of parameters send in a step, of the worker that gets most. `rows`: from
    `launch.plan_as_dict`; empty: no replicas divide parameters."""
    if not rows:
        return []
    most = max(range(len(rows)), key=lambda rank: rows[rank]["received_bytes"])
    row = rows[most]
    mib, once_mib = row["received_bytes"] / 2**20, row["received_once_bytes"] / 2**20
    beside = "" if row["spans"] == ["step"] else f"; once a step (plan.gather: step) it would get {once_mib:,.1f} MiB"
    spans, times = " and ".join(row["spans"]), count_noun(row["gathers"], "gather")
    return [f"parameters are gathered by {spans}: worker {most} gets {mib:,.1f} MiB in a step, in {times}{beside}"]


def holders_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The largest worker with one holder of each part of divided state and with two, side by side, and what either costs after
    a loss. `rows`: from `launch.plan_as_dict`; empty: nothing is divided."""
    if not rows:
        return []
    mirrored = any(row["mirror"] for row in rows)
    table: list[tuple[str, ...]] = [
        ("holders of each part", *["mirror"] * mirrored, "divided state", *["the mirror's copies"] * mirrored, "largest worker")
    ]
    for row in rows:
        divided, copies, total = (f"{row[key] / 2**20:.1f}" for key in ("divided_bytes", "mirror_bytes", "memory_bytes"))
        mirror = "on" if row["mirror"] else "off"
        table.append((str(row["holders"]), *[mirror] * mirrored, divided, *[copies] * mirrored, total))
    loss = "all go back to the mirror's last copy" if mirrored else "the run ends, or begins again (`elastic`)"
    return [
        "",
        *align_columns(table, right_from=2 if mirrored else 1),
        f"in MiB; when one worker is lost: with one holder {loss}, with two the others go on, and nothing is run twice",
    ]


def whole_on_shards_line(whole: Mapping[str, int], parameter_bytes: int) -> str:
    """The largest layers of `whole_bytes_on_shards`, the MiB of all, and their share of the model's parameters."""
    groups = group_similar_layers(dict.fromkeys(whole, ""))
    more = f" and {len(groups) - MOST_WHOLE_GROUPS} more" if len(groups) > MOST_WHOLE_GROUPS else ""
    if whole and sum(whole.values()) >= parameter_bytes:
        return f"every shard has all parameters: {sum(whole.values()) / 2**20:.1f} MiB"
    mib = sum(whole.values()) / 2**20
    return (
        f"whole on every shard: {', '.join(groups[:MOST_WHOLE_GROUPS])}{more}; {mib:.{1 if mib >= 10 else 3}f} MiB in all, "
        f"{100 * sum(whole.values()) / max(1, parameter_bytes):.1f} % of the parameters"
    )


def why_whole_lines(whole: Mapping[str, int], reasons: Mapping[str, str]) -> list[str]:
    """A line for each reason why layers of `whole_bytes_on_shards` stay whole, with these layers; at most `MOST_REASONS`."""
    known = {name: reasons[name] for name in whole if name in reasons}
    alike: dict[str, list[str]] = {}
    for name, why in known.items():
        alike.setdefault(why, []).append(name)
    return [
        f"  {', '.join(group_similar_layers(dict.fromkeys(names, '')))}: {why}"
        for why, names in list(alike.items())[:MOST_REASONS]
    ]


MOST_TRAFFIC = 12
"""Most lines on what layers send over shards."""

_TRAFFIC_VERBS = {
    "all_reduce": "summed",
    "all_gather": "gathered",
    "reduce_scatter": "summed in parts",
    "all_to_all": "rows exchanged",
}


def traffic_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of what layers send over shards for each microbatch, layers whose names differ only in numbers as one line.

    `rows`: from `launch.plan_as_dict`.
    """
    groups: dict[tuple[Any, ...], list[Sequence[str]]] = {}
    for row in rows:
        names = tuple(re.sub(r"[0-9]+", "*", name) for name in row["layers"])
        value = ("gradient of the " if row["direction"] == "backward" else "") + row["value"]
        what = (row["dimension"], f"{value}, {_TRAFFIC_VERBS[row['operation']]}", row["formula"])
        groups.setdefault((names, what, row["numbers"], row["bytes"]), []).append(row["layers"])
    table: list[tuple[str, ...]] = [("travels for each microbatch", "divided", "value", "numbers", "")]
    for (_, what, numbers, nbytes), layers in list(groups.items())[:MOST_TRAFFIC]:
        name = ", ".join(_common_pattern(names) for names in zip(*layers, strict=True))
        size = "" if numbers is None else f"= {numbers:,}" + ("" if nbytes is None else f", {nbytes / 1024:,.1f} KiB")
        table.append((name + (f" ({len(layers)}, each)" if len(layers) > 1 else ""), *what, size))
    more = [f"and {len(groups) - MOST_TRAFFIC} more (--json has all)"] if len(groups) > MOST_TRAFFIC else []
    return [*align_columns(table), *more] if groups else []


def stage_message_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of what goes from stage to stage, and how much of it between nodes, if each replica has a node of its own.

    `rows`: from `launch.plan_as_dict`.
    """
    table: list[tuple[str, ...]] = [("travels between stages", "", "for each microbatch", "in a step", "between nodes")]
    for row in rows[:MOST_TRAFFIC]:
        times, kib = row["messages"], row["bytes"] / 1024
        step = f"{count_noun(times, 'message')}, {times * kib:,.1f} KiB" if times else "nothing: it is used where it is made"
        network = f"{row['network_bytes'] / 1024:,.1f} KiB" + ", in parts" * row["in_parts"]
        table.append((f"stage {row['from']} to stage {row['to']}", row["what"], f"{kib:,.1f} KiB", step, network))
    more = [f"and {len(rows) - MOST_TRAFFIC} more (--json has all)"] if len(rows) > MOST_TRAFFIC else []
    return [*align_columns(table), *more] if rows else []


def group_similar_layers(styles: Mapping[str, str]) -> list[str]:
    """Layers with their styles; names that differ only in numbers are grouped: `block*.fc1 column (4)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, style in styles.items():
        groups.setdefault((re.sub(r"[0-9]+", "*", name), style), []).append(name)
    return [
        f"{_common_pattern(names)} {style}".rstrip() + (f" ({len(names)})" if len(names) > 1 else "")
        for (_, style), names in groups.items()
    ]


def _common_pattern(names: Sequence[str]) -> str:
    """The names with `*` for each number in which they differ: `block*.fc1` for `block0.fc1` and `block1.fc1`."""
    texts, numbers = re.split(r"[0-9]+", names[0]), [re.findall(r"[0-9]+", name) for name in names]
    common = [found[0] if len(set(found)) == 1 else "*" for found in zip(*numbers, strict=True)]
    return "".join(part for pair in zip_longest(texts, common, fillvalue="") for part in pair)
